"""What a rank reports of its recorded step."""

from __future__ import annotations

import dataclasses

import pytest

from overlap_callbacks.analysis.results.messages import NO_STAGE
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.monitor.background.calls import messages_of

DATA = Group("1", "DATA_PARALLEL_GROUP", (0, 2, 4, 6), "gloo", "data", 4)
PIPELINE = Group("2", "PIPELINE_MODEL_PARALLEL_GROUP", (0, 4), "gloo", "pipeline", 2)
EMBEDDING = Group("3", "EMBEDDING_GROUP", (0, 4), "gloo", "embedding", 2)


def call(operator: str, group: Group, bytes_in: int, bytes_out: int | None = None, peer: int = -1) -> Collective:
    return Collective(operator, group, bytes_in, bytes_in if bytes_out is None else bytes_out, None, 0, peer, 0, 0)


def log(*calls: Collective, dropped: int = 0) -> StepLog:
    return StepLog(calls, dropped, None)


CALLS = (
    call("allreduce_", DATA, 100),
    call("recv_", PIPELINE, 0, 64, peer=0),
    call("allreduce_", DATA, 127),
    call("_allgather_base_", DATA, 32, 128),
    call("allreduce_", EMBEDDING, 0),
    call("send", PIPELINE, 64, 0, peer=0),
)


def test_calls_are_added_up_by_operator_group_and_peer_with_their_sizes() -> None:
    found = messages_of(log(*CALLS), [], rank=4)
    assert found is not None
    assert (found.stage, found.num_steps, found.num_alike) == (1, 0, 0)
    rows = {(row.operator, row.dimension): row for row in found.rows}
    reduced = rows["allreduce_", "data"]
    assert (reduced.messages, reduced.bytes, reduced.ranks, reduced.group_size) == (2, 227, (0, 2, 4, 6), 4)
    assert reduced.sizes == ((6, 2, 227),)
    gathered = rows["_allgather_base_", "data"]
    assert (gathered.bytes, gathered.bytes_in, gathered.sizes) == (128, 32, ((7, 1, 128),))
    assert rows["send", "pipeline"].ranks == (4, 0)
    assert rows["recv_", "pipeline"].ranks == (0, 4)
    assert rows["allreduce_", "embedding"].sizes == ((-1, 1, 0),)


def test_a_rank_without_a_pipeline_has_no_stage_and_a_peer_that_is_not_known_no_ranks() -> None:
    found = messages_of(log(call("recv_any_source_", DATA, 0, 8)), [], rank=2)
    assert found is not None
    assert found.stage == NO_STAGE
    assert found.rows[0].ranks == ()


def test_groups_of_the_same_ranks_are_one_row() -> None:
    twin = dataclasses.replace(DATA, name="9")
    found = messages_of(log(call("allreduce_", DATA, 8), call("allreduce_", twin, 8)), [], rank=0)
    assert found is not None
    assert [(row.messages, row.bytes) for row in found.rows] == [(2, 16)]


@pytest.mark.parametrize("recorded", [None, log(*CALLS, dropped=1)])
def test_without_a_complete_recorded_step_there_are_no_messages(recorded: StepLog | None) -> None:
    assert messages_of(recorded, [log(*CALLS)], rank=4) is None


def test_steps_are_compared_with_the_recorded_one_whatever_the_order_of_threads() -> None:
    larger = (call("allreduce_", DATA, 101), *CALLS[1:])
    steps = [log(*CALLS), log(*reversed(CALLS)), log(*CALLS[:-1]), log(*CALLS, CALLS[0]), log(*larger)]
    found = messages_of(log(*CALLS), steps, rank=4)
    assert found is not None
    assert (found.num_steps, found.num_alike) == (5, 2)
