"""The headline of a run, made once for every screen: what is exposed, what overlap saves and costs, and how certain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.bottleneck import Bottleneck, bottleneck_of, run_bottleneck
from overlap_callbacks.analysis.buckets import bucket_sizes, gradient_bytes_of
from overlap_callbacks.analysis.formatting import (
    CLEAR,
    INCONCLUSIVE,
    NOT_RESOLVED,
    PLAIN,
    WITHIN_NOISE,
    Style,
    at_most_in_words,
    certainty,
    certainty_in_words,
    change_decimals,
    change_in_words,
    count,
    decimals_of,
    enough_decimals,
    says_nothing,
    shortened,
)
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import SlowdownCause
from overlap_callbacks.analysis.results.report import OverlapReport, WindowReport
from overlap_callbacks.analysis.results.settled import Settled, Verdict
from overlap_callbacks.analysis.results.step_parts import exposed_share, surely_exposed
from overlap_callbacks.analysis.run_summary import (
    CUT_SHORT,
    NOT_SETTLED,
    NOT_VALID,
    NOT_VERIFIED,
    RunSummary,
    with_settled,
)
from overlap_callbacks.analysis.statistics import inverted_change

NOTHING_YET = "Nothing has been measured yet: no window is done."
NO_SEQUENTIAL_ARM = "No window had sequential steps, so what overlap saves was not measured."
WINDOWS_DIFFER = "Windows differ by more than their intervals say: each is of its own steps alone."
CONTROL = "A/A control: both sides ran overlapped, so every difference is chance."

# States of a headline besides ``CLEAR``, ``WITHIN_NOISE`` and ``INCONCLUSIVE`` of what overlap saves, ``NOT_SETTLED``
# and ``NOT_VERIFIED``.
NOTHING_OVERLAPS, ONE_WINDOW, INVALID = "nothing overlaps", "one window", "invalid"
UNFINISHED, NOT_MEASURED, OF_CONTROL = "unfinished", "not measured", "control"

_MORE_WINDOWS = "More windows narrow the intervals: let the job run longer, or start it with OVERLAP_CALLBACKS=quick."
_LET_IT_END = "Let the job run on until a window ends."
_READ_NOTES = "Look up the notes in docs/troubleshooting.md."
_PROFILE = "Set profiled_steps to 4."
# Texts in a window's first problem, and what to do about them; docs/troubleshooting.md says more.
_WHAT_TO_DO = (
    (
        ("of compute ran during", "of communication time ran", "residual overlap"),  # the last in earlier records
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
# What lets communication overlap, where an adapter has read a setting that begins so, and a switch is not on already.
_TO_OVERLAP = (
    ("ddp_bucket_cap", "", "Lower DDP's bucket_cap_mb, so that reductions begin during the backward pass."),
    ("ddp_", "ddp_overlap_grad_reduce", "Reduce gradients during the backward pass: Megatron's --overlap-grad-reduce."),
    ("ddp_", "", "Lower Megatron's --ddp-bucket-size, so that reductions begin during the backward pass."),
    ("zero_", "zero_overlap_comm", "Set overlap_comm to true in DeepSpeed's zero_optimization."),
    ("zero_", "", "Lower ZeRO's reduce_bucket_size, so that reductions begin during the backward pass."),
    ("fsdp_", "", "Wrap layers as FSDP units of their own, so that one is gathered while another computes."),
    ("", "", "Issue collectives with async_op=True, and wait for them later."),
)
_MAX_PROBLEM = 400
# Profiled blocks have few steps; a settled slowdown of kernels would need long ones.
_KERNELS_UNSETTLED = " The slowdown is of short blocks, not settled."
# Less of communication than this is shown as none; and an interval wider than this each way is printed. Where it holds
# zero, its upper end says something up to here.
_HIDES_NOTHING, _WIDE, _HARDLY_HIDDEN = 0.01, 0.1, 0.5


class Headline(NamedTuple):
    """The answer of a run. Parts without content are empty.

    Attributes:
        sentence: the first: what is exposed, if a profile shows that.
        also: the others: what overlap saves, and how much slower compute is.
        interval: about its 95 % intervals.
        why: why the answer is missing or doubtful.
        what_to_do: about that.
        settled: the difference once a mode has lasted.
        state: in a word or two, for programs and charts.
    """

    sentence: str
    also: tuple[str, ...] = ()
    interval: str = ""
    why: str = ""
    what_to_do: str = ""
    settled: str = ""
    state: str = NOT_MEASURED

    @property
    def more(self) -> tuple[str, ...]:
        found = [*self.also, self.interval, self.settled]
        found += [f"Why: {self.why}" if self.why else "", f"What to do: {self.what_to_do}" if self.what_to_do else ""]
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
        return Headline(CONTROL, state=OF_CONTROL)
    if partial is not None:
        return _unfinished(partial)
    settled = summary.settled()
    looks = ", valid however often you look" if summary.running else ""
    if settled is not None and settled.verdict is Verdict.SETTLED and not summary.not_settled:
        own = "valid however often you look" if settled.holds_at_all_looks else "for one look"
        looks += "" if settled.holds_at_all_looks is summary.running else f" (the saving's: {own})"
    found = answer(figures)
    if found.why:  # nothing to compare
        return found
    if settled is not None:
        unsettled = "compute_slowdown" in figures and settled.verdict in (Verdict.SETTLED, Verdict.NOT_SETTLED)
        words = settled_in_words(settled) if settled.headlined else ""
        found = found._replace(settled=words + (_KERNELS_UNSETTLED if unsettled else ""))
        if summary.not_settled and found.state != NOTHING_OVERLAPS:
            found = found._replace(state=NOT_SETTLED)
    if found.state == NOTHING_OVERLAPS:
        known = {} if summary.run is None else summary.run.configuration
        rows = [row for row in _TO_OVERLAP if not row[0] or any(name.startswith(row[0]) for name in known)]
        todo = next(todo for _, switch, todo in rows if known.get(switch) is not True)
        cap, all_bytes = known.get("ddp_bucket_cap_bytes"), gradient_bytes_of(known)
        sizes = bucket_sizes(all_bytes, cap, larger=False) if cap and all_bytes else []
        found = found._replace(what_to_do=todo + (f" Try {' or '.join(sizes)} MiB." if sizes else ""))
    alone = len(summary.valid_windows) == 1  # worded as certain as others, but less so
    state = ONE_WINDOW if alone and found.state == CLEAR else found.state
    unclear, advised = state == INCONCLUSIVE, surely_exposed(figures)
    remarks = (
        f"95% intervals{looks}." if any(figure.ci_low is not None for figure in figures.values()) else "",
        WINDOWS_DIFFER if summary.windows_differ else "",
        summary.stalls,
        "All of this rests on one window." if alone else "",
        "More windows narrow them (OVERLAP_CALLBACKS=quick)." if unclear and advised else "",
    )
    todo = _MORE_WINDOWS if unclear and not advised else found.what_to_do
    interval = " ".join([remark for remark in remarks if remark])
    return _checked(found._replace(interval=interval, state=state, what_to_do=todo), summary)


def _all_left_out(reasons: Sequence[str]) -> Headline:
    """The headline of a run without windows: why it has none."""
    which = "the only window was" if len(reasons) == 1 else f"all {len(reasons):,} windows were"
    reason = shortened(reasons[-1], _MAX_PROBLEM).rstrip(".")
    todo = next((todo for marks, todo in _WHAT_TO_DO if any(mark in reason for mark in marks)), _READ_NOTES)
    return Headline(f"Nothing has been measured: {which} left out.", why=f"{reason}.", what_to_do=todo)


def step_change(figures: Mapping[str, Estimate]) -> Estimate | None:
    """How much longer a step is with overlap, as a fraction of a sequential step; negative if shorter."""
    speedup = figures.get("speedup_vs_sequential")
    return None if speedup is None else inverted_change(speedup)


# -- the sentences


def answer(figures: Mapping[str, Estimate]) -> Headline:
    """What these figures say: of a run, or of a window. The most certain comes first."""
    change, exposed = step_change(figures), exposed_in_words(figures)
    sentences = [exposed, "" if change is None else saving_in_words(change, figures.get("e2e_overlapped_ms"))]
    slowdown = figures.get("compute_slowdown")
    if slowdown is not None:
        sentences.append(slowdown_in_words(slowdown))
    first, *also = [sentence for sentence in sentences if sentence] or [
        "Not enough was measured to say what overlap saves here."
    ]
    state = NOT_MEASURED if change is None else certainty(change) or NOT_MEASURED
    found = Headline(first, tuple(also), state=NOTHING_OVERLAPS if nothing_overlaps(figures) else state)
    if change is not None:
        return found
    missing = "step times of both modes are needed, and one is missing."
    return found._replace(why=missing, what_to_do=_READ_NOTES)


def nothing_overlaps(figures: Mapping[str, Estimate]) -> bool:
    """Whether profiled steps communicate, and no compute runs meanwhile."""
    hidden = [figures.get(name) for name in ("overlap_ratio", "hidden_comm_fraction")]
    communicates = "comm_ms" not in figures or figures["comm_ms"].value > 0
    return communicates and all(
        figure is not None and max(figure.value, figure.ci_high or 0.0) < _HIDES_NOTHING for figure in hidden
    )


def exposed_in_words(figures: Mapping[str, Estimate]) -> str:
    """How much of communication is hidden, and what the rest takes of a profiled step; empty without a profile."""
    share, hidden = exposed_share(figures), figures.get("hidden_comm_fraction")
    if share is None:
        return ""
    known, value, bounds = certainty(share), *_share(share)
    vague = says_nothing(share, "fraction")
    if nothing_overlaps(figures):
        of = "" if known not in ("", CLEAR) or vague else f" ({value} of a profiled step{bounds and f', {bounds}'})"
        return f"Nothing overlaps in this job: all communication{of} is exposed."
    if vague:
        words = f"exposed communication: {NOT_RESOLVED}"
    elif known in (WITHIN_NOISE, INCONCLUSIVE):
        words = f"exposed communication: {known} ({most_in_words(share)} of a profiled step)"
    else:
        words = f"exposed communication takes {value} of a step ({bounds or 'too few blocks'}; profiled steps)"
    unsure = hidden is not None and certainty(hidden) not in ("", CLEAR)
    most = None if hidden is None else hidden.ci_high
    if hidden is None or says_nothing(hidden, "fraction") or (unsure and (most is None or most > _HARDLY_HIDDEN)):
        return f"{words[0].upper()}{words[1:]}."
    if unsure and most is not None:
        return f"At most {at_most_in_words(most)} of communication is hidden; {words}."
    value, bounds = _share(hidden)
    wide = hidden.ci_low is not None and hidden.ci_high is not None and hidden.ci_high - hidden.ci_low > 2 * _WIDE
    return f"{value}{f' ({bounds})' if wide else ''} of communication is hidden; {words}."


def _share(share: Estimate) -> tuple[str, str]:
    """A share and its interval, e.g. ``19%`` and ``11 to 27``."""
    decimals = share_decimals(share)
    ends = () if share.ci_low is None or share.ci_high is None else (share.ci_low, share.ci_high)
    return PLAIN.percent(share.value, decimals=decimals), " to ".join([PLAIN.number(100 * x, decimals) for x in ends])


def share_decimals(share: Estimate) -> int:
    """Decimals of a share and of its interval: none, unless that shows none, all or no interval."""
    ends = () if share.ci_low is None or share.ci_high is None else (share.ci_low, share.ci_high)
    least = int(min([share.value, *([ends[1] - ends[0]] if ends else [])]) < 0.0195)
    return enough_decimals((share.value, 1 - share.value, *ends), least)


def most_in_words(share: Estimate, style: Style = PLAIN) -> str:
    """The upper bound of a share whose interval holds zero, e.g. ``up to 30%``."""
    side = "below" if certainty(share) == WITHIN_NOISE else "up to"
    return f"{side} {at_most_in_words(share.ci_high or 0.0, style)}"


def saving_in_words(change: Estimate, step_ms: Estimate | None = None, over: str = "") -> str:
    """What overlap saves, from how much longer a step is with it; of a sequential step, and in ms if one is known.

    ``over``: of what else than a run's steps, e.g. `` on average over 24 configurations``.
    """
    times = None if step_ms is None else Times.of(change, step_ms.value)
    both = "" if times is None else f"{times.less} with it, {times.more} without"
    if certainty(change) != CLEAR:
        return f"What overlap saves{over}: {certainty_in_words(change)}{both and f'; {both}'}."
    verb = "saves" if change.value < 0 else "costs"
    if times is None:
        share = PLAIN.percent(abs(change.value), decimals=change_decimals(change))
        return f"Overlap {verb} {share} of a step without it{over} ({signless_bounds(change)})."
    return f"Overlap {verb} {times.difference} a step{over}: {both} ({change_in_brackets(change)})."


def slowdown_in_words(slowdown: Estimate, kernels: str = "Compute", over: str = "") -> str:
    """How much longer kernels take with overlap."""
    if certainty(slowdown) != CLEAR:
        return f"{kernels} slowdown{over}: {certainty_in_words(slowdown)}."
    longer = PLAIN.percent(abs(slowdown.value), decimals=change_decimals(slowdown))
    longer += " longer" if slowdown.value > 0 else " less"
    return f"{kernels} slowdown{over}: kernels take {longer} than without overlap ({signless_bounds(slowdown)})."


class Times(NamedTuple):
    """Two step times and their difference, with the same decimals; ``less`` is the one that ``change`` speaks of."""

    difference: str
    less: str
    more: str

    @classmethod
    def of(cls, change: Estimate, ms: float) -> Times:
        """From a step's time and by how much it differs from another, as a fraction of that one."""
        other = ms / (1 + change.value) if change.value > -1 else ms
        size = abs(other - ms)
        decimals = decimals_of(max(ms, other), "ms")
        if certainty(change) == CLEAR:  # a reader who subtracts finds the same
            decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
        shown = [round(time, decimals) for time in (ms, other)]
        return cls(*[PLAIN.quantity(time, "ms", decimals=decimals) for time in (abs(shown[1] - shown[0]), *shown)])


