"""Which windows of a long run stand in the record with every detail, so that its size stays bounded."""

from __future__ import annotations

from collections import Counter

import msgspec

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import RankWindow

# From two of these on, every second window is kept whole, from three on every third, and so on.
_STRETCH = 100


class KeptDetails:
    """Leaves out, of most windows after the first two hundred, what only a close look at that window needs.

    That is its pictures, its trace of power, its experts' loads by step, each rank's own tables and rank 0's series of
    steps. All figures, the job's tables and each rank's blocks stay. Windows that do not count are thinned apart from
    the others: the first of those stay whole too.
    """

    def __init__(self) -> None:
        self._seen: Counter[bool] = Counter()

    def of(self, report: OverlapReport) -> OverlapReport:
        """The report as the record keeps it; to be called once for each, in order."""
        counts = report.valid and report.complete
        number = self._seen[counts]
        self._seen[counts] += 1
        if number % max(1, number // _STRETCH) == 0:
            return report
        samples = tuple([_without_tables(sample) for sample in report.samples])
        return msgspec.structs.replace(report, pictures=(), power_trace=None, expert_details=None, samples=samples)


def _without_tables(sample: RankWindow) -> RankWindow:
    return msgspec.structs.replace(sample, kernels=(), pairs=(), dimension_pairs=(), series=None)
