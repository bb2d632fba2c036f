"""Which aggregates W&B keeps of each metric in a run's summary, and the texts and run means that stand beside them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from overlap_callbacks.analysis.results.report import Estimate, OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.sinks.metric_keys import COUNTS, FLAGS, describe

# Means over the run so far, under keys of their own: W&B's bar charts want one plain number for a run.
RUN_FIGURES = (
    "e2e_ideal_ms", "e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential", "gap_to_ideal",
    "compute_slowdown", "comm_slowdown", "hidden_comm_ms", "exposed_comm_ms",
)  # fmt: skip

_PARTS_NOT_NEEDED = ("kernels", "pairs", "dimensions", "pictures", "collectives", "samples", "power_trace")


def aggregates(key: str) -> str:
    """What ``define_metric(summary=...)`` is told of a metric.

    Figures: all four, since a run is judged by its mean and by its worst window, and the last says how it stands. What
    has no meaning when averaged (bounds of an interval, bytes of a step) has its last value. Peaks have their highest,
    flags the share of windows that have them, counts their lowest.
    """
    found = describe(key)
    if found.bound.startswith("ci"):
        return "last"
    if found.bound:  # the extreme ranks, over all windows
        return "min,last" if found.bound == "rank_low" else "max,last"
    if found.figure in FLAGS:
        return "mean,last"
    if found.figure in COUNTS:
        return "min,last"
    if found.unit in ("bytes", "messages", ""):
        return "last"
    if "peak" in found.figure or "p99" in found.figure:
        return "max,last"
    return "min,max,mean,last"


class RunSoFar:
    """The run's verdict and means, window by window.

    Args:
        info: of the run; None where the sink was never opened.
    """

    def __init__(self, info: RunInfo | None) -> None:
        from overlap_callbacks.report.record import Record

        self._record = Record(Path(), runs=[info] if info is not None else [])

    def add(self, report: OverlapReport) -> None:
        empty = {name: () for name in _PARTS_NOT_NEEDED if name != "power_trace"}
        light = msgspec.structs.replace(report, **empty, power_trace=None)
        if not self._record.runs and report.control:
            return  # which kind of run this is would not be known
        self._record.windows.append(light)

    def figures(self) -> dict[str, Estimate]:
        return self._record.pooled()

    def metrics(self) -> dict[str, float]:
        """Means over the valid windows so far, with intervals."""
        flat = {}
        for name, value in self.figures().items():
            if name in RUN_FIGURES:
                flat[f"overlap_run/{name}"] = value.value
                if value.ci_low is not None and value.ci_high is not None:
                    flat[f"overlap_run/{name}_ci_low"] = value.ci_low
                    flat[f"overlap_run/{name}_ci_high"] = value.ci_high
        return flat

    def verdict(self) -> str:
        """Is overlap worth it here? A sentence."""
        from overlap_callbacks.report.terminal import verdict

        last = self._record.windows[-1] if self._record.windows else None
        if last is None or last.control:
            return "A/A control: both sides ran overlapped, so every difference is chance."
        if not self._record.valid_windows:
            return "No window counts, so whether overlap is worth it here is not known."
        return verdict(self.figures())


def power_verdict(report: OverlapReport) -> str | None:
    """What the slowdown is due to, as far as clocks and counters tell."""
    found = report.power_verdict
    if found is None:
        return None
    return f"{found.verdict}: {'; '.join(found.evidence)}" if found.evidence else found.verdict
