"""Tables for the terminal, and CSV, of an analysis or a comparison of traces."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.catalogue import SUMMARY
from overlap_callbacks.analysis.results.window import KernelTime, PairTime
from overlap_callbacks.analysis.safe_text import printable, spreadsheet_cell
from overlap_callbacks.report.terminal import row_label
from overlap_callbacks.report.terminal_cells import name_cell
from overlap_callbacks.report.terminal_kernels import change, kernel_name, pair_parts
from overlap_callbacks.traces.figures import (
    Analysis,
    CollectiveFigures,
    CollectiveSkew,
    Comparison,
    FamilyFigures,
    RankTime,
    SlowdownEstimate,
    StepFigures,
    TraceFigures,
    UnmatchedKernel,
)

# Longer tables are cut; CSV and JSON hold everything.
_MAX_STEPS = 12
_MAX_ROWS = 12
_MAX_TRACES = 8
_MAX_RANKS = 64
# Waiting times that are shown per collective, those of the ranks that waited most.
_MAX_WAITING = 8
# Kinds of collectives that have a column in the table of families.
_MAX_KINDS = 4

# Kernels of a trace may be short: microseconds are shown.
_number = functools.partial(PLAIN.number, decimals=3)


def analysis_tables(analysis: Analysis) -> RenderableType:
    """The tables of an analysis, for people."""
    parts: list[RenderableType] = []
    if len(analysis.traces) > 1:
        parts += [_rank_table(analysis), Text()]
    for trace in analysis.traces[:_MAX_TRACES]:
        parts += [Text(_title(trace), style="bold"), _step_table(trace)]
        if trace.collectives:
            parts.append(_collective_table(trace))
        if trace.families:
            parts.append(_family_table(trace))
        parts += [_estimate_line(trace), *notes(trace.problems), Text()]
    parts += _more(len(analysis.traces), _MAX_TRACES, "files and devices")
    if analysis.skew:
        parts.append(_skew_table(analysis.skew))
    return Group(*parts, *notes(analysis.problems))


def comparison_tables(comparison: Comparison) -> RenderableType:
    """The tables of a comparison, for people."""
    figures = Table(title=Text(_compared(comparison)), title_justify="left")
    figures.add_column("")
    figures.add_column("per step", justify="right")
    for figure in (figure for section in SUMMARY for figure in section):
        value = comparison.figures.get(figure.name)
        if value is None:
            figures.add_row(row_label(figure), "undefined", style="dim")
        elif figure.unit == "ms":
            figures.add_row(row_label(figure), f"{_number(value)} ms")
        else:
            figures.add_row(row_label(figure), PLAIN.figure(figure, value))
    parts: list[RenderableType] = [figures]
    if not comparison.valid:
        parts.insert(0, Text("This comparison does not hold: see the notes.", style="bold red"))
    if comparison.kernels:
        parts.append(_kernel_table(comparison))
    if comparison.pairs:
        parts += pair_parts(comparison.pairs)
    if comparison.unmatched:
        calls = sum(row.overlapped_calls + row.sequential_calls for row in comparison.unmatched)
        title = f"Kernels without a partner in the other file: {calls} calls, over all steps"
        table = _table(title, "kernel", "overlapped", "sequential")
        for row in comparison.unmatched[:_MAX_ROWS]:
            sides = ((row.overlapped_calls, row.overlapped_ms), (row.sequential_calls, row.sequential_ms))
            table.add_row(
                kernel_name(row.name), *(f"{count} ({_number(ms)} ms)" if count else "" for count, ms in sides)
            )
        parts += [table, *_more(len(comparison.unmatched), _MAX_ROWS, "kernels")]
    return Group(*parts, *notes(comparison.problems))


def analysis_csv(analysis: Analysis, table: str) -> str:
    """One table of an analysis as CSV: ``steps``, ``collectives``, ``families``, ``estimates`` or ``skew``."""
    if table == "skew":
        header = ["collective", "group", "count", "transfer_ms", *RankTime.__struct_fields__]
        return _csv(
            header,
            (
                {"collective": s.collective, "group": s.group, "count": s.count, "transfer_ms": s.transfer_ms}
                | _fields(r)
                for s in analysis.skew
                for r in s.ranks
            ),
        )
    rows: list[dict[str, Any]] = []
    for trace in analysis.traces:
        where = {"file": trace.file, "rank": trace.rank, "device": trace.device}
        rows += [{**where, **fields} for fields in _rows_of(trace, table)]
    header = [
        "file",
        "rank",
        "device",
        *_FIRST.get(table, ()),
        *_STRUCTS[table].__struct_fields__,
        *_LAST.get(table, ()),
    ]
    return _csv([name for name in header if name not in _LEFT_OUT], rows)


def _rows_of(trace: TraceFigures, table: str) -> Iterator[dict[str, Any]]:
    if table == "estimates":
        if trace.estimate is not None:
            yield {"family": "all", **_fields(trace.estimate)}
            for family, estimate in trace.estimate.families.items():
                yield {"family": family, **_fields(estimate)}
        return
    items: Iterable[Any] = (trace.total, *trace.steps) if table == "steps" else getattr(trace, table)
    for item in items:
        fields = _fields(item)
        if table == "steps" and fields["step"] is None:
            fields["step"] = "all"
        if table == "families":
            fields["beside_ms"] = " ".join(f"{kind}={ms:g}" for kind, ms in item.beside.items())
        yield fields


_STRUCTS: dict[str, Any] = {
    "steps": StepFigures,
    "collectives": CollectiveFigures,
    "families": FamilyFigures,
    "estimates": SlowdownEstimate,
    "kernels": KernelTime,
    "pairs": PairTime,
    "unmatched": UnmatchedKernel,
}
_FIRST, _LAST = {"estimates": ("family",)}, {"families": ("beside_ms",)}
_LEFT_OUT = frozenset({"beside", "families"})


def comparison_csv(comparison: Comparison, table: str) -> str:
    """One table of a comparison as CSV: ``figures``, ``kernels``, ``pairs`` or ``unmatched``."""
    if table == "figures":
        return _csv(
            ["figure", "value"], ({"figure": name, "value": value} for name, value in comparison.figures.items())
        )
    struct = _STRUCTS[table]
    extra = [name for name in ("slowdown", "lost_ms") if hasattr(struct, name)]
    items = getattr(comparison, table)
    rows = [{**_fields(item), **{name: getattr(item, name) for name in extra}} for item in items]
    return _csv([*struct.__struct_fields__, *extra], rows)


def _fields(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__struct_fields__}


def _csv(header: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, header, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(value) for key, value in row.items()})
    return out.getvalue()


def _cell(value: Any) -> Any:
    """A cell that steers neither a terminal nor a spreadsheet: file names are whatever somebody has called a file."""
    cell = "" if value is None else spreadsheet_cell(value)
    return printable(cell) if isinstance(cell, str) else cell


# -- tables


def _table(title: str, first: str, *columns: str, first_width: int = 14) -> Table:
    table = Table(title=Text(title), title_justify="left")
    table.add_column(Text(first), min_width=first_width)
    for column in columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    return table


def _title(trace: TraceFigures) -> str:
    parts = [Path(trace.file).name]
    if trace.rank is not None:
        parts.append(f"rank {trace.rank} of {trace.world_size}")
    parts.append("CPU" if trace.on_host else f"device {trace.device} {trace.device_name}".strip())
    return ", ".join(parts)


def _rank_table(analysis: Analysis) -> Table:
    """The totals of the files, one row per rank."""
    columns = ("compute", "comm", "hidden", "exposed", "overlap\nratio", "waiting")
    table = _table("Ranks side by side, ms per file", "rank", *columns, first_width=4)
    waiting: dict[tuple[int | None, int], float] = {}
    for row in analysis.skew:
        for rank in row.ranks:
            waiting[rank.rank, rank.device] = waiting.get((rank.rank, rank.device), 0.0) + rank.waiting_ms
    several = len({trace.file for trace in analysis.traces}) < len(analysis.traces)
    for trace in analysis.traces[:_MAX_RANKS]:
        total = trace.total
        name = Path(trace.file).name if trace.rank is None else str(trace.rank)
        waited = waiting.get((trace.rank, trace.device))
        table.add_row(
            name_cell(f"{name}, device {trace.device}" if several else name),
            *(_number(ms) for ms in (total.compute_ms, total.comm_ms, total.hidden_comm_ms, total.exposed_comm_ms)),
            "-" if total.overlap_ratio is None else PLAIN.percent(total.overlap_ratio, decimals=2),
            "" if waited is None else _number(waited),
        )
    if len(analysis.traces) > _MAX_RANKS:
        table.add_row(f"... {len(analysis.traces) - _MAX_RANKS} more", style="dim")
    return table


def _step_table(trace: TraceFigures) -> Table:
    columns = ("length", "compute", "comm", "hidden", "exposed", "overlap\nratio", "comm\nhidden")
    table = _table("Kernel times by step, ms", "step", *columns, first_width=4)
    shown = trace.steps if len(trace.steps) <= _MAX_STEPS else trace.steps[: _MAX_STEPS - 1]
    for step in shown:
        table.add_row(str(step.step), *_step_cells(step))
    if len(shown) < len(trace.steps):
        table.add_row(f"... {len(trace.steps) - len(shown)} more", style="dim")
    table.add_section()
    table.add_row("all", *_step_cells(trace.total), style="bold")
    return table


def _step_cells(step: StepFigures) -> tuple[str, ...]:
    times = (step.wall_ms, step.compute_ms, step.comm_ms, step.hidden_comm_ms, step.exposed_comm_ms)
    ratios = (step.overlap_ratio, step.hidden_comm_fraction)
    return (
        *("" if ms is None else _number(ms) for ms in times),
        *("-" if ratio is None else PLAIN.percent(ratio, decimals=2) for ratio in ratios),
    )


def _collective_table(trace: TraceFigures) -> Table:
    table = _table("Collectives", "collective", "ranks", "count", "MB", "ms", "hidden", "alg\nGB/s", "bus\nGB/s")
    table.columns[0].no_wrap = False
    for row in trace.collectives[:_MAX_ROWS]:
        group = row.description or row.group
        bandwidths = (row.algorithm_bandwidth_gb_s, row.bus_bandwidth_gb_s)
        table.add_row(
            Text(f"{row.collective}, {group}" if group else row.collective, overflow="fold"),
            "?" if row.group_size is None else str(row.group_size),
            str(row.count),
            "?" if row.bytes is None else f"{row.bytes / 1e6:.2f}",
            _number(row.time_ms),
            _number(row.hidden_ms),
            *("?" if bandwidth is None else f"{bandwidth:.2f}" for bandwidth in bandwidths),
        )
    if len(trace.collectives) > _MAX_ROWS:
        table.add_row(f"... {len(trace.collectives) - _MAX_ROWS} more", style="dim")
    return table


def _family_table(trace: TraceFigures) -> Table:
    kinds = list(dict.fromkeys(kind for family in trace.families for kind in family.beside))[:_MAX_KINDS]
    estimates = trace.estimate.families if trace.estimate is not None else {}
    columns = [f"beside\n{kind}" for kind in kinds] + (["estimated\nslowdown"] if estimates else [])
    table = _table("Compute by family, ms", "family", "calls", "ms", *columns)
    for family in trace.families:
        beside = (family.beside.get(kind) for kind in kinds)
        cells = ["" if ms is None else _number(ms) for ms in beside]
        if estimates:
            estimate = estimates.get(family.family)
            cells.append("" if estimate is None else f"{change(estimate.slowdown)} ({estimate.calls_beside})")
        table.add_row(name_cell(family.family), str(family.calls), _number(family.time_ms), *cells)
    return table


def _estimate_line(trace: TraceFigures) -> Text:
    estimate = trace.estimate
    if estimate is None:
        return Text("Slowdown: no estimate, since no kernel is found both beside communication and alone.", style="dim")
    all_calls = estimate.calls_beside + estimate.calls_left_out
    return Text(
        f"Slowdown, an estimate from this file alone: {change(estimate.slowdown)}. It rests on {estimate.method}: "
        f"{estimate.calls_beside} of {all_calls} calls beside communication ({_number(estimate.time_beside_ms)} ms), "
        f"against {estimate.calls_alone} calls alone. It shows an association; `overlap compare` with a sequential "
        "trace, or the live monitor, measures the cause."
    )


def _skew_table(rows: Sequence[CollectiveSkew]) -> Table:
    table = _table("Collectives over the ranks, ms", "collective", "count", "transfer", "waiting, by rank")
    table.columns[-1].no_wrap = False
    for row in rows[:_MAX_ROWS]:
        several = len({rank.rank for rank in row.ranks}) < len(row.ranks)
        longest = sorted(row.ranks, key=lambda rank: -rank.waiting_ms)[:_MAX_WAITING]
        names = (f"{rank.rank}.{rank.device}" if several else str(rank.rank) for rank in longest)
        waiting = ", ".join(f"{name}: {_number(rank.waiting_ms)}" for name, rank in zip(names, longest, strict=True))
        name = row.collective if not row.group else f"{row.collective}, {row.group}"
        table.add_row(Text(name, overflow="fold"), str(row.count), _number(row.transfer_ms), waiting)
    if len(rows) > _MAX_ROWS:
        table.add_row(f"... {len(rows) - _MAX_ROWS} more", style="dim")
    return table


def _compared(comparison: Comparison) -> str:
    ov, seq = (Path(side.file).name for side in (comparison.overlapped, comparison.sequential))
    steps = comparison.steps
    matched = PLAIN.percent(comparison.matched_fraction)
    return f"{ov} ({steps[0]} steps) against {seq} ({steps[1]}); {matched} of compute matched"


def _kernel_table(comparison: Comparison) -> Table:
    table = _table("Kernels that lose most, per step", "kernel", "slowdown", "lost", "overlapped", "sequential")
    for kernel in comparison.kernels[:_MAX_ROWS]:
        slowdown = change(kernel.slowdown)
        times = (kernel.lost_ms, kernel.overlapped_ms, kernel.sequential_ms)
        table.add_row(kernel_name(kernel.name), slowdown, *(f"{_number(ms)} ms" for ms in times))
    if len(comparison.kernels) > _MAX_ROWS:
        table.add_row(f"... {len(comparison.kernels) - _MAX_ROWS} more", style="dim")
    return table


def _more(count: int, shown: int, what: str) -> list[RenderableType]:
    return [Text(f"... and {count - shown} more {what}", style="dim")] if count > shown else []


def notes(problems: Sequence[str]) -> list[RenderableType]:
    """Problems as notes, for people."""
    return [Text(f"Note: {problem}", style="yellow") for problem in problems]
