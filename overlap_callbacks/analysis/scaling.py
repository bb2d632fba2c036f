"""Runs against what varies between them: the ranks, the batch, a setting of the user's. Pure.

The study's figure 13 has these against the world size: scaling factor, effective bandwidth, communication ratio, and
communication that is not overlapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.results.estimate import Estimate

WORLD_SIZE = "world_size"
Value = int | float | str


def scaling_factor(throughput: float, base_throughput: float) -> float:
    """How much more the job does in a second than the smallest one: throughput over throughput."""
    return throughput / base_throughput


def scaling_efficiency(factor: float, ranks: int, base_ranks: int) -> float:
    """The scaling factor over the factor of the ranks; 1 where each rank does as much as in the smallest job."""
    return factor / (ranks / base_ranks)


class RunFigures(NamedTuple):
    """What one run shows against others.

    Attributes:
        value: its place on the axis.
        work_per_s: tokens, or samples, a second; None if not known. ``Comparison.work`` says which.
        comm_ratio, exposed: communication, and exposed communication, over the step.
        mfu: model FLOP utilisation.
        bandwidths: effective bandwidth in GB/s, by dimension of parallelism.
    """

    name: str
    value: Value
    ranks: int
    step_ms: Estimate | None = None
    work_per_s: Estimate | None = None
    comm_ratio: Estimate | None = None
    exposed: float | None = None
    mfu: float | None = None
    bandwidths: Mapping[str, float] = {}


class ScaledRun(NamedTuple):
    factor: float
    efficiency: float


def scaled(runs: Sequence[RunFigures]) -> dict[str, ScaledRun]:
    """Scaling factor and efficiency of each run with a throughput, by its name; nothing if all have as many ranks.

    The base is the mean over the runs with the fewest ranks.
    """
    # A record that somebody else has written may have no ranks.
    known = [
        (r, r.work_per_s.value) for r in runs if r.work_per_s is not None and r.work_per_s.value > 0 and r.ranks > 0
    ]
    if len({run.ranks for run, _ in known}) < 2:
        return {}
    base_ranks = min(run.ranks for run, _ in known)
    of_base = [work for run, work in known if run.ranks == base_ranks]
    base = sum(of_base) / len(of_base)
    found = {}
    for run, work in known:
        factor = scaling_factor(work, base)
        found[run.name] = ScaledRun(factor, scaling_efficiency(factor, run.ranks, base_ranks))
    return found


def is_numeric(runs: Sequence[RunFigures]) -> bool:
    return all(isinstance(run.value, (int, float)) and not isinstance(run.value, bool) for run in runs)


def in_order(runs: Sequence[RunFigures]) -> list[RunFigures]:
    """By their place on the axis: numbers by size, words by the alphabet; equal ones as they were given."""
    if is_numeric(runs):
        return sorted(runs, key=lambda run: float(run.value))
    return sorted(runs, key=lambda run: str(run.value))
