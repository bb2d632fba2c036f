"""Screens for traces: each device, several side by side, and an overlapped trace against a sequential one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from overlap_callbacks.analysis.formatting import PAGE, column_decimals, count, page_sentence, page_text
from overlap_callbacks.analysis.results.catalogue import SUMMARY
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.report.views.elements import (
    Block,
    Cell,
    Column,
    Document,
    Note,
    RunPage,
    Section,
    Table,
    table_of,
)
from overlap_callbacks.report.views.tables import exposure_tables, kernel_column, loss_table, pair_tables, row_label
from overlap_callbacks.report.views.trace_device import (
    MAX_STEPS,
    device_page,
    file_name,
    idle,
    kernel_sections,
    size_tables,
    time_stack,
    warning_note,
)
from overlap_callbacks.report.views.trace_verdict import (
    by_file,
    caused_ms,
    further_problems,
    names_of,
    rank_names,
    verdict,
    waiting_ms,
)
from overlap_callbacks.traces.device_time import DeviceTime
from overlap_callbacks.traces.figures import (
    NOTHING_COMMUNICATES,
    Analysis,
    CollectiveSkew,
    Comparison,
    RankTime,
    TraceFigures,
)

_FOOT = (
    "Equation 2 is that of arXiv 2507.03114, section IV-D. A trace is one observation: there are no intervals. The "
    "slowdown estimated from a trace is an association; a run with the monitor measures the cause."
)
# Maximum devices with their own part.
MAX_DEVICES = 16
# Rows of a table of several files in a terminal, and of the table of ranks: they must fit on one screen.
_FEW_OF_SEVERAL, _FEW_RANKS = 3, 8
# Maximum notes on several files in a terminal, and ranks whose waiting is named.
_MAX_NOTES, _MAX_WAITING = 3, 4


def trace_document(analysis: Analysis, most: int | None = MAX_DEVICES) -> Document:
    """The document of an analysis of traces; at most ``most`` devices have their own part."""
    shown = analysis.traces[:most]
    runs = tuple([device_page(f"run-{i}", trace, analysis) for i, trace in enumerate(shown, 1)])
    names = ", ".join(dict.fromkeys(file_name(trace) for trace in shown[:4]))
    document = Document(f"Traces: {names}", runs, _FOOT, rest="--all shows all tables.", max_rows=None, brief=True)
    if len(analysis.traces) == 1:
        return document
    first, *rest = map(page_sentence, verdict(analysis, PAGE) or ("",))
    return dataclasses.replace(
        document,
        heading=_heading(analysis),
        verdict=first,
        more=tuple(rest),
        compared=tuple(_together(analysis, len(shown))),
        rest="--all shows the tables of each file.",
    )


# -- several devices


def _heading(analysis: Analysis) -> str:
    cycles = {trace.cycle for trace in analysis.traces}
    of_cycles = f" in {len(cycles)} cycles of one job" if len(cycles) > 1 else ""
    return f"{len(analysis.traces)} devices{of_cycles} compared"


def _together(analysis: Analysis, num_shown: int) -> list[Section]:
    """The devices side by side, then skew, and the kernels of the device with most compute."""
    named = list(zip(map(page_text, names_of(analysis.traces)), analysis.traces, strict=True))
    blocks: list[Block] = []
    known = [(name, trace) for name, trace in named[:MAX_STEPS] if trace.time and not trace.total.cut]
    if known:
        caption = "Means over the steps of each file; a file without steps counts as one."
        shown = [(name, _mean_step(trace.time)) for name, trace in known]
        blocks.append(time_stack("Where the time goes, by rank", shown, caption))
    if analysis.traces[0].cycle:
        blocks.append(_cycle_table(analysis))
    blocks += [
        _rank_table(named, analysis.skew),
        *exposure_tables(analysis.exposure),
        *size_tables(analysis.sizes),
    ]
    if len(named) > num_shown:
        blocks.append(Note(f"The first {num_shown} of {len(named)} devices have a part of their own below."))
    sections = [Section("How do the ranks differ?", "", blocks)]
    if analysis.skew:
        sections.append(Section("Do the ranks wait for one another?", "", _skew_tables(analysis.skew)))
    slowest, trace = max(named, key=lambda item: item[1].total.compute_ms)
    sections += kernel_sections(trace, True, f" of {slowest}, which computes most", _FEW_OF_SEVERAL)
    problems = further_problems(analysis)
    notes = [Note(page_text(problem, 2000), first=place < _MAX_NOTES) for place, problem in enumerate(problems)]
    if notes:
        sections.append(Section("Can the files be trusted?", f"{count(len(notes), 'note')}.", notes))
    warnings = (*analysis.warnings, *by_file(analysis.traces, lambda trace: trace.warnings))
    head, *rest = sections
    return [dataclasses.replace(head, blocks=[*map(warning_note, warnings), *head.blocks]), *rest]


def _skew_tables(skews: Sequence[CollectiveSkew]) -> list[Block]:
    def named(skew: CollectiveSkew) -> Iterator[tuple[str, RankTime]]:
        return zip(rank_names(skew.ranks), skew.ranks, strict=True)

    def last(skew: CollectiveSkew) -> Cell:
        name, rank = max(named(skew), key=lambda item: item[1].caused_ms)
        words = f"{name}: {PAGE.milliseconds(rank.caused_ms)}" if rank.caused_ms else ""
        return Cell(words, rank.caused_ms)

    def waiting(skew: CollectiveSkew) -> str:
        longest = sorted(named(skew), key=lambda item: -item[1].waiting_ms)
        return ", ".join(f"{name}: {PAGE.milliseconds(rank.waiting_ms)}" for name, rank in longest[:_MAX_WAITING])

    caption = "The transfer is the shortest kernel of each collective; the rest is waiting for the last rank."
    by_collective = table_of(
        "Collectives over the ranks",
        skews,
        Column("*Collective", lambda skew: ", ".join(filter(None, (skew.collective, skew.group, skew.cycle)))),
        Column("Count", lambda skew: skew.count, "whole"),
        Column("Transfer, ms", lambda skew: skew.transfer_ms, "ms"),
        Column("Waited for most, ms", last),
        Column("*Longest waiting by rank, ms", waiting),
        caption=caption,
        first=True,
        few=_FEW_OF_SEVERAL,
    )
    by_rank = table_of(
        "Collectives over the ranks, rank by rank",
        [(skew, rank) for skew in skews for rank in skew.ranks],
        Column("*Collective", lambda row: row[0].collective),
        Column("*Group", lambda row: row[0].group),
        Column("*Cycle", lambda row: row[0].cycle),
        Column("Rank", lambda row: Cell(f"{row[1].rank}", row[1].rank)),
        Column("Collectives", lambda row: row[0].count, "whole"),
        Column("Transfer, ms", lambda row: row[0].transfer_ms, "ms"),
        Column("Time, ms", lambda row: row[1].time_ms, "ms"),
        Column("Waiting, ms", lambda row: row[1].waiting_ms, "ms"),
        Column("Last to come", lambda row: row[1].last, "whole"),
        Column("Others waited, ms", lambda row: row[1].caused_ms, "ms"),
        caption=caption,
        folded=True,
        drop_empty=True,
    )
    return [by_collective, by_rank]


def _cycle_table(analysis: Analysis) -> Block:
    """The cycles of a job: means over each one's devices, and the rank that the others waited for most."""
    waiting, caused = waiting_ms(analysis.skew), caused_ms(analysis.skew)
    cycles: dict[str, list[TraceFigures]] = {}
    for trace in analysis.traces:
        cycles.setdefault(trace.cycle, []).append(trace)

    def mean(of: Callable[[TraceFigures], float | None]) -> Callable[[str], float | None]:
        def of_cycle(cycle: str) -> float | None:
            values = [value for trace in cycles[cycle] if (value := of(trace)) is not None]
            return sum(values) / len(values) if values else None

        return of_cycle

    def most(cycle: str) -> Cell:
        name, ms = max(caused.get(cycle, {"": 0.0}).items(), key=lambda item: item[1])
        return Cell(f"{name}: {PAGE.milliseconds(ms)}" if ms else "", ms)

    name: Column[str] = Column("~Cycle", str)
    return table_of(
        "Cycles side by side, ms",
        list(cycles),
        name,
        Column("Files", lambda cycle: len({trace.file for trace in cycles[cycle]}), "whole"),
        Column("Length", mean(lambda trace: trace.time[0].span_ms if trace.time else None), "ms"),
        Column("Compute", mean(lambda trace: trace.total.compute_ms), "ms"),
        Column("Exposed comm.", mean(lambda trace: trace.total.exposed_comm_ms), "ms"),
        Column("Waiting", mean(lambda trace: waiting.get((trace.cycle, trace.rank, trace.device))), "ms"),
        Column("Waited for most", most),
        Column("Overlap ratio", mean(lambda trace: trace.total.overlap_ratio), "percent"),
        caption="Means over the ranks of a cycle. The rank for which the others waited most, and how long in all.",
        first=True,
        few=_FEW_OF_SEVERAL,
    )


