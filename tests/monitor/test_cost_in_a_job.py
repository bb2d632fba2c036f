"""What windows are said to cost, against a clock outside the library: a job with and without it, in turns."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlap_callbacks import Schedule
from tests.distributed import run_ranks
from tests.monitor.jobs import KeptReports, Training, new_monitor

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


EVALUATION_S = 2.0


def _evaluate_in_a_window(rank: int, where: str) -> list[float | None]:
    training, sink = Training(rank), KeptReports()
    schedule = Schedule(every_n_steps=100, first_step=30, profiled_steps=0)
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


@pytest.mark.parametrize("where", ["between steps", "in a pause", "on one rank"])
def test_an_evaluation_in_a_window_is_not_said_to_be_its_cost(where: str) -> None:
    (lost_ms,) = run_ranks(_evaluate_in_a_window, 2, where)[0]
    assert lost_ms < EVALUATION_S * 1e3 / 2
