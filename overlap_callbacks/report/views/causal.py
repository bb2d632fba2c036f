"""Which collective holds the step up: what causal windows found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from overlap_callbacks.analysis.causal import LEVELS, Response, Verdict, ranked, responses_of
from overlap_callbacks.analysis.formatting import PAGE, count, page_sentence, page_text
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import (
    EMPTY,
    RUN_COLORS,
    Cell,
    Chart,
    Column,
    Document,
    RunPage,
    Section,
    Table,
    legend_of,
    line,
    table_of,
)

TITLE = "Which collective holds the step up?"
_MAX_LABEL = 60
_DRAWN = 6


def causal(record: Record) -> list[Section]:
    """A table and a chart of what was delayed; nothing without causal windows."""
    responses = ranked(responses_of(record.causal))
    if not responses:
        return []
    table = _table(responses, _lengths_ms(record))
    return [Section(TITLE, page_sentence(answer(responses)), [table, *_chart(responses)])]


def _lengths_ms(record: Record) -> dict[tuple[str, str], float]:
    """Mean time of a transfer alone, by operator and group, where it is known."""
    window = record.latest_valid("collectives")
    found = () if window is None else window.collectives
    return {(of.operator, of.group): of.transfer_ms / of.messages for of in found if of.transfer_ms and of.messages}


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


def _won(of: Response, lengths_ms: Mapping[tuple[str, str], float]) -> Cell:
    """What removing it would win at most: its length, if the step waits for it."""
    member = of.delayed.members[0]
    length_ms = lengths_ms.get((member.operator, member.group))
    if not of.alone or of.verdict is not Verdict.BLOCKING or length_ms is None:
        return EMPTY
    return Cell(f"up to {PAGE.quantity(length_ms, 'ms')}", length_ms)


def _table(responses: Sequence[Response], lengths_ms: Mapping[tuple[str, str], float]) -> Table:
    return table_of(
        "What a delay of it does to the step",
        responses,
        Column("~delayed", lambda of: page_text(of.label, _MAX_LABEL)),
        Column("slope", lambda of: of.slope.value, 2),
        Column("95% interval", lambda of: _interval(of.slope)),
        Column("slack", _slack),
        Column("removed, wins", lambda of: _won(of, lengths_ms)),
        Column("delay", lambda of: Cell(PAGE.quantity(of.delayed.delay_ms, "ms"), of.delayed.delay_ms)),
        Column("windows", lambda of: of.num_windows, "whole"),
        Column("*", lambda of: of.verdict.value),
        caption="Slope: how much longer the step gets by the longest delay of the collective, over that delay; for a "
        "set, each of which is delayed, over the delay of one. 1: the step waits for it. 0: it may take longer at no "
        "cost, by the slack. Intervals hold for all rows together.",
        drop_empty=True,
    )


def _interval(slope: Estimate) -> Cell:
    if slope.ci_low is None or slope.ci_high is None:
        return EMPTY
    return Cell(f"{PAGE.number(slope.ci_low, 2)} to {PAGE.number(slope.ci_high, 2)}", slope.value)


def _slack(of: Response) -> Cell:
    """At least the delay, where the step did not get longer by it."""
    if of.slack_ms is None:
        return EMPTY
    low_ms = of.slack_ms.ci_low or 0.0
    return Cell(f"at least {PAGE.quantity(low_ms, 'ms')}", low_ms) if low_ms > 0 else EMPTY


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