def _rank_table(named: Sequence[tuple[str, TraceFigures]], skews: Sequence[CollectiveSkew]) -> Block:
    """The totals of the files, one row per device."""
    waiting = waiting_ms(skews)
    rows = [(name, trace, trace.time[0] if trace.time else None) for name, trace in named]
    return table_of(
        "Ranks side by side, ms",
        rows,
        Column("~Rank", lambda row: row[0].removeprefix("rank ")),
        Column("Length", lambda row: row[2] and row[2].span_ms, "ms"),
        Column("Compute", lambda row: row[1].total.compute_ms, "ms"),
        Column("Exposed comm.", lambda row: row[1].total.exposed_comm_ms, "ms"),
        Column("Comm. on host", lambda row: row[2] and row[2].exposed_on_host_ms, "ms"),
        Column("Host", lambda row: row[2] and idle(row[2])[0], "ms"),
        Column("Other idle", lambda row: row[2] and idle(row[2])[1], "ms"),
        Column("Waiting", lambda row: waiting.get((row[1].cycle, row[1].rank, row[1].device)), "ms"),
        Column("Overlap ratio", lambda row: row[1].total.overlap_ratio, "percent"),
        caption="Each file as a whole. Host: idle since what runs next had not been launched, or had been only since.",
        first=True,
        few=_FEW_RANKS,
        drop_empty=True,
    )


