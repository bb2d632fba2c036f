"""Tables for the terminal of an analysis of traces: what matters first, and everything only where it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.report.terminal_names import distinct_cells, kernel_cells
from overlap_callbacks.report.terminal_trace_parts import Bars, change, more, name_cell, notes, plain_table, warnings
from overlap_callbacks.report.trace_verdict import milliseconds, names_of, verdict
from overlap_callbacks.traces.figures import Analysis, CollectiveSize, CollectiveSkew, StepFigures, TraceFigures

# Rows of a table: of one file, and of several, which have to fit on two screens. CSV and JSON hold everything.
_ROWS, _ROWS_OF_SEVERAL = 10, 5
_MAX_STEPS = 12
_MAX_RANKS = 64
# Files that one note names.
_MAX_FILES = 3
_MAX_NOTES = 4
# Waiting times that are shown per collective, those of the ranks that waited most.
_MAX_WAITING = 4
# Kinds of collectives that have a column in the table of families.
_MAX_KINDS = 4
_ALL = 10**9

_ms = milliseconds
_percent = functools.partial(PLAIN.percent, decimals=1)


def analysis_tables(analysis: Analysis, everything: bool = False) -> RenderableType:
    """The tables of an analysis, for people.

    Args:
        analysis: what to show.
        everything: whether to show all tables of all files, with all rows.
    """
    traces = analysis.traces
    several = len(traces) > 1
    of_files = _by_file(traces, _warnings) if several else [warning for trace in traces for warning in trace.warnings]
    parts = warnings([*analysis.warnings, *of_files])
    sentences = verdict(analysis)
    if sentences:
        parts += [*[Text(sentence, style="bold") for sentence in sentences], Text()]
    if several:
        rows = _ALL if everything else _ROWS_OF_SEVERAL
        if analysis.skew:
            parts += [_skew_table(analysis.skew, rows), *more(len(analysis.skew), rows, "collectives")]
        parts.append(_rank_table(analysis, _ALL if everything else _MAX_RANKS))
        parts += _size_tables(analysis.sizes, rows)
        if not everything:
            slowest, name = max(zip(traces, names_of(traces), strict=True), key=lambda item: item[0].total.compute_ms)
            parts += _kernel_tables(slowest, rows, f"Top kernels of {name}, which computes most")
            said = notes([*_rest(analysis.problems, analysis.warnings), *_by_file(traces, _notes)])
            hidden = [Text("--all shows the tables of each file.", style="dim")]
            return Group(*parts, *said[:_MAX_NOTES], *more(len(said), _MAX_NOTES, "notes"), *hidden)
        parts.append(Text())
    for trace in traces:
        parts += _trace_tables(trace, analysis.sizes if len(traces) == 1 else (), everything)
    return Group(*parts, *notes(_rest(analysis.problems, analysis.warnings)))


def problems_of(analysis: Analysis) -> list[str]:
    """What is wrong or doubtful; with several files, each note names the files that it is about."""
    several = len({trace.file for trace in analysis.traces}) > 1 or len(analysis.warnings) > 0
    of_files = (
        _by_file(analysis.traces, lambda trace: trace.problems)
        if several
        else [p for trace in analysis.traces for p in trace.problems]
    )
    return [*analysis.warnings, *dict.fromkeys(of_files), *_rest(analysis.problems, analysis.warnings)]


def _rest(problems: Sequence[str], warnings: Sequence[str]) -> list[str]:
    return [problem for problem in problems if problem not in warnings]


def _warnings(trace: TraceFigures) -> Sequence[str]:
    return trace.warnings


def _notes(trace: TraceFigures) -> Sequence[str]:
    return _rest(trace.problems, trace.warnings)


def _by_file(traces: Sequence[TraceFigures], problems: Callable[[TraceFigures], Sequence[str]]) -> list[str]:
    """Each problem once, behind the names of the files that have it."""
    files: dict[str, dict[str, None]] = {}
    for trace in traces:
        for problem in problems(trace):
            files.setdefault(problem, {})[Path(trace.file).name] = None
    return [
        f"{', '.join([*names][:_MAX_FILES])}{f' and {len(names) - _MAX_FILES} more' if len(names) > _MAX_FILES else ''}"
        f": {problem}"
        for problem, names in files.items()
    ]


def _trace_tables(trace: TraceFigures, sizes: Sequence[CollectiveSize], everything: bool) -> list[RenderableType]:
    """The tables of one device of one file."""
    rows, steps = (_ALL, _ALL) if everything else (_ROWS, _MAX_STEPS)
    parts: list[RenderableType] = [Text(_title(trace), style="bold")]
    if trace.time:
        parts.append(_time_table(trace, steps))
    parts.append(_step_table(trace, steps))
    if trace.paths:
        parts.append(_path_table(trace, steps))
    parts += _kernel_tables(trace, rows, "Top kernels")
    if trace.collectives:
        parts += [_collective_table(trace, rows), *more(len(trace.collectives), rows, "groups")]
    parts += _size_tables(sizes, rows)
    if trace.families:
        parts.append(_family_table(trace))
    if trace.queues:
        parts += [_queue_table(trace, rows), *more(len(trace.queues), rows, "streams")]
    if trace.utilisation is not None:
        parts.append(Text(f"Utilisation over time, {_ms(_span_ms(trace))} ms"))
        parts.append(Bars("compute     ", trace.utilisation.compute))
        parts.append(Bars("exposed comm", trace.utilisation.exposed_comm))
    return [*parts, _estimate_line(trace), *notes(_notes(trace)), Text()]


def _span_ms(trace: TraceFigures) -> float:
    return trace.time[0].span_ms if trace.time else 0.0


def _title(trace: TraceFigures) -> str:
    parts = [Path(trace.file).name]
    if trace.rank is not None:
        parts.append(f"rank {trace.rank}" + (f" of {trace.world_size}" if trace.world_size is not None else ""))
    parts.append("CPU" if trace.on_host else f"device {trace.device} {trace.device_name}".strip())
    return ", ".join(parts)


def _skew_table(rows: Sequence[CollectiveSkew], max_rows: int) -> Table:
    columns = ("count", "transfer", "most often\nlast", "waiting, by rank")
    table = plain_table("Collectives over the ranks, ms", "collective", *columns)
    table.columns[-1].no_wrap = False
    for row in rows[:max_rows]:
        several = len({rank.rank for rank in row.ranks}) < len(row.ranks)
        names = {id(rank): f"{rank.rank}.{rank.device}" if several else str(rank.rank) for rank in row.ranks}
        longest = sorted(row.ranks, key=lambda rank: -rank.waiting_ms)[:_MAX_WAITING]
        waiting = ", ".join(f"{names[id(rank)]}: {_ms(rank.waiting_ms)}" for rank in longest)
        latest = max(row.ranks, key=lambda rank: rank.last)
        name = row.collective if not row.group else f"{row.collective}, {row.group}"
        table.add_row(
            Text(name, overflow="fold"),
            str(row.count),
            _ms(row.transfer_ms),
            f"{names[id(latest)]} ({latest.last})",
            waiting,
        )
    return table


def _rank_table(analysis: Analysis, max_rows: int) -> Table:
    """The totals of the files, one row per rank."""
    columns = ("length", "compute", "exposed\ncomm", "host", "other\nidle", "waiting", "overlap\nratio")
    table = plain_table("Ranks side by side, ms per file", "rank", *columns, first_width=4)
    waiting: dict[tuple[int | None, int], float] = {}
    for row in analysis.skew:
        for rank in row.ranks:
            waiting[rank.rank, rank.device] = waiting.get((rank.rank, rank.device), 0.0) + rank.waiting_ms
    names = [name.removeprefix("rank ") for name in names_of(analysis.traces)]
    for trace, name in list(zip(analysis.traces, distinct_cells(names, 4), strict=True))[:max_rows]:
        total, time = trace.total, trace.time[0] if trace.time else None
        waited = waiting.get((trace.rank, trace.device))
        host_ms = None if time is None or time.idle_host_ms is None else time.idle_host_ms + (time.idle_launch_ms or 0)
        other_ms = None if time is None else time.idle_ms if host_ms is None else time.idle_other_ms
        length_ms = None if time is None else time.span_ms
        table.add_row(
            name,
            *map(_optional_ms, (length_ms, total.compute_ms, total.exposed_comm_ms, host_ms, other_ms)),
            "" if waited is None else _ms(waited),
            "-" if total.overlap_ratio is None else _percent(total.overlap_ratio),
        )
    if len(analysis.traces) > max_rows:
        table.add_row(f"... {len(analysis.traces) - max_rows} more", style="dim")
    return table


def _time_table(trace: TraceFigures, max_steps: int) -> Table:
    columns = ("length", "compute", "exposed\ncomm", "copies", "host", "launch", "other\nidle")
    title = "Where the time goes on the CPU, ms" if trace.on_host else "Where the time goes on the device, ms"
    table = plain_table(title, "step", *columns, first_width=4)
    whole, *steps = trace.time
    shown = steps if len(steps) <= max_steps else steps[: max_steps - 1]
    for time in (*shown, whole):
        if time is whole:
            if len(shown) < len(steps):
                table.add_row(f"... {len(steps) - len(shown)} more", style="dim")
            table.add_section()
        other = time.idle_ms if time.idle_host_ms is None else time.idle_other_ms
        times = (time.span_ms, time.compute_ms, time.exposed_comm_ms, time.copy_ms)
        causes = (time.idle_host_ms, time.idle_launch_ms, other)
        name = "all" if time.step is None else str(time.step)
        table.add_row(name, *map(_optional_ms, (*times, *causes)), style="bold" if time is whole else None)
    return table


def _step_table(trace: TraceFigures, max_steps: int) -> Table:
    columns = ("length", "compute", "comm", "hidden", "exposed", "overlap\nratio", "comm\nhidden")
    table = plain_table("Kernel times by step of the host, ms", "step", *columns, first_width=4)
    shown = trace.steps if len(trace.steps) <= max_steps else trace.steps[: max_steps - 1]
    for step in shown:
        table.add_row(f"{step.step}, cut" if step.cut else str(step.step), *_step_cells(step))
    if len(shown) < len(trace.steps):
        table.add_row(f"... {len(trace.steps) - len(shown)} more", style="dim")
    table.add_section()
    table.add_row("all", *_step_cells(trace.total), style="bold")
    return table


def _step_cells(step: StepFigures) -> tuple[str, ...]:
    times = (step.wall_ms, step.compute_ms, step.comm_ms, step.hidden_comm_ms, step.exposed_comm_ms)
    ratios = (step.overlap_ratio, step.hidden_comm_fraction)
    return (
        *map(_optional_ms, times),
        *("-" if ratio is None else PLAIN.percent(ratio, decimals=2) for ratio in ratios),
    )


def _optional_ms(value: float | None) -> str:
    return "" if value is None else _ms(value)


def _path_table(trace: TraceFigures, max_steps: int) -> Table:
    columns = ("length", "compute", "comm", "host", "other", "less at most\nwithout comm", "without\nthe host")
    table = plain_table("Critical path by step, ms", "step", *columns, first_width=4)
    shown = trace.paths if len(trace.paths) <= max_steps else trace.paths[: max_steps - 1]
    for path in shown:
        times = (path.length_ms, path.compute_ms, path.comm_ms, path.host_ms + path.launch_ms)
        most = ("?" if ms is None else _ms(ms) for ms in (path.at_most_comm_ms, path.at_most_host_ms))
        name = "all" if path.step is None else str(path.step)
        table.add_row(name, *map(_ms, (*times, path.other_ms + path.copy_ms)), *most)
    if len(shown) < len(trace.paths):
        table.add_row(f"... {len(trace.paths) - len(shown)} more", style="dim")
    return table


def _kernel_tables(trace: TraceFigures, max_rows: int, title: str) -> list[RenderableType]:
    if not trace.kernels:
        return []
    shown = trace.kernels[:max_rows]
    table = plain_table(f"{title}, ms", "kernel", "calls", "time", "share", "longest", "overlapped")
    for kernel, name in zip(shown, kernel_cells([kernel.name for kernel in shown]), strict=True):
        times = (_ms(kernel.longest_ms), _ms(kernel.beside_ms))
        table.add_row(name, str(kernel.calls), _ms(kernel.time_ms), _percent(kernel.share), *times)
    return [table, *more(len(trace.kernels), max_rows, "kernels")]


def _collective_table(trace: TraceFigures, max_rows: int) -> Table:
    table = plain_table("Collectives", "collective", "ranks", "count", "MB", "ms", "hidden", "alg\nGB/s", "bus\nGB/s")
    table.columns[0].no_wrap = False
    for row in trace.collectives[:max_rows]:
        group = row.description or row.group
        bandwidths = (row.algorithm_bandwidth_gb_s, row.bus_bandwidth_gb_s)
        table.add_row(
            Text(f"{row.collective}, {group}" if group else row.collective, overflow="fold"),
            "?" if row.group_size is None else str(row.group_size),
            str(row.count),
            "?" if row.bytes is None else f"{row.bytes / 1e6:.2f}",
            _ms(row.time_ms),
            _ms(row.hidden_ms),
            *("?" if bandwidth is None else f"{bandwidth:.2f}" for bandwidth in bandwidths),
        )
    return table


def _size_tables(sizes: Sequence[CollectiveSize], max_rows: int) -> list[RenderableType]:
    if not sizes:
        return []
    matched = any(row.matched for row in sizes)
    title = "Collectives by size; bandwidth of the transfer" if matched else "Collectives by size"
    columns = ("ranks", "MB", "kernels", "ms each", *(("transfer\nms",) if matched else ()), "bus\nGB/s")
    table = plain_table(title, "collective", *columns)
    for row in sizes[:max_rows]:
        cells = ["?" if row.group_size is None else str(row.group_size), f"{row.bytes / 1e6:.3f}", str(row.kernels)]
        cells += [_ms(row.time_ms), *([_optional_ms(row.transfer_ms)] if matched else [])]
        bandwidth = row.transfer_bus_bandwidth_gb_s if matched else row.bus_bandwidth_gb_s
        cells.append("" if matched and not row.matched else "?" if bandwidth is None else f"{bandwidth:.2f}")
        table.add_row(Text(row.collective, overflow="fold"), *cells)
    return [table, *more(len(sizes), max_rows, "sizes")]


def _family_table(trace: TraceFigures) -> Table:
    kinds = list(dict.fromkeys(kind for family in trace.families for kind in family.beside))[:_MAX_KINDS]
    estimates = trace.estimate.families if trace.estimate is not None else {}
    columns = [f"beside\n{kind}" for kind in kinds] + (["estimated\nslowdown"] if estimates else [])
    table = plain_table("Compute by family, ms", "family", "calls", "ms", *columns)
    for family in trace.families:
        beside = (family.beside.get(kind) for kind in kinds)
        cells = ["" if ms is None else _ms(ms) for ms in beside]
        if estimates:
            estimate = estimates.get(family.family)
            cells.append("" if estimate is None else f"{change(estimate.slowdown)} ({estimate.calls_beside})")
        table.add_row(name_cell(family.family), str(family.calls), _ms(family.time_ms), *cells)
    return table


def _queue_table(trace: TraceFigures, max_rows: int) -> Table:
    columns = ("launches", "mean\nin queue", "longest\nqueue", "mean delay\nms")
    table = plain_table("Launches in flight, by stream", "stream", *columns, first_width=6)
    for queue in trace.queues[:max_rows]:
        cells = (str(queue.launches), PLAIN.number(queue.mean, 2), str(queue.longest), _ms(queue.delay_ms))
        table.add_row(name_cell(queue.stream), *cells)
    return table


def _estimate_line(trace: TraceFigures) -> Text:
    estimate = trace.estimate
    if estimate is None:
        return Text("Slowdown: no estimate, since no kernel is found both beside communication and alone.", style="dim")
    all_calls = estimate.calls_beside + estimate.calls_left_out
    return Text(
        f"Slowdown, an estimate from this file alone: {change(estimate.slowdown)}. It rests on {estimate.method}: "
        f"{estimate.calls_beside} of {all_calls} calls beside communication ({_ms(estimate.time_beside_ms)} ms), "
        f"against {estimate.calls_alone} calls alone. It shows an association; `overlap compare` with a sequential "
        "trace, or the live monitor, measures the cause."
    )
