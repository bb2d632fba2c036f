"""Which combination is fastest, and whether that is beyond noise. Pure.

The unit is the run: steps of one run share its placement, its ports and its moment. A run gives one number, the mean
logarithm of its blocks' step times. A combination is compared with the first one by Welch's interval over runs. Several
combinations are compared with the first at once, so each interval is widened until all of them hold together in 95 of
100 tunings (Bonferroni). Otherwise, the more values one tries, the likelier that one is "faster" by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import CONFIDENCE, Sample, estimate
from overlap_callbacks.experiments.tune.sweep import Run, Tune

# Minimum runs of a combination for an interval.
MIN_RUNS = 2


@dataclass(frozen=True)
class Row:
    """One combination.

    Attributes:
        number: its index in ``Tune.combinations``.
        num_runs: measured runs.
        step_ms: step time, with an interval over runs; None if no run was measured.
        change: step time relative to the baseline, minus one; None for the baseline, and if either is missing.
        failure: why it failed; empty if it did not.
    """

    number: int
    num_runs: int
    step_ms: Estimate | None
    change: Estimate | None
    failure: str

    @property
    def is_ranked(self) -> bool:
        """Whether it has a step time, and did not fail."""
        return self.step_ms is not None and not self.failure


@dataclass(frozen=True)
class Ranking:
    """All combinations.

    Attributes:
        rows: fastest first; unranked ones last.
        baseline: the combination that others are compared with: the first that was measured. None if none was.
        winner: the fastest of those that beat the baseline beyond noise; None if there is none.
        as_good: others whose difference from the winner is within noise.
    """

    rows: tuple[Row, ...]
    baseline: int | None
    winner: int | None
    as_good: tuple[int, ...]

    def row(self, number: int) -> Row:
        """The row of a combination."""
        return next(row for row in self.rows if row.number == number)

    @property
    def measured(self) -> list[Row]:
        """The ranked rows."""
        return [row for row in self.rows if row.is_ranked]

    @property
    def is_clear(self) -> bool:
        """Whether intervals say which is fastest: the winner, or the baseline if all others are slower."""
        changes = [row.change for row in self.measured if row.change is not None]
        return self.winner is not None or (bool(changes) and all(map(_is_slower, changes)))

    @property
    def failed(self) -> list[Row]:
        """The rows of combinations that failed."""
        return [row for row in self.rows if row.failure]


def ranked(tune: Tune) -> Ranking:
    """Rank the combinations of a tuning by the results so far."""
    runs = {number: [run for run in tune.lines if run.combination == number] for number in tune.settings}
    samples = {number: _sample([run for run in of_one if not run.failure]) for number, of_one in runs.items()}
    failures = {number: next((run.failure for run in of_one if run.failure), "") for number, of_one in runs.items()}
    good = [number for number in runs if len(samples[number].blocks) and not failures[number]]
    baseline = good[0] if good else None
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(good) - 1)

    def change(number: int, base: int | None) -> Estimate | None:
        if base is None or number == base or number not in good:
            return None
        return _change(samples[number], samples[base], confidence)

    rows = [
        Row(
            number=number,
            num_runs=len(samples[number].blocks),
            step_ms=estimate(lambda means: float(means[0]), samples[number], scale=math.exp, min_blocks=MIN_RUNS),
            change=change(number, baseline),
            failure=failures[number],
        )
        for number in runs
    ]
    rows.sort(key=_place)
    faster = [
        row for row in rows if row.change is not None and row.change.ci_high is not None and row.change.ci_high < 0
    ]
    winner = faster[0].number if faster else None
    as_good = [row.number for row in rows if winner is not None and not _is_slower(change(row.number, winner))]
    kept = tuple([number for number in as_good if number in good and number not in (winner, baseline)])
    return Ranking(tuple(rows), baseline, winner, kept)


def _place(row: Row) -> tuple[bool, float, int]:
    return not row.is_ranked, math.inf if row.step_ms is None else row.step_ms.value, row.number


def _is_slower(change: Estimate | None) -> bool:
    return change is not None and change.ci_low is not None and change.ci_low > 0


def _sample(runs: Sequence[Run]) -> Sample:
    logs = [[math.log(step_ms)] for run in runs if (step_ms := run.step_ms) is not None]
    return Sample(np.array(logs, dtype=np.float64).reshape(-1, 1), sum([run.num_steps for run in runs]))


def _change(one: Sample, other: Sample, confidence: float) -> Estimate | None:
    return estimate(
        lambda a, b: float(a[0] - b[0]), one, other, scale=math.expm1, min_blocks=MIN_RUNS, confidence=confidence
    )