def change_in_brackets(change: Estimate) -> str:
    """A clear change without its sign, and its interval: e.g. ``18.5%, 7.6 to 28.0``."""
    return f"{PLAIN.percent(abs(change.value), decimals=change_decimals(change))}, {signless_bounds(change)}"


def signless_bounds(change: Estimate) -> str:
    """The interval of a clear change, in percent without sign or unit: e.g. ``7.6 to 28.0``; empty without one.

    Of one that is too wide to be of use, the nearer end: ``at least 7.6``.
    """
    if change.ci_low is None or change.ci_high is None:
        return ""
    decimals = change_decimals(change)
    low, high = [PLAIN.number(100 * end, decimals) for end in sorted([abs(change.ci_low), abs(change.ci_high)])]
    return f"at least {low}" if says_nothing(change, "fraction", signed=True) else f"{low} to {high}"


def settled_in_words(settled: Settled) -> str:
    """The difference once a mode has lasted.

    E.g. ``Settled: 12.1% shorter (11.0% to 13.3% shorter); in blocks of 3 steps 9.8% shorter.``
    """
    change = inverted_change(settled.estimate)
    value = certainty_in_words(change)
    if certainty(change) == CLEAR and change.ci_low is not None and change.ci_high is not None:
        low, high = map(PLAIN.percent, sorted([abs(change.ci_low), abs(change.ci_high)]))
        which = "longer" if change.value > 0 else "shorter"
        bounds = f"at least {low}" if says_nothing(change, "fraction", signed=True) else f"{low} to {high}"
        value = f"{_in_words(change.value)} ({bounds} {which})"
    blocks = f"in blocks of {count(settled.short_steps, 'step')} {_in_words(_turned(settled.short))}"
    if settled.verdict is Verdict.NOT_SETTLED:
        least = "" if settled.at_least is None else f"at least {_in_words(_turned(settled.at_least))}; "
        return f"Not settled after {count(settled.after_steps, 'step')}: {least}{blocks}."
    if settled.verdict is Verdict.SETTLED:
        return f"Settled: {value}; {blocks}."
    if not settled.resolved:
        return "Not resolved: the interval is too wide to show whether the difference changes."
    return f"No change along a block is seen: settled {value}; {blocks}."