def _mean_step(time: Sequence[DeviceTime]) -> DeviceTime:
    """The mean over the steps; of the whole file if it has none."""
    steps = time[1:] or time
    names = [name for name in DeviceTime.__struct_fields__ if name != "step"]
    means: dict[str, Any] = {}
    for name in names:
        values = [value for step in steps if (value := getattr(step, name)) is not None]
        means[name] = sum(values) / len(values) if values else None
    return DeviceTime(step=None, **means)


# -- two traces


def comparison_document(found: Comparison) -> Document:
    """The document of a comparison of two traces."""
    files = (Path(side.file).name for side in (found.overlapped, found.sequential))
    ov, seq = (page_text(f"{name} ({count(steps, 'step')})") for name, steps in zip(files, found.steps, strict=True))
    sides = (("overlapped", found.overlapped), ("sequential", found.sequential))
    left_out = [f"{name}: {warning}" for name, side in sides for warning in side.warnings]
    doubts = [f"The files do not fit each other: {'; '.join(found.misfits)}."] if found.misfits else []
    if NOTHING_COMMUNICATES in found.problems:
        doubts.append(f"No answer on overlap: {NOTHING_COMMUNICATES}.")
    warnings = tuple(map(warning_note, [*doubts, *left_out]))
    said_above = (*left_out, *found.misfits, NOTHING_COMMUNICATES)
    notes = [problem for problem in found.problems if problem not in said_above]
    tables: list[Block] = []
    for title, head, rows in (
        ("Kernels that lose most, per step", "~Kernel", found.kernels),
        ("Compute by module or range of the host, per step", "~Launched in", found.ranges),
    ):
        decimals = column_decimals([row.overlapped_ms for row in rows])
        tables += [loss_table(title, head, rows, decimals, first=True)] if rows else []
    if NOTHING_COMMUNICATES not in found.problems:
        tables += pair_tables(found.pairs, "Per step.", first=True)
    if found.unmatched:
        tables.append(_unmatched_table(found))
    run = RunPage(
        "comparison",
        "",
        "",
        f"{ov} against {seq}; {PAGE.percent(found.matched_fraction)} of compute matched.",
        warnings,
        (
            Section("How do the files differ?", "", tables),
            Section("Can it be trusted?", "", [Note(page_text(note, 2000), first=True) for note in notes]),
        ),
        figures=_figure_table(found.figures),
    )
    return Document("Comparison of two traces", (run,), _FOOT, rest="--json has all rows.", all_rows="--json")


def _figure_table(figures: dict[str, float]) -> Table:
    def shown(figure: Figure) -> Cell:
        value = figures.get(figure.name)
        if value is None:
            return Cell("undefined")
        return Cell(PAGE.ms(value) if figure.unit == "ms" else PAGE.figure(figure, value))

    label: Column[Figure] = Column("*", lambda figure: Cell(row_label(figure)))
    rows = [figure for figure in SUMMARY if "speedup_vs_sequential" in figures or figure.name in figures]
    return table_of("Per step", rows, label, Column("Value", shown), sorts=False)


def _unmatched_table(found: Comparison) -> Block:
    calls = sum(row.overlapped_calls + row.sequential_calls for row in found.unmatched)

    def side(calls: int, ms: float) -> Cell:
        return Cell(f"{calls} ({PAGE.ms(ms)})", calls) if calls else Cell("")

    return table_of(
        f"Kernels without a partner in the other file: {count(calls, 'call')}, over all steps",
        found.unmatched,
        kernel_column(),
        Column("Overlapped", lambda row: side(row.overlapped_calls, row.overlapped_ms)),
        Column("Sequential", lambda row: side(row.sequential_calls, row.sequential_ms)),
        first=True,
    )
