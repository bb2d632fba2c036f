"""A closed window becomes figures: stretches of time for power, and the times of collectives alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.power.readings import Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.settled import StepSeries
from overlap_callbacks.analysis.results.window import Rhythm
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments.clocks import Mark, StepClock
from overlap_callbacks.instruments.power.meter import MeasuredPower
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.monitor.background.calls import collective_times
from overlap_callbacks.monitor.background.measurement import measure, memory_peaks, segments_of, with_times
from overlap_callbacks.monitor.schedule import Part, Plan
from overlap_callbacks.monitor.window import MeasuredStep, MeasuredWindow
from tests.columns import columns

MS = 1_000_000


def steps_of(gaps_ms: list[float], step_ms: float = 100.0, uncounted: tuple[int, ...] = ()) -> list[MeasuredStep]:
    """Steps of one block, each after its gap."""
    now, steps = 0, []
    for number, gap_ms in enumerate(gaps_ms):
        now += round(gap_ms * MS)
        plan = Plan(0, number, Part.TIMED, 0, Mode.OVERLAPPED, Mode.OVERLAPPED, True, False)
        end = now + round(step_ms * MS)
        log = StepLog((), 0, None)
        steps.append(MeasuredStep(plan=plan, start=now, end=end, log=log, counted=number not in uncounted))
        now = end
    return steps


def segments_in_ms(steps: list[MeasuredStep]) -> list[tuple[float, float, int]]:
    segments = segments_of(steps, StepClock(), counted_only=True)
    return [(segment.start_ns / MS, segment.end_ns / MS, segment.num_steps) for segment in segments]


def test_a_block_is_one_stretch_with_what_loading_its_batches_takes() -> None:
    assert segments_in_ms(steps_of([0, 20, 22, 19])) == [(0, 461, 4)]


def test_an_evaluation_between_two_steps_cuts_the_block_in_two() -> None:
    assert segments_in_ms(steps_of([0, 1, 3000, 1])) == [(0, 201, 2), (3201, 3402, 2)]


def test_a_step_that_does_not_count_cuts_it_too() -> None:
    assert segments_in_ms(steps_of([0, 0, 0, 0], uncounted=(1,))) == [(0, 100, 1), (200, 400, 2)]


def test_each_stretch_says_at_which_place_of_its_block_it_begins() -> None:
    segments = segments_of(steps_of([0, 0, 3000, 0, 0]), StepClock(), counted_only=True)
    assert [(segment.num_steps, segment.position) for segment in segments] == [(2, 0), (3, 2)]


@pytest.mark.parametrize(("off_ns", "known"), [(0, True), (400_000, True), (20_000_000, False)])
def test_a_block_whose_bounds_on_the_host_contradict_the_devices_own_time_is_left_out(off_ns: int, known: bool) -> None:
    class Clock(StepClock):
        def host_bounds_ns(self, mark: Mark) -> tuple[int, int]:
            assert isinstance(mark, int)
            return mark + off_ns, mark - off_ns  # the device passed it after it had passed it

    assert bool(segments_of(steps_of([0, 0, 0]), Clock())) is known


def test_a_single_step_is_a_stretch() -> None:
    assert segments_in_ms(steps_of([0])) == [(0, 100, 1)]
    assert segments_in_ms([]) == []


# -- collectives


def test_bytes_that_were_timed_are_those_of_collectives_with_marks_alone() -> None:
    group = Group("0", "", (0, 1), "nccl")

    def gathered(alone_ms: float | None) -> Collective:
        marks = (None, None) if alone_ms is None else (0, round(alone_ms * MS))
        return Collective("_allgather_base_", group, 100, 200, None, 0, -1, 0, 0, *marks)

    # Of three collectives, the block coalesces one; in the second step, another comes on a stream that is captured.
    recorded = StepLog((gathered(None),) * 3, 0, None)
    steps = [
        StepLog((gathered(2.0), gathered(None), gathered(4.0)), 0, None),
        StepLog((gathered(None), gathered(None), gathered(4.0)), 0, None),
    ]
    (row,) = collective_times(recorded, steps, {})
    assert (row.messages, row.bytes_in, row.bytes_out) == (3, 300, 600)
    assert row.isolated_ms == pytest.approx((2 + 4 + 4) / 2)
    assert row.timed_bytes == pytest.approx((2 + 1) * 200 / 2)
    assert row.transfer == (row.timed_bytes, row.isolated_ms)


class LateMark:
    """The end of a step that the device does not pass."""

    def query(self) -> bool:
        return False


class SlowMark:
    """The end of a step that the device passes at a time of its own."""

    def __init__(self, clock: SlowClock, at_s: float) -> None:
        self.clock, self.at_s = clock, at_s

    def query(self) -> bool:
        return self.clock.now_s >= self.at_s


class SlowClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 1.0)


def test_a_device_far_behind_is_waited_for_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SlowClock()
    monkeypatch.setattr("overlap_callbacks.monitor.background.measurement.time", clock)
    monkeypatch.setattr("overlap_callbacks.monitor.background.measurement.clocks.elapsed_ms", lambda *_: 1.0)
    plan = Plan(0, 0, Part.TIMED, 0, Mode.OVERLAPPED, Mode.OVERLAPPED, counted=True, last=False)
    ends = [cast("Any", SlowMark(clock, at_s)) for at_s in (50, 100, 150, 240, 265)]
    steps = [MeasuredStep(plan=plan, start=0, end=end, log=StepLog((), 0, None)) for end in ends]
    assert [step.ms for step in with_times(steps)] == [1.0, 1.0, 1.0, None, 1.0]


def test_a_step_that_the_device_does_not_pass_in_time_has_no_time_and_the_window_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overlap_callbacks.monitor.background.measurement._READY_TIMEOUT_S", 0.0)
    group = Group("0", "", (0, 1), "nccl")

    def step(number: int, part: Part, ms: float) -> MeasuredStep:
        call = Collective("allreduce_", group, 8, 8, None, 0, -1, 0, 0, 0, round(ms * MS))
        plan = Plan(0, number, part, 0, Mode.SEQUENTIAL, Mode.SEQUENTIAL, part is Part.TIMED, last=False)
        return MeasuredStep(plan=plan, start=0, end=MS, log=StepLog((call,) * 3, 0, None), number=number)

    steps = [step(0, Part.RECORDED, 1.0), step(1, Part.TIMED, 2.0), step(2, Part.TIMED, 50.0)]
    steps[2] = replace(steps[2], end=cast("Any", LateMark()))
    window = MeasuredWindow(number=0, first_step=0, steps=steps, clock=StepClock())
    found = measure(window, rank=0, backend="nccl")
    assert [problem.startswith("the device did not finish a step") for problem in found.problems] == [True]
    assert [block.step_ms for block in found.timed] == [(1.0,)]
    (row,) = found.collectives
    assert row.isolated_ms == pytest.approx(3 * 2)
    assert [call.step for row in found.arrivals for call in row.calls] == [1, 1, 1]
    assert found.series is None


def test_after_each_steps_marks_the_interpreter_is_given_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group("0", "", (0, 1), "nccl")
    step = StepLog(
        tuple([Collective("allreduce_", group, 8, 8, None, 0, -1, 0, 0, n, n + MS) for n in range(2)]), 0, None
    )
    done: list[object] = []
    module = "overlap_callbacks.monitor.background.calls"
    monkeypatch.setattr(f"{module}.clocks.elapsed_ms", lambda *_: done.append("read") or 1.0)
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(sleep=done.append))
    collective_times(step, [step] * 3, {})
    pause = next((entry for entry in done if entry != "read"), None)
    assert done == ["read", "read", pause] * 3
    assert isinstance(pause, float)
    assert 0 < pause < 0.01


def test_collectives_that_were_not_timed_because_there_were_too_many_count_like_those_that_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overlap_callbacks.monitor.background.calls.MAX_TIMED", 2)
    group = Group("0", "", (0, 1), "nccl")
    marks = [(0, 2 * MS), (3 * MS, 5 * MS), (None, None), (None, None)]
    log = StepLog(tuple([Collective("allreduce_", group, 8, 8, None, 0, -1, 0, 0, *of) for of in marks]), 0, None)
    (row,) = collective_times(log, [log], {})
    assert row.isolated_ms == pytest.approx(8)
    assert row.timed_bytes == pytest.approx(4 * 8)


def test_without_marks_no_bytes_are_timed_and_kernels_are_identified_by_their_key() -> None:
    group = Group("0", "", (0, 1), "nccl")
    recorded = StepLog((Collective("allreduce_", group, 8, 8, None, 0, -1, 0, 0),), 0, None)
    (row,) = collective_times(recorded, [recorded], {("allreduce_", "0"): 1.5})
    assert (row.isolated_ms, row.timed_bytes, row.kernels_ms, row.transfer) == (None, None, 1.5, None)
    assert collective_times(None, [recorded], {}) == ()


def test_a_collectives_time_alone_is_that_of_the_sequential_steps_per_step() -> None:
    group = Group("0", "", (0, 1), "gloo")

    def step(number: int, part: Part, arm: Mode, alone_ms: float | None) -> MeasuredStep:
        end = None if alone_ms is None else round(alone_ms * MS)
        start = None if end is None else 0
        collective = Collective("allreduce_", group, 4, 4, None, 0, -1, 0, 0, start, end)
        plan = Plan(0, number, part, 0, arm, arm, part is Part.TIMED, False)
        return MeasuredStep(
            plan=plan, start=0, end=MS, log=StepLog((collective, collective), 0, None), counted=plan.counted
        )

    overlapped, sequential = Mode.OVERLAPPED, Mode.SEQUENTIAL
    window = MeasuredWindow(
        number=0,
        first_step=0,
        steps=(
            step(0, Part.RECORDED, overlapped, None),
            step(1, Part.TIMED, overlapped, None),
            step(2, Part.TIMED, sequential, 10.0),
            step(3, Part.TIMED, sequential, 30.0),
            step(4, Part.TIMED, overlapped, None),
        ),
        complete=True,
        problems=(),
        opened_ns=0,
        wall_ms=5.0,
        clock=StepClock(),
        meter=None,
        profile=None,
        missing_profile="",
    )
    (row,) = measure(window, rank=0, backend="gloo").collectives
    assert (row.messages, row.bytes_in) == (2, 8)
    assert row.isolated_ms == 40.0  # two collectives a step, of 10 ms each in one step and of 30 ms in the other


# -- the series of steps


def timed_window(*steps: tuple[Part, Mode, float, bool], first_offset: int = 0) -> MeasuredWindow:
    """A window of steps, each with its part, its arm, its time and whether something spoilt it."""
    measured, now = [], 0
    for offset, (part, arm, step_ms, spoilt) in enumerate(steps, first_offset):
        plan = Plan(0, offset, part, 0, arm, arm, False, last=False)
        end = now + round(step_ms * MS)
        measured.append(MeasuredStep(plan=plan, start=now, end=end, log=StepLog((), 0, None), spoilt=spoilt))
        now = end
    return MeasuredWindow(
        number=0, first_step=500, steps=tuple(measured), complete=True, problems=(), opened_ns=0, wall_ms=5.0,
        clock=StepClock(), meter=None, profile=None, missing_profile="",
    )  # fmt: skip


def test_rank_0_keeps_its_steps_outside_the_profile_in_order_with_those_that_do_not_count() -> None:
    overlapped, sequential = Mode.OVERLAPPED, Mode.SEQUENTIAL
    window = timed_window(
        (Part.RECORDED, overlapped, 7.0, False),
        (Part.AROUND, overlapped, 10.0, False),
        (Part.TIMED, sequential, 12.0, False),
        (Part.TIMED, sequential, 13.123456, True),
        (Part.AROUND, overlapped, 11.0, False),
        (Part.PROFILED, overlapped, 30.0, False),
    )
    series = measure(window, rank=0, backend="gloo").series
    assert series == StepSeries(501, (10.0, 12.0, 13.1235, 11.0), "OSsO")
    assert measure(window, rank=1, backend="gloo").series is None


def test_the_steps_before_a_missing_one_are_unknown() -> None:
    window = timed_window((Part.TIMED, Mode.OVERLAPPED, 1.0, False), (Part.TIMED, Mode.SEQUENTIAL, 1.0, False))
    steps = (window.steps[0], replace(window.steps[1], plan=replace(window.steps[1].plan, offset=2)))
    assert measure(replace(window, steps=steps), rank=0, backend="gloo").series is None
    assert measure(replace(window, steps=()), rank=0, backend="gloo").series is None


# -- long blocks


class Meter:
    """Keeps the long blocks that it is given."""

    elsewhere = False
    long: Sequence[Segment] = ()

    def measure(self, _: Sequence[Segment], *, long: Sequence[Segment], **__: Any) -> MeasuredPower:
        self.long = long
        return MeasuredPower()


@pytest.mark.parametrize("rhythms", [(), (Rhythm(4, 3, 50.0, 10.0),)])
def test_a_step_of_a_long_block_that_was_held_up_does_not_count_and_a_hit_of_a_rhythm_does(rhythms) -> None:
    # In both modes every fourth step takes 60 ms; one overlapped step, of no rhythm, takes 500 ms.
    times_ms = [60.0 if step % 4 == 3 else 10.0 for step in range(32)]
    times_ms[10] = 500.0
    modes = [Mode.OVERLAPPED] * 16 + [Mode.SEQUENTIAL] * 16
    window = timed_window(*[(Part.LONG, mode, time_ms, False) for mode, time_ms in zip(modes, times_ms, strict=True)])
    steps = tuple([replace(step, counted=True, number=step.plan.offset) for step in window.steps])
    meter = Meter()
    found = measure(replace(window, steps=steps, meter=cast("Any", meter), rhythms=rhythms), rank=0, backend="gloo")
    assert found.left_out == (0, 0)
    counted = {mode: sum(segment.num_steps for segment in meter.long if segment.mode is mode) for mode in Mode}
    # A rhythm that is known is part of training; one that is not is left out of both modes alike.
    overlapped, sequential = (15, 16) if rhythms else (11, 12)
    assert counted == {Mode.OVERLAPPED: overlapped, Mode.SEQUENTIAL: sequential}


# -- the profile


class FakeProfile:
    """A device's profile as read from Kineto."""

    def __init__(self, kernels: KernelTable) -> None:
        self._kernels = kernels

    def kernels(self) -> KernelTable:
        return self._kernels


