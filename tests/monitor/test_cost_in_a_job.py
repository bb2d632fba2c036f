"""What windows are said to cost in real jobs, in simulated time: each step takes what it is told to, and we nothing.

So what a window costs is known to the step. ``benchmarks/cost.py`` holds it against a clock outside the library: a job
with and without it, in turns.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from overlap_callbacks import Schedule
from overlap_callbacks.instruments import clocks
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.monitor.background import reporter
from overlap_callbacks.monitor.background.budget import WindowBudget
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports, Training, new_monitor, tiny_schedule, wait_until

STEP_MS = 10.0
SLOWED_STEPS, SLOWER_BY_MS = 30, 50.0


class SimulatedTime:
    """What the library takes for the time of the host. It passes in steps of the job alone."""

    def __init__(self) -> None:
        self._now_ns = 10**9

    def now(self) -> int:
        return self._now_ns

    def passes(self, ms: float) -> None:
        self._now_ns += int(ms * 1e6)


@contextlib.contextmanager
def simulated_time() -> Iterator[SimulatedTime]:
    """The time of this rank, which stands still but for ``passes``.

    The reporting thread looks at steps until they are usual again, for some real seconds at most: here for as long as
    a busy machine needs for them.
    """
    time = SimulatedTime()
    with (
        mock.patch.object(clocks, "now", time.now),
        mock.patch.object(WindowBudget.__init__, "__defaults__", (time.now,)),
        mock.patch.object(reporter, "_AFTERMATH_S", 60.0),
    ):
        yield time


class SlowReading:
    """Some steps of a job take longer, while our thread reads a window and because it does.

    So what is lost after the window is known, is far more than chance, and takes our thread no CPU time.

    Args:
        steps: that take longer.
        by_ms: by so much each.
        time: of the job.
    """

    def __init__(self, steps: int, by_ms: float, time: SimulatedTime) -> None:
        self._steps, self._by_ms, self._time = steps, by_ms, time
        self._left = 0  # steps to slow down
        self._slowed = threading.Event()
        self._measure = reporter.measure

    def __enter__(self) -> SlowReading:
        reporter.measure = self._read
        return self

    def __exit__(self, *_: object) -> None:
        reporter.measure = self._measure

    @property
    def done(self) -> bool:
        """Whether all of the first window's steps have been slowed down."""
        return self._slowed.is_set()

    def in_step(self) -> None:
        """Within each step of the job."""
        if self._left:
            self._time.passes(self._by_ms)
            self._left -= 1
            if not self._left:
                self._slowed.set()

    def _read(self, window: Any, *job: Any) -> Any:
        if window.number == 0:
            self._slowed.clear()
            self._left = self._steps
            self._slowed.wait(60.0)
        return self._measure(window, *job)


def _slowed_after_its_first_window(rank: int) -> dict[str, Any]:
    """A job that loses time after its first window. The second one opens once the first one's report is there."""
    training, sink = Training(rank), KeptReports()
    schedule = tiny_schedule(every_n_steps=500, first_step=40)
    with (
        simulated_time() as time,
        captured_log(logging.INFO) as lines,
        SlowReading(SLOWED_STEPS, SLOWER_BY_MS, time) as slow,
        new_monitor(sink, schedule=schedule, max_overhead=0.05, report_timeout_s=180.0) as monitor,
    ):
        for step in range(schedule.every_n_steps + 60):
            if step == schedule.every_n_steps:
                wait_until(lambda: rank != 0 or bool(sink.reports), 60.0)
                dist.barrier()
            with monitor.step():
                training.step()
                time.passes(STEP_MS)
                slow.in_step()
    return {
        "slowed": slow.done,
        "told": [(report.window, report.lost_ms, report.measurement_overhead) for report in sink.reports],
        "left_out": [line for line in lines if "a window is charged" in line],
    }


