"""What sequential steps let pass: said in words with the number, and doubted where no profile checked it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.serialiser import NotSerialised
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.monitor.background.calls import unserialised_notes
from overlap_callbacks.monitor.background.measurement import measure
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.window import MeasuredStep, MeasuredWindow
from tests.columns import columns
from tests.samples import aggregate_windows

MS = 1_000_000


def step(
    let_pass: Mapping[NotSerialised, int],
    mode: Mode = Mode.SEQUENTIAL,
    counted: bool = True,
    profile_index: int = -1,
    let_pass_bytes: int = 500,
) -> MeasuredStep:
    """A step of 1000 bytes, some of which were not serialised."""
    part = Part.TIMED if profile_index < 0 else Part.PROFILED
    plan = Plan(0, 1, part, 0, mode, mode, True, False)
    issued = Collective("allreduce_", Group("0", "", (0, 1), "nccl"), 1000, 1000, None, 0, -1, 0, 0)
    log = StepLog((issued,), 0, None, not_serialised=let_pass, not_serialised_bytes=let_pass_bytes if let_pass else 0)
    return MeasuredStep(plan=plan, start=0, end=MS, log=log, counted=counted, profile_index=profile_index)


def test_each_reason_is_a_sentence_with_the_number_a_step() -> None:
    steps = [step({NotSerialised.CAPTURE: 24, NotSerialised.OTHER_DEVICE: 1}), step({NotSerialised.OTHER_DEVICE: 2})]
    assert unserialised_notes(steps) == (
        "12 collectives a step were not serialised: a CUDA graph was being captured [OC323]",
        "1.5 collectives a step were not serialised: they were on another device than the one whose steps are timed "
        "[OC323]",
    )


def test_sends_and_receives_are_called_messages() -> None:
    (sentence,) = unserialised_notes([step({NotSerialised.SINGLE_MESSAGE: 8})])
    assert sentence.startswith("8 messages a step were not serialised: ")


def test_steps_that_are_overlapped_or_do_not_count_say_nothing() -> None:
    passed = {NotSerialised.CAPTURE: 12}
    assert unserialised_notes([step(passed, Mode.OVERLAPPED), step(passed, counted=False), step({})]) == ()
    assert unserialised_notes([]) == ()


def window_of(steps: list[MeasuredStep], profile: Any = None) -> RankWindow:
    closed = MeasuredWindow(
        number=0,
        first_step=0,
        steps=tuple(steps),
        complete=True,
        problems=(),
        opened_ns=0,
        wall_ms=5.0,
        clock=StepClock(),
        meter=None,
        profile=profile,
        missing_profile="",
    )
    # A whole window has step times of both modes.
    timed = (TimedBlock(Mode.OVERLAPPED, 0, (1.0,)), TimedBlock(Mode.SEQUENTIAL, 1, (1.0,)))
    return msgspec.structs.replace(measure(closed, rank=0, backend="nccl"), timed=timed)


def test_without_a_profile_a_window_whose_steps_let_collectives_pass_is_not_valid() -> None:
    window = window_of([step({NotSerialised.CAPTURE: 3})])
    (sentence,) = window.let_pass
    assert sentence.startswith("3 collectives a step were not serialised: a CUDA graph was being captured")
    report = aggregate_windows([window], world_size=1, every_n_steps=100)
    assert not report.valid
    assert report.problems == (f"{sentence}; no profile shows whether they ran during compute [OC324]",)
    assert aggregate_windows([window_of([step({})])], world_size=1, every_n_steps=100).valid


@pytest.mark.parametrize("let_pass_bytes", [0, 8])
def test_a_heartbeat_that_was_let_pass_is_a_note_without_a_profile_too(let_pass_bytes: int) -> None:
    heartbeat = {NotSerialised.SINGLE_MESSAGE: 1}
    report = aggregate_windows(
        [window_of([step(heartbeat, let_pass_bytes=let_pass_bytes)])], world_size=1, every_n_steps=100
    )
    assert report.valid
    assert [problem.split(":")[0] for problem in report.problems] == ["1 messages a step were not serialised"]
    assert not aggregate_windows(
        [window_of([step(heartbeat, let_pass_bytes=10)])], world_size=1, every_n_steps=100
    ).valid


def profiled_window() -> RankWindow:
    rows = [("gemm", Kind.COMPUTE, 0, 0, 1), ("gemm", Kind.COMPUTE, 1, 1, 2)]
    profile: Any = SimpleNamespace(kernels=lambda: columns(rows))
    steps = [step({}, Mode.OVERLAPPED, profile_index=0), step({NotSerialised.CAPTURE: 3}, profile_index=1)]
    return window_of(steps, profile)


def test_with_a_profile_of_sequential_steps_unserialised_notes_is_a_note() -> None:
    """The profile shows residual overlap, which decides then."""
    report = aggregate_windows([profiled_window()], world_size=1, every_n_steps=100)
    assert report.valid
    assert "3 collectives a step were not serialised: a CUDA graph was being captured [OC323]" in report.problems


def test_a_rank_whose_profile_is_lost_does_not_make_the_window_invalid() -> None:
    lost = msgspec.structs.replace(window_of([step({NotSerialised.CAPTURE: 3})]), rank=1)
    report = aggregate_windows([profiled_window(), lost], world_size=2, every_n_steps=100)
    assert report.valid
    assert "3 collectives a step were not serialised: a CUDA graph was being captured [OC323]" in report.problems
