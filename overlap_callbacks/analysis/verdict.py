"""What a run says of overlap, as one text. And what a window measured, in a line for the log."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PLAIN, what_would_show
from overlap_callbacks.analysis.headline import run_headline, settled_in_words
from overlap_callbacks.analysis.measuring_cost import cost_of_window
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.power import SlowdownCause
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.analysis.statistics import inverted_change

# What the log says of a window.
_LOGGED = (
    "e2e_overlapped_ms", "e2e_sequential_ms", "e2e_ideal_ms", "compute_slowdown", "speedup_vs_sequential",
)  # fmt: skip


def run_verdict(summary: RunSummary, num_arms: int = 0) -> str:
    """What overlap does to the steps of this run, with its intervals, as one text.

    Args:
        summary: of its windows with sequential steps.
        num_arms: its windows with other arms.
    """
    return run_headline(summary, num_arms).text


def cause_in_words(cause: SlowdownCause | None) -> str | None:
    """What a slowdown is due to, with its evidence; None where that is not known."""
    if cause is None:
        return None
    return f"{cause.verdict}: {'; '.join(cause.evidence)}" if cause.evidence else cause.verdict


def arm_summary(report: ArmReport) -> str:
    """A window of an arm in one line for the log."""
    state = f"overlap window {report.window} (step {report.first_step}), arm {report.arm.name}"
    for wrong, word in ((not report.valid, "INVALID"), (not report.complete, "INCOMPLETE"), (report.control, "A/A")):
        if wrong:
            state += f" {word}"
    parts = [state]
    for what, estimate, unit, signed in (
        ("step", report.step_ms, "ms", False),
        ("as configured", report.configured_step_ms, "ms", False),
        ("speed-up of the arm", report.speedup, "fraction", True),
    ):
        if estimate is not None:
            parts.append(f"{what} {PLAIN.with_interval(estimate, unit, signed=signed)}")
    parts.append(f"{report.num_ranks} of {report.world_size} ranks")
    return ", ".join(parts)


def summary(report: OverlapReport) -> str:
    """A window in one line for the log."""
    state = f"overlap window {report.window} (step {report.first_step})"
    if not report.valid:
        state += " INVALID"
    elif not report.verified and report.speedup_vs_sequential is not None:
        state += " NOT VERIFIED"
    if not report.complete:
        state += " INCOMPLETE"
    if report.control:
        state += " A/A control"
    parts = [state]
    for figure in map(figure_named, _LOGGED):
        estimate: Estimate | None = getattr(report, figure.name)
        if estimate is not None:
            bounds = PLAIN.figure_interval(figure, estimate)
            shown = PLAIN.figure(figure, estimate.value) + (f" [{bounds}]" if bounds else "")
            parts.append(f"{figure.short} {shown}")
    change = None if report.speedup_vs_sequential is None else inverted_change(report.speedup_vs_sequential)
    would_show = None if change is None else what_would_show(change)
    if would_show is not None:
        parts.append(f"a difference of {PLAIN.percent(would_show)} would show")
    cost = cost_of_window(report)
    if cost is not None:
        parts.append(f"measuring cost {PLAIN.measuring_cost(cost)}")
    parts.append(f"{report.num_heard} of {report.world_size} ranks")
    line = ", ".join(parts)
    if report.settled is None or report.control:
        return line
    return f"{line}. {settled_in_words(report.settled)}"
