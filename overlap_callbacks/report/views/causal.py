"""Which collective holds the step up: what causal windows found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overlap_callbacks.analysis.arms import ArmSummary, arm_summaries
from overlap_callbacks.analysis.causal import LEVELS, Response, Verdict
from overlap_callbacks.analysis.causal_findings import Finding, Fix, findings_of, fix_of
from overlap_callbacks.analysis.formatting import PAGE, count, page_sentence, page_text
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
    line,
    table_of,
)
from overlap_callbacks.report.views.sections import exposure_of

TITLE = "Which collective holds the step up?"
_MAX_LABEL = 60
_DRAWN = 6


def causal(record: Record) -> list[Section]:
    """A table and a chart of what was delayed; nothing without causal windows."""
    found = causal_findings(record)
    if not found:
        return []
    responses = [finding.response for finding, _ in found]
    blocks = [_table([finding for finding, _ in found]), *_fixes(record, found), *_chart(responses)]
    missed = sum([window.missed_steps for window in record.causal])
    left_out = f" Left out, as a rank could not delay all: {count(missed, 'step')}." if missed else ""
    return [Section(TITLE, page_sentence(answer(responses)) + left_out, blocks)]


def causal_findings(record: Record) -> list[tuple[Finding, Fix | None]]:
    """What causal windows and profiles say of each set, and what to change."""
    if not record.causal:
        return []
    exposed, detailed = exposure_of(record), record.latest_valid("collectives")
    exposure = None if exposed is None else exposed.found
    found = findings_of(record.causal, exposure, () if detailed is None else detailed.collectives)
    bottleneck = record.bottleneck()
    late = None if bottleneck is None or bottleneck.late is None else bottleneck.late.rank
    return [(one, fix_of(one, exposure, record.runs[-1].configuration, late)) for one in found]


def causal_document(record: Record) -> Document:
    """What the causal windows of a run found, alone."""
    (section,) = causal(record) or [Section(TITLE, "Too few steps of causal windows count.")]
    return Document(TITLE, (RunPage("run-1", "", "", section.answer, (), (replace(section, answer=""),)),), "")


def answer(responses: Sequence[Response]) -> str:
    """What the responses say, in a sentence."""
    blocking = [of for of in responses if of.alone and of.verdict is Verdict.BLOCKING]
    cleared = {member for of in responses if of.verdict is Verdict.SLACK for member in of.delayed.members}
    slack = f"{count(len(cleared), 'collective')} with slack" if cleared else "none with slack so far"
    if not blocking:
        return f"No single collective is known to hold the step up; {slack}"
    names = ", ".join([page_text(of.label, _MAX_LABEL) for of in blocking[:3]])
    more = f" and {len(blocking) - 3} more" if len(blocking) > 3 else ""
    return f"The step waits for {names}{more}; {slack}"


def _ms(ms: float | None) -> Cell:
    return EMPTY if ms is None else Cell(PAGE.quantity(ms, "ms"), ms)


def _table(found: Sequence[Finding]) -> Table:
    return table_of(
        "What a delay of it does to the step",
        found,
        Column("~delayed", lambda of: page_text(of.response.label, _MAX_LABEL)),
        Column("*", lambda of: of.response.verdict.value),
        Column("slope", lambda of: of.response.slope.value, 2),
        Column("95% interval", lambda of: _interval(of.response.slope)),
        Column("slack, ≥", lambda of: _ms(of.slack_ms)),
        Column("removed, wins ≤", lambda of: _ms(of.won_ms)),
        Column("exposed", lambda of: _ms(of.exposed_ms)),
        Column("delay", lambda of: _ms(of.response.delayed.delay_ms)),
        caption="Slope: how much longer the step gets by the longest delay of the collective, over that delay; for a "
        "set, each of which is delayed, over the delay of one. 1: the step waits for it. 0: it may take longer at no "
        "cost, by the slack. Intervals hold for all rows together.",
        drop_empty=True,
    )


def _interval(slope: Estimate) -> Cell:
    if slope.ci_low is None or slope.ci_high is None:
        return EMPTY
    return Cell(f"{PAGE.number(slope.ci_low, 2)} to {PAGE.number(slope.ci_high, 2)}", slope.value)


def _fixes(record: Record, found: Sequence[tuple[Finding, Fix | None]]) -> list[Note | Table]:
    """Where profile and delays differ, and what to change about the first ones, with what came of it."""
    differing = [(one, words) for one, _ in found if (words := one.contradiction(PAGE))]
    notes: list[Note | Table] = [
        Note(page_sentence(f"The {page_text(one.response.label, _MAX_LABEL)} is {words}"))
        for one, words in differing[:_DRAWN]
    ]
    rows = [(one, fix) for one, fix in found if fix is not None][:_DRAWN]
    if rows:
        arms = arm_summaries(record.summary, record.arms)
        table = table_of(
            "What would fix it",
            rows,
            Column("~delayed", lambda row: page_text(row[0].response.label, _MAX_LABEL)),
            Column("*change", lambda row: page_text(row[1].what, 120)),
            Column("wins ≤", lambda row: _ms(row[0].won_ms) if row[1].topic else EMPTY),
            Column("*tried by", lambda row: page_text(row[1].arm, 80)),
            Column("*outcome", lambda row: _outcome(row[1], row[0].response.step_ms, arms)),
            caption="A change wins at most the collective's length. Give the arm to attach(arms=[...]), or run the "
            "command; its outcome then stands here, or in overlap predict --ledger.",
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


def _chart(responses: Sequence[Response]) -> list[Chart]:
    alone = [of for of in responses if of.alone] or list(responses)
    series = []
    for of, color in zip(alone[:_DRAWN], RUN_COLORS, strict=False):
        points = [
            (round(of.delayed.delay_ms * level / (LEVELS - 1), 3), "", longer_ms)
            for level, longer_ms in enumerate(of.levels_ms)
        ]
        series.append(line(page_text(of.label, _MAX_LABEL), color, points))
    data = {"unit": "ms", "series": series, "x_label": "delay, ms", "numeric": True, "ideal": None}
    caption = "How much longer the step gets; one that holds it up rises as its delay does."
    return [Chart("against", "Step against delay", data, caption, legend_of(series), in_table=True)]