def window_with_profile(
    kernels: KernelTable, collectives: tuple[Collective, ...], control: bool = False
) -> MeasuredWindow:
    """A window with one profiled step of each arm, each with these collectives. In a control window both overlap."""
    steps = []
    for index, mode in enumerate((Mode.OVERLAPPED, Mode.SEQUENTIAL)):
        plan = Plan(0, index, Part.PROFILED, index, mode, Mode.OVERLAPPED if control else mode, True, last=False)
        step = MeasuredStep(plan=plan, start=0, end=MS, log=StepLog(collectives, 0, None), counted=True)
        steps.append(dataclasses.replace(step, profile_index=index))
    return MeasuredWindow(
        number=0, first_step=0, steps=tuple(steps), complete=True, problems=(), opened_ns=0, wall_ms=5.0,
        clock=StepClock(), meter=None, profile=cast("Profile", FakeProfile(kernels)), missing_profile="",
    )  # fmt: skip


def test_a_profile_that_does_not_show_the_job_s_communication_gives_no_kernel_figures_and_a_doubt() -> None:
    group = Group("0", "", (0, 1), "nccl")
    collective = Collective("allreduce_", group, 4, 4, None, 0, -1, 0, 0, on_device=True)
    compute = [("gemm", Kind.COMPUTE, step, 100 * step, 100 * step + 10) for step in (0, 1)]
    found = measure(window_with_profile(columns(compute), (collective,)), rank=0, backend="nccl")
    assert (found.profiled, found.kernels, found.pairs) == ((), (), ())
    (doubt,) = found.doubts
    assert doubt.startswith("the profile does not show the job's communication: 1 of 1 collectives a step")
    reduce = [
        ("ncclDevKernel_AllReduce", Kind.COMMUNICATION, step, 100 * step + 10, 100 * step + 12) for step in (0, 1)
    ]
    found = measure(window_with_profile(columns(compute + reduce), (collective,)), rank=0, backend="nccl")
    assert (found.doubts, found.problems) == ((), ())
    assert [block.comm_ms for block in found.profiled] == [2, 2]