def test_the_loss_of_steps_after_the_first_window_is_reported_in_full_and_charged() -> None:
    first, second = run_ranks(_slowed_after_its_first_window, 2, timeout_s=120.0)
    assert first["slowed"]
    assert second["slowed"]
    ((window, told_ms, overhead),) = first["told"]  # the second one is left out
    assert window == 0
    assert told_ms == pytest.approx(SLOWED_STEPS * SLOWER_BY_MS)
    assert overhead == pytest.approx(SLOWED_STEPS * SLOWER_BY_MS / (500 * STEP_MS), rel=0.05)
    (line,) = first["left_out"]
    assert "max_overhead allows 5.00%" in line


EVALUATION_MS = 2000.0


def _evaluate_in_a_window(rank: int, where: str, first_step: int) -> list[float | None]:
    training, sink = Training(rank), KeptReports()
    # As long as its window is, and some steps. Of these, none comes before the window's blocks.
    schedule = Schedule(every_n_steps=64, first_step=first_step, profiled_steps=0)
    with simulated_time() as time:
        monitor = new_monitor(sink, schedule=schedule, power=False)
        for step in range(first_step + schedule.every_n_steps):
            now = step == first_step + 20
            with monitor.step():
                training.step()
                time.passes(STEP_MS)
                if now and where == "in a pause":
                    with monitor.pause():
                        time.passes(EVALUATION_MS)
                if now and where == "on one rank" and rank == 1:  # which waits for the other
                    time.passes(EVALUATION_MS)
            if now and (where == "between steps" or (where == "on one rank" and rank == 0)):
                time.passes(EVALUATION_MS)
        monitor.close()
    return [report.lost_ms for report in sink.reports]


@pytest.mark.parametrize("first_step", [2, 30], ids=["few steps before", "enough steps before"])
@pytest.mark.parametrize("where", ["between steps", "in a pause", "on one rank"])
def test_an_evaluation_in_a_window_is_not_said_to_be_its_cost(where: str, first_step: int) -> None:
    (lost_ms,) = run_ranks(_evaluate_in_a_window, 2, where, first_step)[0]
    # Where too few steps came before, the CPU time of our own thread counts too.
    assert lost_ms is not None
    assert lost_ms < EVALUATION_MS / 2


def _end_in_a_window(rank: int) -> list[tuple[bool, float | None, float | None]]:
    training, sink = Training(rank), KeptReports()
    monitor = new_monitor(sink, schedule=Schedule(every_n_steps=100, first_step=30, profiled_steps=0), power=False)
    for _ in range(55):
        with monitor.step():
            training.step()
    monitor.close()
    return [(report.complete, report.lost_ms, report.measurement_overhead) for report in sink.reports]


def test_a_window_in_which_the_job_ends_is_not_said_to_have_cost_nothing() -> None:
    assert run_ranks(_end_in_a_window, 2)[0] == [(False, None, None)]


def _profile(rank: int) -> tuple[list[int], list[int], list[str]]:
    recorded: list[int] = []
    stop = Profile.stop

    def stop_and_count(profile: Profile, **options: Any) -> bool:
        recorded.append(len(profile.bounds))
        return stop(profile, **options)

    Profile.stop = stop_and_count  # type: ignore[method-assign]
    training, sink = Training(rank), KeptReports()
    schedule = Schedule(every_n_steps=32, first_step=5, repeats=1, steps_per_block=1)
    monitor = new_monitor(sink, schedule=schedule, power=False)
    for _ in range(5 + schedule.every_n_steps):
        with monitor.step():
            training.step()
    monitor.close()
    Profile.stop = stop  # type: ignore[method-assign]
    return (
        recorded,
        [len(sample.profiled) for report in sink.reports for sample in report.samples],
        [problem for report in sink.reports for problem in report.problems if "profiled step" in problem],
    )


def test_warm_up_steps_of_a_job_that_leaves_nothing_in_flight_are_not_recorded() -> None:
    recorded, blocks, problems = run_ranks(_profile, 2)[0]
    assert recorded == [9]  # of 16: the first warm-up step, and those that count
    assert blocks == [8, 8]
    assert problems == []
