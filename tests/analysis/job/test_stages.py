"""The bubble of each stage, and the micro-batches by its messages."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import ModelShape
from overlap_callbacks.analysis.communication.predicted import predicted_messages
from overlap_callbacks.analysis.job.stages import MAX_STAGES, StageSum, add_stages, pipeline_bubble, stages_of
from overlap_callbacks.analysis.results.messages import NO_STAGE, RankMessages
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow
from tests.samples import window

GPT = ModelShape(layers=8, hidden=32, heads=4, sequence=8, vocabulary=64)


def block(arm: Mode, idle_ms: float, bubble_ms: float | None) -> ProfiledBlock:
    """60 ms of compute, and 30 of communication of which 20 are hidden."""
    return ProfiledBlock(arm, 0, 2, 60.0, 60.0, 30.0, 30.0, 20.0, 20.0, 0.0, 0.0, idle_ms, 110.0, bubble_ms)


def on_stage(stage: int, *blocks: ProfiledBlock) -> RankWindow:
    return msgspec.structs.replace(window(0), profiled=blocks, messages=RankMessages((), stage))


def test_a_ranks_bubble_is_that_of_its_overlapped_steps() -> None:
    blocks = (
        block(Mode.OVERLAPPED, 10.0, 15.0),
        block(Mode.OVERLAPPED, 30.0, 45.0),
        block(Mode.SEQUENTIAL, 90.0, 90.0),
    )
    assert stages_of(on_stage(2, *blocks)) == (StageSum(2, 1, 90_000_000, 30_000_000, 30_000_000),)
    assert stages_of(on_stage(NO_STAGE, *blocks)) == ()
    assert stages_of(on_stage(2, block(Mode.OVERLAPPED, 10.0, None))) == ()
    assert stages_of(msgspec.structs.replace(window(0), messages=None)) == ()


def test_ranks_of_a_stage_are_added_in_any_order_and_stages_are_bounded() -> None:
    rows = [(StageSum(stage, 1, 10 + stage, stage, 9),) for stage in (0, 1, 1, 2, 1)]
    expected = (StageSum(0, 1, 10, 0, 9), StageSum(1, 3, 33, 3, 27), StageSum(2, 1, 12, 2, 9))
    assert {add_stages(order) for order in itertools.permutations(rows)} == {expected}
    assert add_stages([add_stages(rows[:2]), add_stages(rows[2:])]) == expected
    assert len(add_stages([(StageSum(stage, 1, 1, 1, 1),) for stage in range(200)])) == MAX_STAGES


@pytest.mark.parametrize(
    ("sizes", "batches", "chunks", "fraction"),
    [
        ({"p": 4, "d": 2, "global_batch": 16}, 8, 1, 3 / 11),
        ({"p": 2, "t": 2, "global_batch": 4}, 4, 1, 1 / 5),
        ({"p": 4, "chunks": 2, "global_batch": 8}, 8, 2, 3 / 19),
        ({"p": 2, "chunks": 2, "global_batch": 4}, 4, 2, 1 / 9),
        ({"p": 2, "chunks": 4, "global_batch": 2}, 2, 4, 1 / 9),
    ],
)
def test_the_first_stages_messages_show_micro_batches_and_chunks(
    sizes: dict[str, Any], batches: int, chunks: int, fraction: float
) -> None:
    job = JobShape(model=GPT, **sizes)
    job.check()
    # With only two stages, the adapter must give the chunks: activations and gradients go to the same stage.
    sums = [
        StageSum(0, 2, 200_000_000, 40_000_000, 90_000_000, chunks),
        StageSum(1, 2, 200_000_000, 20_000_000, 90_000_000),
    ]
    found = pipeline_bubble(sums, predicted_messages(job), ())
    assert found is not None
    assert (found.num_stages, found.micro_batches, found.chunks) == (job.p, batches, chunks)
    assert found.expected_fraction == pytest.approx(fraction)
    assert [(stage.step_ms, stage.fraction) for stage in found.stages] == [(100.0, 0.2), (100.0, 0.1)]
    assert found.fraction == pytest.approx(0.15)


def test_chunks_that_do_not_fit_the_messages_give_no_micro_batches() -> None:
    job = JobShape(model=GPT, p=2, chunks=2, global_batch=4)  # 12 messages
    found = pipeline_bubble([StageSum(0, 1, 1, 1, 1, 4)], predicted_messages(job), ())
    assert found is not None
    assert (found.micro_batches, found.expected_fraction) == (None, None)


def test_the_chunks_of_a_rank_come_from_its_adapter() -> None:
    rank = msgspec.structs.replace(
        window(0), profiled=(block(Mode.OVERLAPPED, 10.0, 15.0),), messages=RankMessages((), 0, chunks=2)
    )
    assert [row.chunks for row in stages_of(rank)] == [2]
    assert [row.chunks for row in add_stages([(StageSum(0, 1, 1, 1, 1),), stages_of(rank)])] == [2]


def test_without_a_pipeline_or_a_profile_there_is_none() -> None:
    job = JobShape(model=GPT, p=2, global_batch=2)
    assert pipeline_bubble([], predicted_messages(job), ()) is None
    assert pipeline_bubble([StageSum(0, 1, 1, 1, 1)], None, ()) is None
    alone = predicted_messages(JobShape(model=GPT, d=2, global_batch=2))
    assert pipeline_bubble([StageSum(0, 1, 1, 1, 1)], alone, ()) is None