def test_all_to_alls_of_nccl_are_no_sends_and_receives_in_the_figures() -> None:
    group = Group("0", "", (0, 1), "nccl", "expert")
    collective = Collective("alltoall_base_", group, 4, 4, None, 0, -1, 0, 0, on_device=True)
    rows = [("ncclDevKernel_SendRecv", Kind.COMMUNICATION, step, 100 * step, 100 * step + 2) for step in (0, 1)]
    found = measure(window_with_profile(columns(rows), (collective,)), rank=0, backend="nccl")
    assert [(block.comm_ms, block.p2p_ms) for block in found.profiled] == [(2, 0), (2, 0)]


def test_overlapping_compute_is_named_in_sequential_steps_but_not_in_those_of_a_control_window() -> None:
    rows = [("gemm", Kind.COMPUTE, step, 100 * step, 100 * step + 10) for step in (0, 1)]
    rows += [("ncclDevKernel_AllReduce", Kind.COMMUNICATION, step, 100 * step + 5, 100 * step + 12) for step in (0, 1)]
    collective = Collective("allreduce_", Group("0", "", (0, 1), "nccl"), 4, 4, None, 0, -1, 0, 0, on_device=True)
    (problem,) = measure(window_with_profile(columns(rows), (collective,)), rank=0, backend="nccl").problems
    assert problem.startswith("in sequential steps compute ran during communication, 5 ms on stream 0")
    window = window_with_profile(columns(rows), (collective,), control=True)
    assert measure(window, rank=0, backend="nccl").problems == ()


# -- memory


def with_memory(step: MeasuredStep, peak_before: int, peak_after: int) -> MeasuredStep:
    def stats(peak: int) -> dict[str, Any]:
        return {"allocated_bytes": {"all": {"current": 10, "peak": peak}}}

    return replace(step, memory=(stats(peak_before), stats(peak_after)))


def test_a_steps_readings_become_its_modes_peak() -> None:
    first, second, uncounted, unread = steps_of([0, 0, 0, 0], uncounted=(2,))
    steps = [with_memory(first, 50, 70), with_memory(second, 70, 70), with_memory(uncounted, 70, 900), unread]
    (peak,) = memory_peaks(steps)
    assert (peak.mode, peak.peak_bytes) == (Mode.OVERLAPPED, 70)


def test_without_readings_there_is_no_peak() -> None:
    assert memory_peaks(steps_of([0, 0])) == ()