def _in_words(change: float) -> str:
    return change_in_words(change, "longer", "shorter")


def _turned(longer: float) -> float:
    """Convert how much longer steps without overlap are into how much longer those with it are."""
    return 1 / (1 + longer) - 1


def _unfinished(partial: OverlapReport) -> Headline:
    few = partial.speedup_vs_sequential is None
    found = Headline("Too few blocks were measured to say what overlap saves.") if few else answer(partial.figures())
    done = shortened("; ".join(partial.problems[:1]), _MAX_PROBLEM) or "it was cut short"
    unchecked = "" if partial.residual_overlap is not None else ", and no profile has checked its sequential steps"
    return found._replace(
        sentence=f"Unfinished: {found.sentence[0].lower()}{found.sentence[1:]}",
        why=f"no window is whole, and this is window {partial.window} alone ({done}){unchecked}.",
        what_to_do=_LET_IT_END,
        state=UNFINISHED,
    )


def _no_window_counts(summary: RunSummary) -> Headline:
    windows = summary.windows
    who = "The only window does not count" if len(windows) == 1 else f"None of the {len(windows):,} windows counts"
    found = Headline(f"{who}, so what overlap saves here is not known.", state=INVALID)
    states = summary.states()
    state = max((NOT_VALID, CUT_SHORT), key=lambda each: states[each])
    alike = [window for window in windows if summary.state_of(window) == state]
    if not alike:  # windows of another kind: control windows in a normal run, or the reverse
        return found._replace(
            why="control windows and others are not mixed, and the last start of the job has none.",
            what_to_do=_LET_IT_END,
        )
    problem = next(iter(alike[-1].problems), "the record does not say").removeprefix(f"{state}: ")
    problem = shortened(problem, _MAX_PROBLEM).rstrip(".")
    which = f"{count(len(alike), 'window')} {'is' if len(alike) == 1 else 'are'} {state}"
    todo = _against(problem)
    if todo == _PROFILE:
        todo = profile_more(summary)
    if state == CUT_SHORT and todo == _READ_NOTES:
        todo = f"{_LET_IT_END} {_READ_NOTES}"
    return found._replace(why=f"{which}: {problem}.", what_to_do=todo)


