"""Training on a loopback job, with what a test or a benchmark wants to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from overlap_callbacks import Mode, OverlapReport, Sink
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.instruments.profiler import Profile
from tests.gpu.jobs import Job
from tests.gpu.loopback.job import Issued, LoopJob

# One recorded step, 2 x OSSO timed ones and OSSO profiled ones, each with a step before it that does not count.
ONE_WINDOW: dict[str, Any] = {
    "spread": False,
    "every_n_steps": 200,
    "first_step": 4,
    "repeats": 2,
    "steps_per_block": 1,
    "warmup_steps": 1,
    "profiled_steps": 2,
    "max_overhead": None,
    "strict": True,
}
# No window for as long as anyone trains.
NO_WINDOW: dict[str, Any] = {**ONE_WINDOW, "every_n_steps": 10_000, "first_step": 5_000, "sinks": []}
# Kernels in sequence may overlap by the resolution of the device's clock.
_CLOCK_NS = 1_000


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


def raw_kernels(loop: LoopJob, job: Job, mode: Mode, num_steps: int = 3) -> KernelTable:
    """The kernels of some steps of one mode, as the profiler saw them."""
    on_cuda = loop.device.type == "cuda"
    with job.attach(**NO_WINDOW) as monitor:
        train(loop, job, 2, monitor)
        monitor.force(mode)
        train(loop, job, 4, monitor)  # the first wait for the order check
        profile = Profile(on_cuda)
        _synchronize(on_cuda)
        profile.start()
        for _ in range(num_steps):
            profile.begin_step()
            (step,) = train(loop, job, 1, monitor)
            profile.end_step()
            assert step.mode is mode
        _synchronize(on_cuda)
        profile.stop()
    return profile.kernels()


def _synchronize(on_cuda: bool) -> None:
    if on_cuda:
        torch.cuda.synchronize()


def beside_communication(kernels: KernelTable) -> dict[str, float]:
    """Microseconds of compute kernels during communication kernels, by name; empty without any."""
    communication = kernels.kind == Kind.COMMUNICATION
    starts, ends = kernels.intervals.start_ns, kernels.intervals.end_ns
    assert communication.any()
    found: dict[str, float] = {}
    for row in np.flatnonzero(kernels.kind == Kind.COMPUTE).tolist():
        both = np.minimum(ends[communication], ends[row]) - np.maximum(starts[communication], starts[row])
        shared = int(both[both > _CLOCK_NS].sum())
        if shared:
            name = kernels.names[kernels.name[row]]
            found[name] = found.get(name, 0.0) + shared / 1e3
    return found
