"""Is overlap worth it here? In a sentence. And what a window measured, in a line for the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlap_callbacks.analysis.formatting import PLAIN, change_in_words, may_be_chance
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.power import SlowdownCause
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.run_summary import RunSummary

NOTHING_YET = "Nothing has been measured yet: no window is done."
NO_WINDOW_COUNTS = "No window counts, so whether overlap is worth it here is not known."
NO_SEQUENTIAL_ARM = "No window had sequential steps, so what overlap saves was not measured."
CONTROL = "A/A control: both sides ran overlapped, so every difference is chance."
_TOO_FEW_BLOCKS = "Too few blocks were measured to say whether overlap is worth it here."

# What the log says of a window.
_LOGGED = (
    "e2e_overlapped_ms", "e2e_sequential_ms", "e2e_ideal_ms", "compute_slowdown", "speedup_vs_sequential",
)  # fmt: skip


def run_verdict(summary: RunSummary, num_arms: int = 0) -> str:
    """Is overlap worth it for this run? One sentence, or two.

    Args:
        summary: of its windows with sequential steps.
        num_arms: its windows with other arms.
    """
    if not summary.measured:
        return NO_SEQUENTIAL_ARM if num_arms else NOTHING_YET
    figures = summary.pooled()
    partial = None if figures else summary.partial
    if not figures and partial is None:
        return NO_WINDOW_COUNTS
    if summary.control:
        return CONTROL
    if partial is None:
        return verdict(figures) + _unverified(summary.valid_windows)
    if partial.speedup_vs_sequential is None:
        return _TOO_FEW_BLOCKS
    checked = "" if partial.residual_overlap is not None else ", whose sequential steps no profile has checked"
    return f"{verdict(partial.figures())} That is of one unfinished window{checked}."


def _unverified(windows: Sequence[OverlapReport]) -> str:
    """A sentence where windows compare the modes without proof that sequential steps were sequential; else empty."""
    comparing = [window for window in windows if window.speedup_vs_sequential is not None]
    count = sum(not window.verified for window in comparing)
    if not count:
        return ""
    of = "" if count == len(comparing) else f" of {count} of {len(comparing)} windows"
    return f" No profile has verified that the sequential steps{of} were sequential."


def verdict(figures: Mapping[str, Estimate]) -> str:
    """Is overlap worth it, by these figures? One sentence."""
    speedup, slowdown = figures.get("speedup_vs_sequential"), figures.get("compute_slowdown")
    if speedup is None:
        return "Not enough was measured to say whether overlap is worth it here."
    bounds = PLAIN.figure_interval(figure_named("speedup_vs_sequential"), speedup)
    change = change_in_words(speedup.value, "longer", "less time") + (f" (95% interval {bounds})" if bounds else "")
    if speedup.ci_low is None or speedup.ci_high is None:
        sentence = f"Without overlap, steps take {change}: too few blocks to say more"
    elif speedup.ci_low > 0:
        sentence = f"Overlap is worth it here: without it, steps take {change}"
    elif speedup.ci_high < 0:
        sentence = f"Overlap costs more than it saves here: without it, steps take {change}"
    else:
        sentence = f"Whether overlap is worth it here is undecided: without it, steps take {change}"
    if slowdown is not None:
        sentence += f"; compute kernels run {change_in_words(slowdown.value, 'slower', 'faster')} with overlap"
        if may_be_chance(slowdown):
            sentence += ", which may be chance"
    return sentence + "."


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
    parts.append(f"{report.num_heard} of {report.world_size} ranks")
    return ", ".join(parts)