def _against(problem: str) -> str:
    return next((todo for marks, todo in _WHAT_TO_DO if any(mark in problem for mark in marks)), _READ_NOTES)


def _checked(found: Headline, summary: RunSummary) -> Headline:
    """The headline, and why it is doubtful if windows compare the modes without proof that steps were sequential."""
    comparing = [window for window in summary.valid_windows if window.speedup_vs_sequential is not None]
    unverified = summary.unverified
    if not unverified:
        return found
    of = "" if len(unverified) == len(comparing) else f" of {len(unverified)} of {len(comparing)} windows"
    why = f"no profile has verified that the sequential steps{of} were sequential."
    todo = profile_more(summary)
    if all(window.lower_bound for window in unverified):
        why = (
            f"symmetric memory or user buffers communicate{of} unseen: communication and residual overlap are lower "
            "bounds, and the sequential steps are not verified."
        )
        todo = "Switch them off for a measurement, or compare two traces: overlap compare."
    return found._replace(why=why, what_to_do=todo, state=NOT_VERIFIED)


def profile_more(summary: RunSummary) -> str:
    """What to do if no profile shows something: profile, or if that was enabled, find out why there is no profile."""
    profiled = None if summary.run is None else summary.run.schedule.get("profiled_steps")
    return f"Steps were to be profiled, but their profile is missing. {_READ_NOTES}" if profiled else _PROFILE


