"""What overlap does to a run's steps, in a sentence; or why that is unknown, and what to do."""

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
    listed,
    may_be_chance,
    range_in_words,
    shortened,
    what_would_show,
)
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import SlowdownCause
from overlap_callbacks.analysis.results.report import OverlapReport, WindowReport
from overlap_callbacks.analysis.results.settled import Settled, Verdict
from overlap_callbacks.analysis.run_summary import CUT_SHORT, NOT_VALID, RunSummary
from overlap_callbacks.analysis.statistics import inverted_change, relative_change

NOTHING_YET = "Nothing has been measured yet: no window is done."
NO_SEQUENTIAL_ARM = "No window had sequential steps, so what overlap saves was not measured."
WINDOWS_DIFFER = "Windows differ by more than their intervals say: each is of its own steps alone."
CONTROL = "A/A control: both sides ran overlapped, so every difference is chance."

_LET_IT_END = "Let the job run on until a window ends."
_READ_NOTES = "Look up the notes in docs/troubleshooting.md."
_PROFILE = "Set profiled_steps to 4."
# Texts in a window's first problem, and what to do about them; docs/troubleshooting.md says more.
_WHAT_TO_DO = (
    (
        ("residual overlap", "of communication time ran beside compute"),
        "Switch off for a measurement what this library cannot hold back (CUDA graphs, symmetric memory, communication "
        "of other threads), or compare two traces: overlap compare.",
    ),
    (("measured something else than rank",), "Give all ranks the same Schedule and the same step numbers."),
    (("no profile shows whether",), _PROFILE),
    (
        ("recorded steps were skipped",),
        "Start windows where steps are no longer skipped: a higher first_step, or a lower initial loss scale.",
    ),
    (("compiled",), "Look for what recompiles in the steps of a window."),
)
_MAX_PROBLEM = 400
# Profiled blocks have few steps; a settled slowdown of kernels would need long ones.
_KERNELS_UNSETTLED = " Kernels were profiled in short blocks: their slowdown is not the settled one."


class Headline(NamedTuple):
    """The answer of a run. Parts without content are empty.

    Attributes:
        interval: its 95 % intervals, as a separate line.
        why: why the answer is missing or doubtful.
        what_to_do: about that.
        settled: the difference once a mode has lasted.
    """

    sentence: str
    interval: str = ""
    why: str = ""
    what_to_do: str = ""
    settled: str = ""

    @property
    def more(self) -> tuple[str, ...]:
        found = (
            self.interval,
            self.settled,
            f"Why: {self.why}" if self.why else "",
            f"What to do: {self.what_to_do}" if self.what_to_do else "",
        )
        return tuple([line for line in found if line])

    @property
    def text(self) -> str:
        return " ".join((self.sentence, *self.more))


def run_headline(summary: RunSummary, num_arms: int = 0) -> Headline:
    """What overlap does to the steps of this run; ``num_arms`` windows are of other arms."""
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
    remarks = (found.interval, WINDOWS_DIFFER if summary.windows_differ else "", summary.stalls)
    interval = " ".join([remark for remark in remarks if remark])
    if interval and len(summary.valid_windows) == 1:  # worded as certain as others, but less so
        interval += " All of this rests on one window."
    return found._replace(interval=interval, **_unverified(summary))


def _all_left_out(reasons: Sequence[str]) -> Headline:
    """The headline of a run without windows: why it has none."""
    which = "The only window was" if len(reasons) == 1 else f"All {len(reasons):,} windows were"
    reason = shortened(reasons[-1], _MAX_PROBLEM).rstrip(".")
    todo = next((todo for marks, todo in _WHAT_TO_DO if any(mark in reason for mark in marks)), _READ_NOTES)
    return Headline(f"Nothing has been measured: {_small(which)} left out.", why=f"{reason}.", what_to_do=todo)


def step_change(figures: Mapping[str, Estimate]) -> Estimate | None:
    """How much longer a step is with overlap, as a fraction of a sequential step; negative if shorter."""
    speedup = figures.get("speedup_vs_sequential")
    return None if speedup is None else inverted_change(speedup)


