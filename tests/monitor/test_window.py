"""A window's profiler may fail: then kernel times are missing, and everything else goes on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.switches import SwitchState
from overlap_callbacks.instruments import profiler
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.monitor.background.measurement import measure
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.window import Window
from tests.monitor.fakes import EMPTY_LOG, FakeGate


def profiled() -> Window:
    """A window of two profiled steps, without training."""
    window = still_profiling(2)
    window.close(complete=True)
    return window


def still_profiling(num_steps: int = 1) -> Window:
    window = Window(0, 0, FakeGate(), SwitchState())  # type: ignore[arg-type]
    for number in range(num_steps):
        window.begin_step(Plan(0, number, Part.PROFILED, number, Mode.OVERLAPPED, Mode.OVERLAPPED, True, False), None)
        torch.ones(4).cos()
        window.end_step()
    return window


def steps_of(quiet: list[bool]) -> Window:
    """Profiled steps, a warm-up step before each one that counts; whether nothing is in flight at the end of each."""
    gate = FakeGate()
    window = Window(0, 0, gate, SwitchState())  # type: ignore[arg-type]
    for number, is_quiet in enumerate(quiet):
        gate.log = dataclasses.replace(EMPTY_LOG, quiet=is_quiet)
        plan = Plan(0, number, Part.PROFILED, number // 2, Mode.OVERLAPPED, Mode.OVERLAPPED, bool(number % 2), False)
        window.begin_step(plan, None)
        torch.ones(4).cos()
        window.end_step()
    window.close(complete=True)
    return window


def test_warm_up_steps_are_recorded_only_until_steps_are_known_to_leave_nothing_in_flight() -> None:
    quiet = steps_of([True] * 8)
    assert [step.profile_index for step in quiet.steps] == [0, 1, -1, 2, -1, 3, -1, 4]
    assert [step.counted for step in quiet.steps] == [False, True] * 4
    assert quiet.profile is not None
    kernels = quiet.profile.kernels()
    assert sorted(set(kernels.step.tolist()) - {-1}) == [0, 1, 2, 3, 4]
    busy = steps_of([True, False, True, True, True, True])
    assert [step.profile_index for step in busy.steps] == [0, 1, 2, 3, 4, 5]
    assert quiet.problems == busy.problems == []


def test_a_step_does_not_count_if_the_unrecorded_one_before_it_left_something_in_flight() -> None:
    closed = steps_of([True, True, False, True, True, True])
    assert [step.profile_index for step in closed.steps] == [0, 1, -1, 2, 3, 4]
    assert [step.counted for step in closed.steps] == [False, True, False, False, False, True]
    assert closed.problems == [
        "a profiled step was left out: the step before it had left collectives in flight [OC346]"
    ]


def fail(*_: object) -> None:
    raise RuntimeError("no device")


class OfADevice(Profile):
    """A profile of a device, whatever the window asks for."""

    def __init__(self, on_cuda: bool) -> None:
        super().__init__(on_cuda=True)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the profiler can start here")
def test_a_build_whose_profiler_knows_no_device_loses_only_kernel_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap_callbacks.monitor.window.Profile", OfADevice)
    closed = profiled()
    assert closed.profile is None
    assert closed.missing_profile.startswith(
        "kernel times are missing: torch's profiler could not start (AssertionError"
    )
    assert closed.problems == [closed.missing_profile]
    assert len(measure(closed, rank=0, backend="gloo").problems) == 1
    assert Profile.available()


@pytest.mark.parametrize(
    ("call", "why", "code"),
    [("_enable_profiler", "could not start", "OC356"), ("_disable_profiler", "failed", "OC357")],
)
def test_a_profiler_that_raises_loses_only_kernel_times_and_leaves_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch, call: str, why: str, code: str
) -> None:
    real = getattr(torch.autograd.profiler, call)
    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd.profiler, call, fail)
        closed = profiled()
    assert closed.profile is None
    assert closed.problems == [f"kernel times are missing: torch's profiler {why} (RuntimeError: no device) [{code}]"]
    assert len(closed.steps) == 2
    if call == "_disable_profiler":
        real()  # what failed above, so that the session ends
    torch.autograd.profiler._is_profiler_enabled = False
    again = profiled()
    assert again.problems == []
    assert again.profile is not None
    assert len(again.profile.kernels()) > 0


def test_an_interrupt_while_the_profiler_stops_leaves_none_running(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, stops = Profile.stop, []

    def interrupted_once(profile: Profile, **options: Any) -> bool:
        stops.append(profile)
        if len(stops) == 1:
            raise KeyboardInterrupt
        return stop(profile, **options)

    monkeypatch.setattr(Profile, "stop", interrupted_once)
    window = still_profiling()
    with pytest.raises(KeyboardInterrupt):
        window.close(complete=True)
    assert not Profile.available()
    window.discard()
    assert len(stops) == 2
    assert Profile.available()


def test_after_a_failed_start_no_profiler_counts_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd.profiler, "_enable_profiler", fail)
        profiled()
    assert Profile.available()


@pytest.mark.parametrize(
    ("cuda_version", "more"),
    [
        (None, ""),
        ("12.9", ""),
        (
            "13.0",
            "; on CUDA 13 and later, many process groups may do that to the first profile of a job, and to no other",
        ),
    ],
)
def test_a_profile_whose_buffers_were_full_is_dropped(
    monkeypatch: pytest.MonkeyPatch, cuda_version: str | None, more: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    monkeypatch.setattr(profiler, "_kineto_stopped", lambda: True)
    assert profiled().profile is not None  # of a CPU: the flag is that of an earlier session
    monkeypatch.setattr(Profile, "start", _start_as_of_a_device)
    closed = profiled()
    assert closed.profile is None
    assert closed.problems == [
        "kernel times are missing: the profiler's buffers were full before the last profiled step had ended"
        f"{more} [OC358]"
    ]


def test_where_kinetos_limit_may_end_the_process_a_profile_ends_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "record_bound", profiler.RecordBound(applies=True))
    monkeypatch.setattr(profiler, "FIRST_STEPS", 1)
    monkeypatch.setattr(Profile, "start", _start_as_of_a_device)
    closed = profiled()
    assert [step.profile_index for step in closed.steps] == [0, -1]
    assert closed.profile is not None
    assert len(closed.profile.bounds) == 1
    assert any("the profile was ended early" in problem for problem in closed.problems)


# Of 200 bytes each: in half of the limit, four steps fit, and one of a record more does not.
@pytest.mark.parametrize(("records_a_step", "on_device", "refused"),
                         [(83_886, True, False), (83_887, True, True), (83_887, False, False)])  # fmt: skip
def test_where_not_even_one_step_of_each_mode_may_be_profiled_none_is(
    monkeypatch: pytest.MonkeyPatch, records_a_step: int, on_device: bool, refused: bool
) -> None:
    bound = profiler.RecordBound(applies=True)
    bound.learn(4 * records_a_step, 4)
    monkeypatch.setattr("overlap_callbacks.monitor.window.record_bound", bound)
    monkeypatch.setattr(Window, "on_device", on_device)
    closed = profiled()
    assert (closed.profile is None) is refused
    assert closed.problems == refused * [
        "kernel times are missing: its steps launch so many kernels that a profile could reach Kineto's limit, which "
        "can end the process with this build of torch [OC353]"
    ]


def _start_as_of_a_device(profile: Profile, start: object = Profile.start) -> None:
    start(profile)  # type: ignore[operator]
    profile._on_cuda = True
