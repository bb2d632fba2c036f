"""Which collective holds the step up: what causal windows found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from overlap_callbacks.analysis.arms import ArmSummary, arm_summaries
from overlap_callbacks.analysis.causal import LEVELS, Response, Verdict
from overlap_callbacks.analysis.causal_findings import Finding, Fix, findings_of, fix_of
from overlap_callbacks.analysis.formatting import PAGE, count, cut, page_sentence, page_text, rounded
from overlap_callbacks.analysis.results.causal import DelayedCall
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.prediction import topic_of
from overlap_callbacks.analysis.statistics import inverted_change
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import (
    EMPTY,
    RUN_COLORS,
    Cell,
    Chart,
    Column,
    Document,
    Note,
    RunPage,
    Section,
    Table,
    legend_of,
    table_of,
)
from overlap_callbacks.report.views.sections import exposure_of

Members = tuple[DelayedCall, ...]

TITLE = "Which collective holds the step up?"
_MAX_LABEL = 72
_DRAWN = 6


def causal(record: Record) -> list[Section]:
    """A table and a chart of what was delayed; nothing without causal windows."""
    found = causal_findings(record)
    if not found:
        return []
    responses = [finding.response for finding, _ in found]
    names = _names(responses)
    shown = [finding for finding, _ in found if not _told(finding.response, responses)]
    blocks = [_table(shown, names), *_fixes(record, found, names), *_chart(responses, names)]
    missed = sum([window.missed_steps for window in record.causal])
    left_out = f" Left out, as a rank could not delay all: {count(missed, 'step')}." if missed else ""
    return [Section(TITLE, page_sentence(f"{answer(responses)}.") + left_out, blocks)]


def causal_findings(record: Record) -> list[tuple[Finding, Fix | None]]:
    """What causal windows and profiles say of each set, and what to change."""
    if not record.causal:
        return []
    exposed, detailed = exposure_of(record), record.latest_valid("collectives")
    exposure = None if exposed is None else exposed.found
    bottleneck, figures = record.bottleneck(), record.pooled()
    busy = [figures[key].value for key in ("compute_busy_ms", "exposed_comm_ms") if key in figures]
    late = None if bottleneck is None or bottleneck.late is None else bottleneck.late.rank
    found = findings_of(
        record.causal,
        exposure,
        () if detailed is None else detailed.collectives,
        busy_ms=sum(busy) if len(busy) == 2 else None,
        late_rank=late,
    )
    return [(one, fix_of(one, exposure, record.runs[-1].configuration, late)) for one in found]


def causal_document(record: Record) -> Document:
    """What the causal windows of a run found, alone."""
    (section,) = causal(record) or [Section(TITLE, "Too few steps of causal windows count.")]
    run = RunPage("run-1", "", "", TITLE, tuple(section.blocks), (), (section.answer,))
    return Document(TITLE, (run,), "")


def answer(responses: Sequence[Response]) -> str:
    """What the responses say, in a sentence."""
    blocking = [of for of in responses if of.alone and of.verdict is Verdict.BLOCKING]
    cleared = {member for of in responses if of.verdict is Verdict.SLACK for member in of.delayed.members}
    slack = f"{count(len(cleared), 'collective')} with slack" if cleared else "none with slack so far"
    if not blocking:
        more = "" if cleared else ". More windows, a longer run or a quieter machine would tell"
        return f"No single collective is known to hold the step up; {slack}{more}"
    known = _names(responses)
    names = ", ".join([known[of.delayed.members] for of in blocking[:3]])
    more = f" and {len(blocking) - 3} more" if len(blocking) > 3 else ""
    return f"The step waits for {names}{more}; {slack}"


def _names(responses: Sequence[Response]) -> dict[Members, str]:
    """A name for each set, cut so that no two read alike. Of several collectives, their number stands first."""
    whole = [of.label for of in responses]
    alike = Counter(whole)
    for place, of in enumerate(responses):
        if alike[whole[place]] > 1:
            call = of.delayed.members[0]
            whole[place] += f" ({call.group}, {call.operator})"
    ordered = sorted(set(whole))
    for width in (_MAX_LABEL, 2 * _MAX_LABEL, max(map(len, whole), default=0)):
        # Of all others, those beside it in order share most of a name.
        cuts = {name: cut(name, ordered[max(0, place - 1) : place + 2], width) for place, name in enumerate(ordered)}
        if len(set(cuts.values())) == len(cuts):
            break
    return {of.delayed.members: page_text(cuts[name]) for of, name in zip(responses, whole, strict=True)}


def _told(response: Response, responses: Sequence[Response]) -> bool:
    """Whether others tell more of all members of a set: what they do or, where it is inconclusive, that none tells."""
    members = set(response.delayed.members)
    inconclusive = response.verdict is Verdict.INCONCLUSIVE
    for of in responses:
        smaller = len(of.delayed.members) < len(response.delayed.members)
        decided = of.verdict is Verdict.SLACK or (of.alone and of.verdict is Verdict.BLOCKING)
        if smaller and (decided or (of.alone and inconclusive)):
            members.difference_update(of.delayed.members)
    return not members


def _ms(ms: float | None) -> Cell:
    return EMPTY if ms is None else Cell(PAGE.quantity(ms, "ms"), ms)


def _table(found: Sequence[Finding], names: Mapping[Members, str]) -> Table:
    return table_of(
        "What a delay of it does to the step",
        found,
        Column("~delayed", lambda of: names[of.response.delayed.members]),
        Column("*verdict", lambda of: of.response.verdict.value),
        Column("slope", lambda of: of.response.slope.value, 2),
        Column("95% interval", lambda of: _interval(of.response.slope)),
        Column("slack, ≥", lambda of: _ms(of.slack_ms if of.response.verdict is Verdict.SLACK else None)),
        Column("wins ≤", lambda of: _ms(of.won_ms)),
        Column("exposed", lambda of: _ms(of.exposed_ms)),
        Column("-on path", lambda of: _ms(of.path_ms)),
        caption="Slope: how much longer the step gets by the longest delay of the collective, over that delay; for a "
        "set, each of which is delayed, over the delay of one. 1: the step waits for it. 0: it may take longer at no "
        "cost, by the slack. Wins: by its removal. Intervals hold for all rows together.",
        drop_empty=True,
    )


def _interval(slope: Estimate) -> Cell:
    if slope.ci_low is None or slope.ci_high is None:
        return EMPTY
    return Cell(f"{PAGE.number(slope.ci_low, 2)} to {PAGE.number(slope.ci_high, 2)}", slope.value)


def _fixes(
    record: Record, found: Sequence[tuple[Finding, Fix | None]], names: Mapping[Members, str]
) -> list[Note | Table]:
    """Where profile and delays differ, and what to change about the first ones, with what came of it."""
    differing = [(one, words) for one, _ in found if (words := one.contradiction(PAGE))]
    notes: list[Note | Table] = [
        Note(page_sentence(f"The {names[one.response.delayed.members]} is {words}."))
        for one, words in differing[:_DRAWN]
    ]
    rows = [(one, fix) for one, fix in found if fix is not None][:_DRAWN]
    if rows:
        arms = arm_summaries(record.summary, record.arms)
        table = table_of(
            "What would fix it",
            rows,
            Column("~delayed", lambda row: names[row[0].response.delayed.members]),
            Column("*change", lambda row: page_text(row[1].what, 120)),
            Column("wins ≤", lambda row: _ms(row[0].won_ms) if row[1].topic else EMPTY),
            Column("*tried by", lambda row: page_text(row[1].arm, 80)),
            Column("*outcome", lambda row: _outcome(row[1], row[0].response.step_ms, arms)),
            caption="By delays, where What to try goes by profiles. A change wins at most the collective's length. Of "
            "an arm given to attach(arms=[...]) the outcome stands here, of a command in overlap predict --ledger.",
            drop_empty=True,
        )
        notes.append(table)
    return notes


def _outcome(fix: Fix, step_ms: float, arms: Sequence[ArmSummary]) -> str:
    """What the arms of this run that make the change have saved."""
    tried = [arm for arm in arms if fix.topic and topic_of(arm.arm.name) == fix.topic and arm.speedup is not None]
    words = []
    for arm in tried:
        longer_ms = inverted_change(arm.speedup).value * step_ms if arm.speedup is not None else 0.0
        changed = f"{PAGE.quantity(abs(longer_ms), 'ms')} {'longer' if longer_ms > 0 else 'shorter'}"
        words.append(f"{page_text(arm.arm.name, 40)}: {changed} ({arm.verdict()})")
    return "; ".join(words)


def _chart(responses: Sequence[Response], names: Mapping[Members, str]) -> list[Chart]:
    alone = [of for of in responses if of.alone] or [of for of in responses if not _told(of, responses)]
    drawn = alone[:_DRAWN]
    series = [
        {"name": names[of.delayed.members], "color": color, "points": _points(of)}
        for of, color in zip(drawn, RUN_COLORS, strict=False)
    ]
    most_ms = max([of.delayed.delay_ms for of in drawn])
    data = {
        "unit": "ms", "series": series, "x_label": "delay, ms", "numeric": True, "ideal": 1, "signed": True,
        "frame": [-0.5 * most_ms, 1.5 * most_ms],
    }  # fmt: skip
    caption = (
        "How much longer the step gets. One that holds it up rises along the dashed line, one with slack stays at "
        "zero. Whiskers: the slope's interval."
    )
    return [Chart("against", "Step against delay", data, caption, legend_of(series), in_table=True)]


def _points(of: Response) -> list[list[float | str | None]]:
    """The longer step at each delay; at the longest one as the slope has it, with its interval."""
    delays_ms = [float(f"{of.delayed.delay_ms * level / (LEVELS - 1):.3g}") for level in range(LEVELS)]
    slopes = (of.slope.value, of.slope.ci_low, of.slope.ci_high)
    bounds = [None if slope is None else rounded(slope * delays_ms[-1]) for slope in slopes]
    first = [
        [at, of.verdict.value, rounded(longer_ms), None, None]
        for at, longer_ms in zip(delays_ms, of.levels_ms[:-1], strict=False)
    ]
    return [*first, [delays_ms[-1], of.verdict.value, *bounds]]
