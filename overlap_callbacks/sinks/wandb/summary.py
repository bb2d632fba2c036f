"""The means over the run so far, for W&B."""

from __future__ import annotations

from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.figure import values_of
from overlap_callbacks.analysis.run_summary import RunSummary

# Means over the run so far, under keys of their own: W&B's bar charts need one plain number per run.
RUN_FIGURES = (
    "e2e_ideal_ms", "e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential", "gap_to_ideal",
    "compute_slowdown", "comm_slowdown", "hidden_comm_ms", "exposed_comm_ms",
)  # fmt: skip


def run_metrics(summary: RunSummary) -> dict[str, float]:
    """Means over the valid windows so far, with intervals, under ``overlap_run/``; and how many windows these are."""
    pooled = summary.pooled()
    values = [
        value
        for figure in FIGURES
        if figure.name in RUN_FIGURES
        for value in values_of(figure, pooled.get(figure.name))
    ]
    means = {value.key.replace("overlap/", "overlap_run/", 1): value.number for value in values}
    return {**means, "overlap_run/windows": float(len(summary.valid_windows))}
