"""What causal windows delay first, by dimension, exposure and what was tested before; groups of other ranks."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.causal import levels_of, next_set, responses_of
from overlap_callbacks.analysis.results.causal import CausalWindow, DelayedCall, DelayedSet
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.delays import Delayable, delayable
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.calls import name_delayed
from overlap_callbacks.monitor.background.causes import Causes, by_dimension, encoded_calls, keys_of
from overlap_callbacks.monitor.background.submissions import Submissions
from overlap_callbacks.sinks import JsonlSink
from tests.report.runs import run_info
from tests.report.runs import window as window_report


def call(group: str, dimension: str, name: str, operator: str = "allreduce_", size: int = 100) -> Collective:
    of_group = Group(group, "", (0, 1), "nccl", dimension, 2)
    return Collective(operator, of_group, size, size, None, 0, -1, 0, 0, name=name)


# Two tensor-parallel groups of one stage, and a stage with other layers.
RANKS = [
    (call("7", "tensor", "layers.0"), call("1", "data", "bucket 0"), call("7", "tensor", "layers.0")),
    (call("8", "tensor", "layers.0"), call("2", "data", "bucket 0"), call("8", "tensor", "layers.0")),
    (call("9", "tensor", "layers.5"), call("3", "data", "bucket 0"), call("3", "data", "bucket 1")),
]


def test_groups_of_all_ranks_are_delayed_and_those_of_one_purpose_together() -> None:
    parts = [Submissions([], {}, [encoded_calls(delayable(of_rank))]) for of_rank in RANKS]
    causes = Causes(WindowBudget(None), chooses=True)
    causes.open(None, run_info())
    chosen = causes.choose(1, Submissions.merge(parts).delayable, 100.0)
    assert chosen is not None
    tensor = [("allreduce_", "tensor", 0, "layers.0"), ("allreduce_", "tensor", 1, "layers.0")]
    assert [msgspec.structs.astuple(member) for member in chosen.members] == [
        *tensor,
        ("allreduce_", "tensor", 0, "layers.5"),
    ]
    assert [keys_of(chosen, delayable(of_rank)) for of_rank in RANKS] == [
        {("allreduce_", "7", 0): "layers.0", ("allreduce_", "7", 1): "layers.0 #2"},
        {("allreduce_", "8", 0): "layers.0", ("allreduce_", "8", 1): "layers.0 #2"},
        {("allreduce_", "9", 0): "layers.5"},
    ]


def test_a_profiled_step_names_only_what_is_delayed_each_one_of_several_with_a_name() -> None:
    calls = [call("1", "data", "layers.3"), *[call("7", "other", "") for _ in range(30)], call("1", "data", "layers.3")]
    own = delayable(calls)
    members = tuple(member for member in own if (member.group, member.place) in (("data", 1), ("7", 4)))
    step: Any = SimpleNamespace(profile_index=0, log=SimpleNamespace(collectives=calls))
    name_delayed([step], keys_of(DelayedSet(members, 1.0), own))
    assert {at: of.name for at, of in enumerate(calls) if of.name} == {5: "all-reduce 5 of 7", 31: "layers.3 #2"}


def test_groups_of_no_known_dimension_are_told_apart() -> None:
    found = delayable([call("7", "other", ""), call("8", "other", "")])
    assert [member.group for member in found] == ["7", "8"]


CALLS = [Delayable(DelayedCall("allreduce_", "tensor", n), f"layers.{n}", 1000) for n in range(3)]
CALLS += [Delayable(DelayedCall("_allgather_base_", "data", n), f"layers.{n}", 10) for n in range(3)]


def test_the_exposed_come_first_then_those_of_most_bytes() -> None:
    assert [members[0].group for members in by_dimension(CALLS, {})] == ["tensor", "data"]
    exposed_ms = {("all_gather", "layers.2"): 3.0, ("all_gather", "layers.1"): 4.0, ("all_reduce", "layers.1"): 1.0}
    found = by_dimension(CALLS, exposed_ms)
    assert [members[0].group for members in found] == ["data", "tensor"]
    assert [member.place for member in found[0]] == [1, 2, 0]
    # A dimension that was tested before anything was known is halved in the new order; one that was halved keeps it.
    tested = tuple(one.call for one in CALLS[3:])
    assert by_dimension(CALLS, exposed_ms, [tested]) == found
    assert by_dimension(CALLS, exposed_ms, [tested, tested[:2]])[0] == tested
    assert by_dimension(CALLS, exposed_ms, [tested, tested[:2], tested[1:2]])[0] == (tested[1], tested[0], tested[2])


def test_sets_are_halved_alike_while_what_is_exposed_changes() -> None:
    calls = [Delayable(DelayedCall("allreduce_", "tensor", n), f"layers.{n}", 1000) for n in range(100)]
    chance, windows, tested = random.Random(0), [], []
    while True:
        exposed_ms = {("all_reduce", f"layers.{n}"): chance.random() for n in range(100)}
        chosen = next_set(by_dimension(calls, exposed_ms, tested), responses_of(windows), 100.0)
        if chosen is None:
            break
        assert set(chosen.members) not in [set(one) for one in tested]
        assert all(not set(one) & set(chosen.members) or set(one) >= set(chosen.members) for one in tested)
        tested.append(chosen.members)
        levels = levels_of(54, len(windows))
        blocks = any(call.place == 70 for call in chosen.members)
        step_ms = tuple([100.0 + blocks * level * chosen.delay_ms / 2 + chance.gauss(0, 0.1) for level in levels])
        windows.append(CausalWindow(window=len(windows), first_step=0, delayed=chosen, levels=levels, step_ms=step_ms))
    assert len(windows) < 30


@pytest.mark.parametrize("same_job", [True, False])
def test_a_resumed_job_goes_on_with_what_its_record_has(same_job: bool, tmp_path: Path) -> None:
    members = tuple(one.call for one in CALLS[:2])
    levels = levels_of(54)
    window = CausalWindow(
        window=1, first_step=0, delayed=DelayedSet(members, 10.0), levels=levels,
        step_ms=tuple([100.0 + 5 * level for level in levels]),
    )  # fmt: skip
    starts: list[RunInfo] = [run_info(), run_info() if same_job else msgspec.structs.replace(run_info(), world_size=99)]
    for run in starts:
        sink = JsonlSink(tmp_path)
        sink.open(run)
        if run is starts[0]:
            sink.log(window_report(0))
            sink.log_causal(window)
        sink.close()
    causes = Causes(WindowBudget(None), chooses=True)
    causes.open(sink.path, starts[1])
    chosen = causes.choose(1, [encoded()], 100.0)
    assert chosen is not None
    assert chosen.members == (members[:1] if same_job else members)


def test_a_window_of_the_usual_kind_has_the_slopes_so_far(tmp_path: Path) -> None:
    member, levels = DelayedCall("_reduce_scatter_base_", "data", 0, "layers.0"), levels_of(54)
    window = CausalWindow(
        window=1, first_step=0, delayed=DelayedSet((member,), 10.0), levels=levels,
        step_ms=tuple([100.0 + 5 * level for level in levels]),
    )  # fmt: skip
    for start in range(2):
        sink = JsonlSink(tmp_path)
        sink.open(run_info())
        if start == 0:
            sink.log(window_report(0))
            sink.log_causal(window)
        sink.close()
    causes = Causes(WindowBudget(None), chooses=True)
    causes.open(sink.path, run_info())
    found = causes.note(window_report(1)).exposure
    assert found is not None
    assert {row.name: row.blocking for row in found.names} == {
        "layers.0": pytest.approx(1.0), "layers.7.mlp.linear_fc2": None,
    }  # fmt: skip


def encoded() -> bytes:
    return encoded_calls(delayable([call("7", "tensor", ""), call("7", "tensor", "")]))
