"""Training on a loopback job, with what a test or a benchmark wants to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlap_callbacks import Mode, OverlapReport, Sink
from tests.gpu.jobs import Job
from tests.gpu.loopback.collectives import Issued
from tests.gpu.loopback.job import LoopJob

# One recorded step, 2 x OSSO timed ones and OSSO profiled ones, each with a step before it that does not count.
ONE_WINDOW: dict[str, Any] = {
    "every_n_steps": 200,
    "first_step": 4,
    "repeats": 2,
    "steps_per_block": 1,
    "warmup_steps": 1,
    "profiled_steps": 2,
    "max_overhead": None,
    "strict": True,
}


class Keep(Sink):
    """Keeps the reports.

    Attributes:
        reports: in the order of the windows.
    """

    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)


@dataclass(frozen=True)
class Step:
    """One step of training.

    Attributes:
        mode: None without a monitor.
        first, last: the collectives that it issued are ``loop.issued[first:last]``.
    """

    mode: Mode | None
    first: int
    last: int


def train(loop: LoopJob, job: Job, num_steps: int, monitor: Any = None) -> list[Step]:
    """Train for some steps."""
    steps = []
    for _ in range(num_steps):
        first = len(loop.issued)
        job.forward_backward()
        mode = None if monitor is None else monitor.mode
        job.update()
        steps.append(Step(mode, first, len(loop.issued)))
    return steps


def known_ms(issued: list[Issued]) -> float:
    """How long these collectives take at least, one after another."""
    return sum(collective.length_ns for collective in issued) / 1e6