def next_step(summary: RunSummary, found: Headline, bottleneck: Bottleneck | None) -> str:
    """The one thing to do next: about what the headline lacks or doubts, or else what to try first.

    Advice is based only on windows that count. Empty if there is nothing to do; or why there is no advice.
    """
    advice = () if bottleneck is None else bottleneck.advice
    if found.what_to_do:
        buckets = [one for one in advice if one.topic == "buckets" and "bucket" in found.what_to_do]
        same = found.state == NOTHING_OVERLAPS and buckets
        return f"What to do: {buckets[0]._replace(what=found.what_to_do).short if same else found.what_to_do}"
    if not summary.valid_windows or not summary.measured:
        return ""
    if summary.control:
        return "No advice: a control run has no sequential steps."
    if not advice:
        return f"No advice: no profile shows what holds a step back. {profile_more(summary)}"
    return f"To try first: {advice[0].short}"


def run_verdict(summary: RunSummary) -> str:
    """What overlap does to the steps of this run, with its intervals, and what to try, as one text."""
    headline = run_headline(summary)
    known = summary.valid_windows and not summary.control and not headline.what_to_do
    found = run_bottleneck(summary) if known else None
    return headline.text + (f" To try first: {found.advice[0].what}" if found is not None and found.advice else "")


def cause_in_words(cause: SlowdownCause | None) -> str | None:
    if cause is None:
        return None
    return f"{cause.verdict}: {'; '.join(cause.evidence)}" if cause.evidence else cause.verdict


