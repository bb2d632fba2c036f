"""Figures of a report side by side with what the devices' log says."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_callbacks import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record
from tests.simulated_gpu import jobs
from tests.simulated_gpu.truth import StepTruth

# How far a time of the device may be from the log's, and how wide what the host or a sample decides may be.
WITHIN, WITHIN_SAMPLED = 0.01, 0.05


@dataclass(frozen=True)
class Compared:
    """A figure and its truth.

    Attributes:
        name: of the figure.
        reported: by the library.
        least, most: of the log's steps. They are one number where the host is ahead of the device; on a busy machine
            it is late for single steps, and a figure, a mean over some of the steps, then lies between them.
        within: share by which it may be beyond them.
        slack: by which it may be beyond them besides, in the figure's unit.
    """

    name: str
    reported: float
    least: float
    most: float
    within: float = WITHIN
    slack: float = 0.0

    @property
    def holds(self) -> bool:
        below, above = (self.within * abs(bound) + self.slack for bound in (self.least, self.most))
        return self.least - below <= self.reported <= self.most + above


class Steps:
    """What the devices did in the window's steps of one mode: of each step the mean over ranks.

    Args:
        mode: of the steps.
        truths: of each rank, step by step.
        modes: of each rank, step by step.
    """

    def __init__(self, mode: Mode, truths: Sequence[Sequence[StepTruth]], modes: Sequence[Sequence[Mode]]) -> None:
        self.truths = truths
        # The window's first step is recorded, which takes the host longer.
        self.numbers = [
            number for number in range(jobs.FIRST_STEP + 2, len(modes[0])) if {one[number] for one in modes} == {mode}
        ]
        # Steps that follow one of the same mode: what the other mode left behind ends in the first.
        alike = [number for number in self.numbers if {one[number - 1] for one in modes} == {mode}]
        self.pairs = [[(rank[number - 1], rank[number]) for rank in truths] for number in alike]

    def values(self, name: str) -> list[float]:
        """Of each step."""
        return [statistics.fmean(getattr(rank[number], name) for rank in self.truths) for number in self.numbers]

    def ranks(self, name: str) -> list[list[float]]:
        """Of each step of each rank."""
        return [[getattr(rank[number], name) for number in self.numbers] for rank in self.truths]

    def between(self, name: str) -> list[float]:
        """Of each step: how much more there was at its end than at that of the step before, of a running sum."""
        return [statistics.fmean(getattr(b, name) - getattr(a, name) for a, b in pair) for pair in self.pairs]

    @property
    def times_ms(self) -> list[float]:
        return [ns / 1e6 for ns in self.between("end")]

    @property
    def idle_ms(self) -> list[float]:
        return [
            statistics.fmean(step.idle_ms(after=before.end) for before, step in pair) for pair in self.pairs
        ]


def both_modes(truths: Sequence[Sequence[StepTruth]], trained: Sequence[jobs.Trained]) -> tuple[Steps, Steps]:
    """Overlapped and sequential steps."""
    modes = [rank.modes for rank in trained]
    return Steps(Mode.OVERLAPPED, truths, modes), Steps(Mode.SEQUENTIAL, truths, modes)


def compare(
    window: OverlapReport, overlapped: Steps, sequential: Steps, *, host_ahead: bool = True
) -> Iterator[Compared]:
    """Every figure that the log knows too.

    Args:
        window: the report.
        overlapped, sequential: what the devices did.
        host_ahead: whether the host is ahead of the device, so that the steps' times are the device's own.
    """
    o, s = overlapped, sequential
    slack_ms = 0.02
    for name, steps, truth in (
        ("compute_ms", o, "compute_ms"),
        ("compute_isolated_ms", s, "compute_ms"),
        ("compute_busy_ms", o, "compute_busy_ms"),
        ("compute_busy_isolated_ms", s, "compute_busy_ms"),
        ("comm_ms", o, "communication_ms"),
        ("comm_isolated_ms", s, "communication_ms"),
        ("hidden_comm_ms", o, "hidden_ms"),
        ("exposed_comm_ms", o, "exposed_ms"),
        ("waiting_ms", o, "waiting_ms"),
        ("waiting_isolated_ms", s, "waiting_ms"),
    ):
        if (figure := getattr(window, name)) is not None:
            yield _between(name, figure.value, steps.values(truth), slack_ms)
    yield _between("overlap_ratio", _value(window.overlap_ratio), o.values("overlap_ratio"), 1e-3)
    yield _quotient("1 + compute_slowdown", window.compute_slowdown, o.values("compute_ms"), s.values("compute_ms"))
    yield _quotient("1 + comm_slowdown", window.comm_slowdown, o.values("transfer_ms"), s.values("transfer_ms"))
    slowest = [max(step) for step in zip(*s.ranks("compute_busy_ms"), strict=True)]
    yield _between("slowest_compute_ms", _value(window.slowest_compute_ms), slowest, slack_ms)
    yield _between("idle_ms", _value(window.idle_ms), o.idle_ms, 0.05 * statistics.median(o.times_ms))
    if host_ahead:
        yield from _times(window, o, s)


def _times(window: OverlapReport, o: Steps, s: Steps) -> Iterator[Compared]:
    for name, steps in (("e2e_overlapped_ms", o), ("e2e_sequential_ms", s)):
        yield _between(name, _value(getattr(window, name)), steps.times_ms)
    for mode, steps in ((Mode.OVERLAPPED, o), (Mode.SEQUENTIAL, s)):
        timed = [ms for rank in window.samples for block in rank.timed if block.arm is mode for ms in block.step_ms]
        median = statistics.median(steps.times_ms)
        yield Compared(f"median {mode.value} step", statistics.median(timed), median, median)
    step_ms, compute_ms, isolated_ms = (
        statistics.median(values) for values in (o.times_ms, o.values("compute_ms"), s.values("compute_ms"))
    )
    ideal_ms = step_ms - (compute_ms - isolated_ms)
    yield Compared("e2e_ideal_ms", _value(window.e2e_ideal_ms), ideal_ms, ideal_ms)
    yield _quotient("1 + speedup_vs_sequential", window.speedup_vs_sequential, s.times_ms, o.times_ms)


def _between(name: str, reported: float, truth: Sequence[float], slack: float = 0.0) -> Compared:
    return Compared(name, reported, min(truth), max(truth), slack=slack)


def _quotient(name: str, figure: Any, above: Sequence[float], below: Sequence[float]) -> Compared:
    return Compared(name, 1 + _value(figure), min(above) / max(below), max(above) / min(below))


def _value(figure: Any) -> float:
    assert figure is not None
    return float(figure.value)
