"""What windows are said to cost, against a clock outside the library: a job with and without it, in turns."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from overlap_callbacks import Schedule
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.monitor.background import reporter
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports, Training, new_monitor, tiny_schedule, wait_until

pytestmark = pytest.mark.alone

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROUNDS = 6
SLOWED_STEPS, SLOWER_BY_S = 30, 0.05


def _cost() -> Any:
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module("cost")


class SlowReading:
    """Some steps of a job take longer, while our thread reads a window and because it does.

    So what is lost after the window is known, is far more than chance, and takes our thread no CPU time.

    Args:
        steps: that take longer.
        by_s: by so much each.
        windows: whose reading is slow; None for all.
    """

    def __init__(self, steps: int, by_s: float, windows: tuple[int, ...] | None = None) -> None:
        self._steps, self._by_s, self._windows = steps, by_s, windows
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
        """Whether all of a window's steps have been slowed down."""
        return self._slowed.is_set()

    def in_step(self) -> None:
        """Within each step of the job."""
        if self._left:
            time.sleep(self._by_s)
            self._left -= 1
            if not self._left:
                self._slowed.set()

    def _read(self, window: Any, *job: Any) -> Any:
        if self._windows is None or window.number in self._windows:
            self._slowed.clear()
            self._left = self._steps
            self._slowed.wait(60.0)
        return self._measure(window, *job)


def _run(rank: int) -> dict[str, Any]:
    cost = _cost()
    step = cost.Job.step
    # Without this, what chance does to so few rounds is more than all that a window costs.
    with SlowReading(40, 0.075) as slow:
        cost.Job.step = lambda job: (step(job), slow.in_step())
        found: dict[str, Any] = cost.run(rank, 4.0, ROUNDS)
    cost.Job.step = step
    return found


def test_a_job_with_the_library_takes_as_much_longer_as_its_windows_are_said_to_cost() -> None:
    found, other = run_ranks(_run, 2, timeout_s=240.0)
    assert other["told_ms"] == []  # rank 0 tells
    took, told = np.array(found["took_ms"]), np.array(found["told_ms"])
    assert len(took) == len(told) == ROUNDS
    assert min(told) > 0.0
    _, low, high = _cost().interval(took - told, 0.999)
    assert low <= 0.0 <= high, (found, low, high)
    # The figure is that cost over the training between two windows.
    assert all(overhead > 0.0 for overhead in found["overhead"])


def _slowed_after_its_first_window(rank: int) -> dict[str, Any]:
    """A job that loses time after its first window. The second one opens once the first one's report is there."""
    training, sink = Training(rank), KeptReports()
    schedule = tiny_schedule(every_n_steps=500, first_step=40)
    began = ended = 0.0
    with (
        captured_log(logging.INFO) as lines,
        SlowReading(SLOWED_STEPS, SLOWER_BY_S, windows=(0,)) as slow,
        new_monitor(sink, schedule=schedule, max_overhead=0.05) as monitor,
    ):
        for step in range(schedule.every_n_steps + 60):
            if step == schedule.first_step:
                began = time.perf_counter()
            elif step == schedule.every_n_steps:
                wait_until(lambda: rank != 0 or bool(sink.reports), 60.0)
                dist.barrier()
            with monitor.step():
                training.step()
                slow.in_step()
            if slow.done and not ended:
                ended = time.perf_counter()
    return {
        "took_ms": (ended - began) * 1e3,
        "told": [(report.window, report.lost_ms, report.measurement_overhead) for report in sink.reports],
        "left_out": [line for line in lines if "a window costs" in line],
    }


def test_what_steps_lose_after_the_first_window_is_told_whole_and_has_to_be_paid_for() -> None:
    first, second = run_ranks(_slowed_after_its_first_window, 2)
    ((window, told_ms, overhead),) = first["told"]  # the second one is left out
    assert window == 0
    assert SLOWED_STEPS * SLOWER_BY_S * 1e3 < told_ms < 1.5 * max(first["took_ms"], second["took_ms"])
    assert overhead > 0.05
    (line,) = first["left_out"]
    assert "max_overhead allows 5.00%" in line


EVALUATION_S = 2.0


def _evaluate_in_a_window(rank: int, where: str, first_step: int) -> list[float | None]:
    training, sink = Training(rank), KeptReports()
    schedule = Schedule(every_n_steps=100, first_step=first_step, profiled_steps=0)
    monitor = new_monitor(sink, schedule=schedule, power=False)
    for step in range(90):
        with monitor.step():
            training.step()
            if where == "in a pause" and step == 40:
                with monitor.pause():
                    time.sleep(EVALUATION_S)
        if (where == "between steps" or (where == "on one rank" and rank == 0)) and step == 40:
            time.sleep(EVALUATION_S)
    monitor.close()
    return [report.lost_ms for report in sink.reports]


@pytest.mark.parametrize("first_step", [2, 30], ids=["few steps before", "enough steps before"])
@pytest.mark.parametrize("where", ["between steps", "in a pause", "on one rank"])
def test_an_evaluation_in_a_window_is_not_said_to_be_its_cost(where: str, first_step: int) -> None:
    (lost_ms,) = run_ranks(_evaluate_in_a_window, 2, where, first_step)[0]
    assert lost_ms < EVALUATION_S * 1e3 / 2


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
    Profile.stop = lambda profile: (recorded.append(len(profile.bounds)), stop(profile))[1]  # type: ignore[method-assign]
    training, sink = Training(rank), KeptReports()
    schedule = Schedule(every_n_steps=100, first_step=5, repeats=1, steps_per_block=1)
    monitor = new_monitor(sink, schedule=schedule, power=False)
    for _ in range(5 + schedule.window_steps + 3):
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