# -- a window as one log line


def _state(report: WindowReport, states: Mapping[str, bool], arm: str = "") -> str:
    words = [word for word, holds in states.items() if holds]
    return " ".join([f"overlap window {report.window} (step {report.first_step}){arm}", *words])


def arm_summary(report: ArmReport) -> str:
    """A window of an arm as one log line."""
    states = {"INVALID": not report.valid, "INCOMPLETE": not report.complete, "A/A": report.control}
    parts = []
    for what, estimate, unit, signed in (
        ("step", report.step_ms, "ms", False),
        ("as configured", report.configured_step_ms, "ms", False),
        ("speed-up of the arm", report.speedup, "fraction", True),
    ):
        if estimate is not None:
            parts.append(f"{what} {PLAIN.with_interval(estimate, unit, signed=signed)}")
    parts.append(f"{report.num_ranks} of {report.world_size} ranks")
    return ", ".join([_state(report, states, f", arm {report.arm.name}"), *parts])


def summary(report: OverlapReport) -> str:
    """A window as one log line: its headline, what measuring it cost, the ranks that reported, and what to try."""
    unverified = report.valid and not report.verified and report.speedup_vs_sequential is not None
    states = {"INVALID": not report.valid, "NOT VERIFIED": unverified, "INCOMPLETE": not report.complete}
    figures = with_settled(report.figures(), report.settled)
    found = answer(figures) if report.valid else _invalid(report)
    sentences = [CONTROL] if report.control and report.valid else [found.sentence, *found.also]
    cost = "" if report.cost is None else f"Measuring cost {PLAIN.measuring_cost(report.cost)}, "
    sentences.append(f"{cost}{report.num_reporting} of {report.world_size} ranks.")
    if report.settled is not None and report.settled.headlined and not report.control:
        sentences.append(settled_in_words(report.settled))
    holds_back = bottleneck_of([report]) if report.valid and not report.control else None
    if holds_back is not None and found.state == INCONCLUSIVE and not surely_exposed(figures):
        sentences.append(_MORE_WINDOWS)
    elif holds_back is not None and holds_back.advice:
        sentences.append(f"To try first: {holds_back.advice[0].what}")
    return f"{_state(report, {**states, 'A/A control': report.control})}: {' '.join(sentences)}"


def _invalid(report: OverlapReport) -> Headline:
    problem = shortened("; ".join(report.problems[:1]), _MAX_PROBLEM).rstrip(".") or "its record does not say why"
    return Headline(f"It does not count: {problem}. What to do: {_against(problem)}", state=INVALID)