def answer(figures: Mapping[str, Estimate], looks: str = "") -> Headline:
    """What overlap does to steps, from these figures.

    ``looks`` says, in brackets after a space, how often their intervals may be looked at; empty for a window.
    """
    change, slowdown = step_change(figures), figures.get("compute_slowdown")
    if change is None:
        return Headline(
            "Not enough was measured to say what overlap saves here.",
            why="step times of both modes are needed, and one is missing.",
            what_to_do=_READ_NOTES,
        )
    words = _in_words(change.value)
    if change.ci_low is None:
        sentence = f"Overlap seems to make steps {words} here, from too few blocks to be sure."
    elif is_no_difference(change):
        sentence = "Overlap makes no difference to steps here."
    elif may_be_chance(change):
        sentence = f"Steps are {words} with overlap here, which is {certainty_in_words(change)}."
    else:
        sentence = f"Overlap makes steps {words} here."
    if slowdown is not None and is_no_difference(slowdown):
        sentence += f" It makes {'none' if is_no_difference(change) else 'no difference'} to compute kernels."
    elif slowdown is not None:
        doubt = f", which is {certainty(slowdown)}" if may_be_chance(slowdown) else ""
        sentence += f" Compute kernels run {change_in_words(slowdown.value, 'slower', 'faster')} with it{doubt}."
    return Headline(sentence, _interval(change, slowdown, looks))


