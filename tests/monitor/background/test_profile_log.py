"""The gate's log of the profiled steps: which steps can be compared with the profile."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.serialiser import NotSerialised
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.monitor.background.profile_figures import profile_log
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.window import MeasuredStep


def step(index: int, log: StepLog, mode: Mode = Mode.SEQUENTIAL, *, counted: bool = True) -> MeasuredStep:
    plan = Plan(0, index, Part.PROFILED, index, mode, mode, True, last=False)
    return MeasuredStep(plan=plan, start=0, end=1, log=log, profile_index=index, counted=counted)


@pytest.mark.parametrize(
    ("log", "whole"),
    [
        (StepLog((), 0, None), True),
        (StepLog((), 0, None, not_serialised={NotSerialised.SINGLE_MESSAGE: 4}), True),
        (StepLog((), 0, None, captured=True), False),
        (StepLog((), 3, None), False),
        (StepLog((), 0, None, compiled=True), False),
    ],
    ids=["whole", "messages", "captured", "dropped", "compiled"],
)
def test_a_step_is_whole_if_each_of_its_collectives_must_have_a_kernel(log: StepLog, whole: bool) -> None:
    assert (0 in profile_log([step(0, log)], {0}).whole) is whole


def test_only_steps_that_count_are_compared_and_all_are_kept() -> None:
    empty = StepLog((), 0, None)
    steps = [step(0, empty, Mode.OVERLAPPED), step(1, empty), step(2, empty, counted=False)]
    log = profile_log(steps, {0, 1, 2})
    assert set(log.issued) == {0, 1, 2}
    assert log.whole == {0, 1}
    assert log.sequential == (1,)
    assert profile_log(steps, {0}).whole == {0}
    assert profile_log(steps, {0}).sequential == ()


CAPTURED = StepLog((), 0, None, captured=True)
COMPILED = StepLog((), 0, None, compiled=True)
LOST = StepLog((), 3, None)
WHOLE = StepLog((), 0, None)


@pytest.mark.parametrize(
    ("logs", "why"),
    [
        ([CAPTURED, CAPTURED], "a CUDA graph was captured"),
        ([COMPILED], "torch.compile compiled"),
        ([LOST], "collectives were lost from the log"),
        ([LOST, CAPTURED], "a CUDA graph was captured or collectives were lost from the log"),
    ],
)
def test_where_no_step_can_be_compared_the_log_says_so_and_why(logs: list[StepLog], why: str) -> None:
    log = profile_log([step(number, log) for number, log in enumerate(logs)], range(len(logs)))
    assert log.problems == (
        f"the gate's log could not be compared with the profile: in every profiled step {why} [OC371]",
    )


def test_where_a_step_can_be_compared_or_none_counts_there_is_no_problem() -> None:
    assert profile_log([step(0, CAPTURED), step(1, WHOLE)], {0, 1}).problems == ()
    assert profile_log([step(0, CAPTURED), step(1, WHOLE)], {0}).problems != ()
    assert profile_log([step(0, CAPTURED, counted=False)], {0}).problems == ()
    assert profile_log([], set()).problems == ()
