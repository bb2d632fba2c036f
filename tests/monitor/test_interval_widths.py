"""The windows of a job give each other a least width of their intervals."""

from __future__ import annotations

import math

from tests.distributed import run_ranks
from tests.monitor.jobs import KeptReports, Training, new_monitor, run_steps, tiny_schedule

# Figures whose intervals are symmetric as logarithms: times, and fractions beyond one.
TIMES = ("e2e_overlapped_ms", "e2e_sequential_ms", "compute_ms", "compute_isolated_ms")
FRACTIONS = ("speedup_vs_sequential", "compute_slowdown", "gap_to_ideal", "comm_slowdown")


def train(rank: int) -> list[dict[str, float]]:
    sink = KeptReports()
    schedule = tiny_schedule(every_n_steps=60, repeats=2, profiled_steps=4)
    monitor = new_monitor(sink, schedule=schedule)
    run_steps(Training(rank), monitor, 2 + 2 * schedule.every_n_steps)
    monitor.close()
    assert all(report.valid for report in sink.reports)
    return [
        {name: log_width(getattr(report, name), 0.0) for name in TIMES}
        | {name: log_width(getattr(report, name), 1.0) for name in FRACTIONS}
        for report in sink.reports
    ]


def log_width(estimate, offset: float) -> float:
    return math.log((offset + estimate.ci_high) / (offset + estimate.ci_low))


def test_no_interval_of_a_second_window_is_narrower_than_that_of_the_first() -> None:
    first, second = run_ranks(train, 2)[0]
    for name, width in first.items():
        assert second[name] >= width * (1 - 1e-9), name
