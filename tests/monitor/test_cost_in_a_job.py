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


def _cost() -> Any:
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module("cost")


def _run(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = _cost().run(rank, 4.0, ROUNDS)
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


SLOWED_STEPS, SLOWER_BY_S = 30, 0.05


def _slowed_after_its_first_window(rank: int) -> dict[str, Any]:
    """A job in which some steps take longer, while our thread reads the first window and because it does.

    So what is lost after that window is known, and takes our thread no CPU time. The second window opens once the first
    one's report is there.
    """
    reading, slowed, measure = threading.Event(), threading.Event(), reporter.measure

    def read(window: Any, *job: Any) -> Any:
        if not window.number:
            reading.set()
            slowed.wait(60.0)
        return measure(window, *job)

    reporter.measure = read
    training, sink = Training(rank), KeptReports()
    schedule = tiny_schedule(every_n_steps=500, first_step=40)
    slow, began, ended = 0, 0.0, 0.0
    with captured_log(logging.INFO) as lines, new_monitor(sink, schedule=schedule, max_overhead=0.05) as monitor:
        for step in range(schedule.every_n_steps + 60):
            if step == schedule.first_step:
                began = time.perf_counter()
            elif step == schedule.every_n_steps:
                wait_until(lambda: rank != 0 or bool(sink.reports), 60.0)
                dist.barrier()
            with monitor.step():
                training.step()
                if reading.is_set() and slow < SLOWED_STEPS:
                    time.sleep(SLOWER_BY_S)
                    slow += 1
            if slow == SLOWED_STEPS and not slowed.is_set():
                slowed.set()
                ended = time.perf_counter()
    reporter.measure = measure
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