def settled_in_words(settled: Settled) -> str:
    """The difference once a mode has lasted.

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
    """Convert how much longer steps without overlap are into how much longer those with it are."""
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
    if not alike:  # windows of another kind: control windows in a normal run, or the reverse
        return Headline(
            sentence, why="control windows and others are not mixed, and the last start of the job has none.",
            what_to_do=_LET_IT_END,
        )  # fmt: skip
    problem = shortened(next(iter(alike[-1].problems), "the record does not say"), _MAX_PROBLEM).rstrip(".")
    which = f"{count(len(alike), 'window')} {'is' if len(alike) == 1 else 'are'} {state}"
    todo = next((todo for marks, todo in _WHAT_TO_DO if any(mark in problem for mark in marks)), _READ_NOTES)
    if todo == _PROFILE:
        todo = profile_more(summary)
    if state == CUT_SHORT and todo == _READ_NOTES:
        todo = f"{_LET_IT_END} {_READ_NOTES}"
    return Headline(sentence, why=f"{which}: {problem}.", what_to_do=todo)


def _unverified(summary: RunSummary) -> dict[str, str]:
    """Why the answer is doubtful, if windows compare the modes without proof that sequential steps were sequential."""
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
        "what_to_do": profile_more(summary),
    }


def profile_more(summary: RunSummary) -> str:
    """What to do if no profile shows something: profile, or if that was enabled, find out why there is no profile."""
    profiled = None if summary.run is None else summary.run.schedule.get("profiled_steps")
    return f"Steps were to be profiled, but their profile is missing. {_READ_NOTES}" if profiled else _PROFILE


# Figures in a window's log line.
_LOGGED = (
    "e2e_overlapped_ms", "e2e_sequential_ms", "e2e_ideal_ms", "compute_slowdown", "speedup_vs_sequential",
)  # fmt: skip


def run_verdict(summary: RunSummary, num_arms: int = 0) -> str:
    """What overlap does to the steps of this run, with its intervals, as one text; see ``run_headline``."""
    return run_headline(summary, num_arms).text


def cause_in_words(cause: SlowdownCause | None) -> str | None:
    if cause is None:
        return None
    return f"{cause.verdict}: {'; '.join(cause.evidence)}" if cause.evidence else cause.verdict


def _state(report: WindowReport, states: Mapping[str, bool], arm: str = "") -> str:
    words = [word for word, holds in states.items() if holds]
    return " ".join([f"overlap window {report.window} (step {report.first_step}){arm}", *words])


def arm_summary(report: ArmReport) -> str:
    """A window of an arm as one log line."""
    states = {"INVALID": not report.valid, "INCOMPLETE": not report.complete, "A/A": report.control}
    parts = [_state(report, states, f", arm {report.arm.name}")]
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
    """A window as one log line."""
    unverified = report.valid and not report.verified and report.speedup_vs_sequential is not None
    states = {"INVALID": not report.valid, "NOT VERIFIED": unverified, "INCOMPLETE": not report.complete}
    parts = [_state(report, {**states, "A/A control": report.control})]
    for figure in map(figure_named, _LOGGED):
        estimate: Estimate | None = getattr(report, figure.name)
        if estimate is not None:
            bounds = PLAIN.figure_interval(figure, estimate)
            shown = PLAIN.figure(figure, estimate.value) + (f" [{bounds}]" if bounds else "")
            parts.append(f"{figure.short} {shown}")
    change = step_change(report.figures())
    would_show = None if change is None else what_would_show(change)
    if would_show is not None:
        parts.append(f"a difference of {PLAIN.percent(would_show)} would show")
    if report.cost is not None:
        parts.append(f"measuring cost {PLAIN.measuring_cost(report.cost)}")
    parts.append(f"{report.num_reporting} of {report.world_size} ranks")
    line = ", ".join(parts)
    if report.settled is None or report.control:
        return line
    return f"{line}. {settled_in_words(report.settled)}"


THESE_RUNS = "It holds for these runs: repeat them to see what differs from run to run."
_MOST_NAMED = 3


class RunSpeed(NamedTuple):
    """How fast a run is, with overlap. ``work_per_s`` is tokens, or samples, a second; None to compare steps."""

    name: str
    step_ms: Estimate
    work_per_s: Estimate | None = None


class Fastest(NamedTuple):
    """The result of comparing several runs. ``name`` is empty unless that run is clearly faster than the others."""

    headline: Headline
    name: str = ""


def fastest(runs: Sequence[RunSpeed], work: str = "") -> Fastest:
    """Which of two or more runs is fastest, compared with the next one.

    Nothing is claimed about a run whose interval against the fastest one includes zero. Selecting the minimum does not
    inflate the error rate here: its distance from the next one is smaller than that of any other pair. ``work``: what
    all runs' ``work_per_s`` counts, ``tokens`` or ``samples``, if that is compared.
    """
    ordered = sorted(runs, key=lambda run: -_of(run, work).value if work else run.step_ms.value)
    first, second, *_ = ordered
    changes = {run.name: relative_change(_of(run, work), _of(first, work)) for run in ordered[1:]}
    change = changes[second.name]
    if change is None:  # a zero time, in a record written by somebody else
        return Fastest(Headline("Which run is faster is not known: a step of no time was recorded."))
    unsure = [name for name, each in changes.items() if not _sure(each)]
    sentence = _sentence(first.name, second.name, change, unsure, len(runs), work)
    return Fastest(Headline(sentence, _speeds(first, second, change, work)), "" if unsure else first.name)


def _of(run: RunSpeed, work: str) -> Estimate:
    return run.work_per_s if work and run.work_per_s is not None else run.step_ms


def _sure(change: Estimate | None) -> bool:
    return change is not None and change.ci_low is not None and not may_be_chance(change)


def _sentence(first: str, second: str, change: Estimate, unsure: Sequence[str], num_runs: int, work: str) -> str:
    words = f"{change_in_words(change.value, 'more', 'fewer')} {work} a second" if work else _in_words(change.value)
    than = second if work else f"those of {second}"
    seems = change.ci_low is None
    if num_runs == 2:
        if work:
            claim = f"{first} {'seems to train' if seems else 'trains'} {words} than {than}"
        else:
            claim = f"Steps of {first} {'seem' if seems else 'are'} {words} than {than}"
    else:
        most = f"the most {work} a second" if work else "the shortest steps"
        claim = f"{first} {'seems to have' if seems else 'has'} {most}: {words} than {than}, the next run"
    if seems:
        return f"{claim}, from too few blocks to be sure."
    if second in unsure:
        return f"{claim}, which may be chance."
    return f"{claim}." + (f" Its lead over {listed(unsure, _MOST_NAMED)} may be chance." if unsure else "")


def _speeds(first: RunSpeed, second: RunSpeed, change: Estimate, work: str) -> str:
    unit = f"{work}/s" if work else "ms"
    both = " against ".join([PLAIN.quantity(_of(run, work).value, unit) for run in (first, second)])
    bounds = range_in_words(change, "more", "fewer") if work else range_in_words(change, "longer", "shorter")
    if not bounds:
        return f"{both}."
    return f"95% interval: {bounds} ({both}). {THESE_RUNS}"
