"""What overlap does to a run's steps, in a sentence; or why that is not known, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.formatting import (
    PLAIN,
    certainty,
    certainty_in_words,
    change_in_words,
    count,
    is_no_difference,
    may_be_chance,
    range_in_words,
    shortened,
    what_would_show,
)
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.settled import Settled, Verdict
from overlap_callbacks.analysis.run_summary import CUT_SHORT, NOT_VALID, RunSummary
from overlap_callbacks.analysis.statistics import inverted_change

NOTHING_YET = "Nothing has been measured yet: no window is done."
NO_SEQUENTIAL_ARM = "No window had sequential steps, so what overlap saves was not measured."
WINDOWS_DIFFER = "Windows differ by more than their intervals say: each is of its own steps alone."
CONTROL = "A/A control: both sides ran overlapped, so every difference is chance."

_LET_IT_END = "Let the job run on until a window ends."
_READ_NOTES = "Look up the notes in docs/troubleshooting.md."
# What stands in a window's first problem, and what to do about it; docs/troubleshooting.md says more.
_WHAT_TO_DO = (
    (
        ("residual overlap", "of communication time ran beside compute"),
        "Switch off for a measurement what this library cannot hold back (CUDA graphs, symmetric memory, communication "
        "of other threads), or compare two traces: overlap compare.",
    ),
    (("measured something else than rank",), "Give all ranks the same Schedule and the same step numbers."),
    (("no profile shows whether",), "Set profiled_steps to 4."),
    (
        ("recorded steps were skipped",),
        "Start windows where steps are no longer skipped: a higher first_step, or a lower initial loss scale.",
    ),
    (("compiled",), "Look for what recompiles in the steps of a window."),
)
_MAX_PROBLEM = 400
# Blocks under the profiler are of few steps: a settled slowdown of kernels would need long ones.
_KERNELS_UNSETTLED = " Kernels were profiled in short blocks: their slowdown is not the settled one."


class Headline(NamedTuple):
    """The answer of a run.

    Attributes:
        sentence: the answer.
        interval: its 95 % intervals, as a line of its own; empty without any.
        why: why the answer is missing, or doubtful; empty where it is neither.
        what_to_do: about that; empty where there is nothing to do.
        settled: what the difference becomes once a mode has lasted; empty where that is not known.
    """

    sentence: str
    interval: str = ""
    why: str = ""
    what_to_do: str = ""
    settled: str = ""

    @property
    def more(self) -> tuple[str, ...]:
        """The lines below the sentence."""
        found = (
            self.interval,
            self.settled,
            f"Why: {self.why}" if self.why else "",
            f"What to do: {self.what_to_do}" if self.what_to_do else "",
        )
        return tuple([line for line in found if line])

    @property
    def text(self) -> str:
        """All of it as one text."""
        return " ".join((self.sentence, *self.more))


def run_headline(summary: RunSummary, num_arms: int = 0) -> Headline:
    """What overlap does to the steps of this run.

    Args:
        summary: of its windows with sequential steps.
        num_arms: its windows with other arms.
    """
    if not summary.measured:
        if num_arms:
            return Headline(NO_SEQUENTIAL_ARM, what_to_do="Add Sequential() to the arms.")
        if summary.left_out:
            return _all_left_out(summary.left_out)
        return Headline(NOTHING_YET, what_to_do=_LET_IT_END)
    figures = summary.pooled()
    partial = None if figures else summary.partial
    if not figures and partial is None:
        return _no_window_counts(summary)
    if summary.control:
        return Headline(CONTROL)
    if partial is not None:
        return _unfinished(partial)
    settled = summary.settled()
    looks = " (hold at all looks)" if summary.running else " (one look)"
    if settled is not None and settled.verdict is Verdict.SETTLED:
        figures["speedup_vs_sequential"] = settled.estimate
        looks = " (steps: one look; kernels: all looks)" if summary.running else looks
    found = answer(figures, looks)
    if settled is not None:
        unsettled = "compute_slowdown" in figures and settled.verdict in (Verdict.SETTLED, Verdict.NOT_SETTLED)
        found = found._replace(settled=settled_in_words(settled) + (_KERNELS_UNSETTLED if unsettled else ""))
    if summary.windows_differ:
        found = found._replace(interval=f"{found.interval} {WINDOWS_DIFFER}".strip())
    if stalls := summary.stalls:
        found = found._replace(interval=f"{found.interval} {stalls}".strip())
    if found.interval and len(summary.valid_windows) == 1:  # as sure as others by its words, and less so
        found = found._replace(interval=f"{found.interval} All of this rests on one window.")
    return found._replace(**_unverified(summary))


def _all_left_out(reasons: Sequence[str]) -> Headline:
    """Why a run without any window has none."""
    which = "The only window was" if len(reasons) == 1 else f"All {len(reasons):,} windows were"
    reason = shortened(reasons[-1], _MAX_PROBLEM).rstrip(".")
    todo = next((todo for marks, todo in _WHAT_TO_DO if any(mark in reason for mark in marks)), _READ_NOTES)
    return Headline(f"Nothing has been measured: {_small(which)} left out.", why=f"{reason}.", what_to_do=todo)


def step_change(figures: Mapping[str, Estimate]) -> Estimate | None:
    """How much longer a step is with overlap, as a fraction of a sequential step; below zero it is shorter."""
    speedup = figures.get("speedup_vs_sequential")
    return None if speedup is None else inverted_change(speedup)


def answer(figures: Mapping[str, Estimate], looks: str = "") -> Headline:
    """What overlap does to steps, by these figures.

    Args:
        figures: by name.
        looks: how often their intervals may be looked at, in brackets after a space; empty of a window.
    """
    change, slowdown = step_change(figures), figures.get("compute_slowdown")
    if change is None:
        return Headline(
            "Not enough was measured to say what overlap saves here.",
            why="step times of both modes are needed, and one is missing.",
            what_to_do=_READ_NOTES,
        )
    words = change_in_words(change.value, "longer", "shorter")
    if change.ci_low is None:
        sentence = f"Overlap seems to make steps {words} here, from too few blocks to be sure."
    elif is_no_difference(change):
        sentence = "Overlap makes no difference to steps here."
    elif may_be_chance(change):
        sentence = f"Steps are {words} with overlap here, which is {certainty_in_words(change)}."
    else:
        sentence = f"Overlap makes steps {words} here."
    if slowdown is not None and is_no_difference(slowdown):
        sentence += (
            " It makes none to compute kernels."
            if is_no_difference(change)
            else " It makes no difference to compute kernels."
        )
    elif slowdown is not None:
        doubt = f", which is {certainty(slowdown)}" if may_be_chance(slowdown) else ""
        sentence += f" Compute kernels run {change_in_words(slowdown.value, 'slower', 'faster')} with it{doubt}."
    return Headline(sentence, _interval(change, slowdown, looks))


def settled_in_words(settled: Settled) -> str:
    """What the difference becomes once a mode has lasted.

    E.g. ``Settled: 12.1% shorter (11.0% to 13.3% shorter); in blocks of 3 steps 9.8% shorter.``
    """
    change = inverted_change(settled.estimate)
    value = f"{_in_words(change.value)} ({range_in_words(change, 'longer', 'shorter')})"
    blocks = f"in blocks of {count(settled.short_steps, 'step')} {_in_words(_turned(settled.short))}"
    if settled.verdict is Verdict.NOT_SETTLED:
        least = "" if settled.at_least is None else f"at least {_in_words(_turned(settled.at_least))}; "
        return f"Not settled after {count(settled.after_steps, 'step')}: {least}{blocks}."
    if settled.verdict is Verdict.SETTLED:
        return f"Settled: {value}; {blocks}."
    if not settled.resolved:
        return f"Whether the difference changes along a block is not resolved; {blocks}."
    return f"No change along a block is seen: settled {value}; {blocks}."


def _in_words(change: float) -> str:
    return change_in_words(change, "longer", "shorter")


def _turned(longer: float) -> float:
    """How much longer steps without overlap are, as how much longer those with it are."""
    return 1 / (1 + longer) - 1


def _interval(change: Estimate, slowdown: Estimate | None, looks: str) -> str:
    found = [
        f"{what} {range_in_words(estimate, more, less)}"
        for what, estimate, more, less in (
            ("steps", change, "longer", "shorter"),
            ("compute kernels", slowdown, "slower", "faster"),
        )
        if estimate is not None and estimate.ci_low is not None
    ]
    if not found:
        return ""
    would_show = what_would_show(change)
    least = "" if would_show is None else f" A difference of {PLAIN.percent(would_show)} would show."
    return f"95% interval{'s' if len(found) > 1 else ''}{looks}: {'; '.join(found)}.{least}"


def _unfinished(partial: OverlapReport) -> Headline:
    few = partial.speedup_vs_sequential is None
    found = Headline("") if few else answer(partial.figures())
    said = "too few blocks were measured to say what overlap saves." if few else f"so far, {_small(found.sentence)}"
    done = shortened("; ".join(partial.problems[:1]), _MAX_PROBLEM) or "it was cut short"
    unchecked = "" if partial.residual_overlap is not None else ", and no profile has checked its sequential steps"
    return Headline(
        f"Unfinished: {said}",
        found.interval,
        f"no window is whole, and this is window {partial.window} alone ({done}){unchecked}.",
        _LET_IT_END,
    )


def _small(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _no_window_counts(summary: RunSummary) -> Headline:
    windows = summary.windows
    who = "The only window does not count" if len(windows) == 1 else f"None of the {len(windows):,} windows counts"
    sentence = f"{who}, so what overlap saves here is not known."
    states = summary.states()
    state = max((NOT_VALID, CUT_SHORT), key=lambda each: states[each])
    alike = [window for window in windows if summary.state_of(window) == state]
    if not alike:  # windows of another kind: control windows in a run that is none, or the other way round
        return Headline(
            sentence, why="control windows and others are not mixed, and the last start of the job has none.",
            what_to_do=_LET_IT_END,
        )  # fmt: skip
    problem = shortened(next(iter(alike[-1].problems), "the record does not say"), _MAX_PROBLEM).rstrip(".")
    which = f"{count(len(alike), 'window')} {'is' if len(alike) == 1 else 'are'} {state}"
    todo = next((todo for marks, todo in _WHAT_TO_DO if any(mark in problem for mark in marks)), _READ_NOTES)
    if state == CUT_SHORT and todo == _READ_NOTES:
        todo = f"{_LET_IT_END} {_READ_NOTES}"
    return Headline(sentence, why=f"{which}: {problem}.", what_to_do=todo)


def _unverified(summary: RunSummary) -> dict[str, str]:
    """Why the answer is doubtful, where windows compare the modes without proof that sequential steps were so."""
    comparing = [window for window in summary.valid_windows if window.speedup_vs_sequential is not None]
    number = sum(not window.verified for window in comparing)
    if not number:
        return {}
    of = "" if number == len(comparing) else f" of {number} of {len(comparing)} windows"
    if all(window.lower_bound for window in comparing if not window.verified):
        return {
            "why": f"symmetric memory or user buffers communicate{of} past what profiles show: communication and "
            "residual overlap are lower bounds, and the sequential steps are not verified.",
            "what_to_do": "Switch them off for a measurement, or compare two traces: overlap compare.",
        }
    return {
        "why": f"no profile has verified that the sequential steps{of} were sequential.",
        "what_to_do": "Set profiled_steps to 4.",
    }
