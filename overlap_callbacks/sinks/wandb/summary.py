"""Which aggregates W&B keeps of each metric in a run's summary, and the means over the run so far."""

from __future__ import annotations

from overlap_callbacks.analysis.results.metrics import figure_metrics
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.sinks.metric_keys import COUNTS, FLAGS, describe

# Means over the run so far, under keys of their own: W&B's bar charts need one plain number per run.
RUN_FIGURES = (
    "e2e_ideal_ms", "e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential", "gap_to_ideal",
    "compute_slowdown", "comm_slowdown", "hidden_comm_ms", "exposed_comm_ms",
)  # fmt: skip


def aggregates(key: str) -> str:
    """The aggregates of a metric, for ``define_metric(summary=...)``.

    Figures have all four: a run is judged by its mean and by its worst window, and the last window says how it stands
    now. A metric that cannot be averaged (a bound of an interval, the bytes of a step) has its last value, a peak its
    highest, a count its lowest, and a flag the share of windows that have it.
    """
    described = describe(key)
    if described.bound.startswith("ci"):
        return "last"
    if described.bound:  # the extreme ranks, over all windows
        return "min,last" if described.bound == "rank_low" else "max,last"
    if described.figure in FLAGS:
        return "mean,last"
    if described.figure in COUNTS:
        return "min,last"
    if "peak" in described.figure or "p99" in described.figure:
        return "max,last"
    if described.unit in ("bytes", "messages", ""):
        return "last"
    return "min,max,mean,last"


def run_metrics(summary: RunSummary) -> dict[str, float]:
    """Means over the valid windows so far, with intervals, under ``overlap_run/``; and how many windows these are."""
    pooled = summary.pooled()
    metrics = figure_metrics({name: pooled[name] for name in pooled if name in RUN_FIGURES}, valid=True)
    means = {key.replace("overlap/", "overlap_run/", 1): value for key, value in metrics.items()}
    return {**means, "overlap_run/windows": float(len(summary.valid_windows))}
