"""What was found in traces as tables for the terminal, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.show import pair_table, shortened
from overlap_callbacks.traces.figures import (
    Analysis,
    CollectiveSkew,
    Comparison,
    SlowdownEstimate,
    StepFigures,
    TraceFigures,
)

# Longest tables that are shown whole; CSV and JSON hold everything.
_MOST_STEPS = 12
_MOST_ROWS = 12

ANALYSIS_CSV = ("steps", "collectives", "families", "skew")
COMPARISON_CSV = ("figures", "kernels", "pairs", "unmatched")


def analysis_tables(analysis: Analysis) -> RenderableType:
    """An analysis, for people."""
    parts: list[RenderableType] = []
    for trace in analysis.traces:
        parts += [Text(_title(trace), style="bold"), _step_table(trace)]
        if trace.collectives:
            parts.append(_collective_table(trace))
        if trace.families:
            parts.append(_family_table(trace))
        parts += [_estimate_line(trace), *_notes(trace.problems), Text()]
    if analysis.skew:
        parts.append(_skew_table(analysis.skew))
    return Group(*parts, *_notes(analysis.problems))


def comparison_tables(comparison: Comparison) -> RenderableType:
    """A comparison, for people."""
    from overlap_callbacks.show import CHANGES, LABELS

    figures = Table(title=Text(_compared(comparison)), title_justify="left")
    figures.add_column("")
    figures.add_column("per step", justify="right")
    for name, label in LABELS.items():
        value = comparison.figures.get(name)
        if value is None:
            figures.add_row(label, "undefined", style="dim")
        elif name.endswith("_ms"):
            figures.add_row(label, f"{value:.3f} ms")
        else:
            figures.add_row(label, f"{value:+.1%}" if name in CHANGES else f"{value:.1%}")
    parts: list[RenderableType] = [figures]
    if not comparison.valid:
        parts.insert(0, Text("This comparison does not hold: see the notes.", style="bold red"))
    if comparison.kernels:
        parts.append(_kernel_table(comparison))
    if comparison.pairs:
        parts.append(pair_table(comparison.pairs, "What runs beside what, and what it costs"))
    if comparison.unmatched:
        calls = sum(row.overlapped_calls + row.sequential_calls for row in comparison.unmatched)
        table = _table(
            f"Kernels without a partner in the other file: {calls} calls", "kernel", "overlapped", "sequential"
        )
        for row in comparison.unmatched[:_MOST_ROWS]:
            sides = ((row.overlapped_calls, row.overlapped_ms), (row.sequential_calls, row.sequential_ms))
            table.add_row(shortened(row.name), *(f"{count} ({ms:.3f} ms)" if count else "" for count, ms in sides))
        if len(comparison.unmatched) > _MOST_ROWS:
            table.add_row(f"... and {len(comparison.unmatched) - _MOST_ROWS} more", "", "", style="dim")
        parts.append(table)
    return Group(*parts, *_notes(comparison.problems))


def analysis_csv(analysis: Analysis, table: str) -> str:
    """One table of an analysis as CSV: ``steps``, ``collectives``, ``families`` or ``skew``."""
    if table == "skew":
        return _csv(
            {"collective": s.collective, "group": s.group, "count": s.count, "transfer_ms": s.transfer_ms, **_fields(r)}
            for s in analysis.skew
            for r in s.ranks
        )
    rows: list[dict[str, Any]] = []
    for trace in analysis.traces:
        where = {"file": trace.file, "rank": trace.rank, "device": trace.device}
        items: Iterable[Any] = (trace.total, *trace.steps) if table == "steps" else getattr(trace, table)
        for item in items:
            fields = _fields(item)
            beside = fields.pop("beside", None)
            if beside is not None:
                fields["beside_ms"] = " ".join(f"{kind}={ms:g}" for kind, ms in beside.items())
            if table == "steps" and fields["step"] is None:
                fields["step"] = "all"
            rows.append({**where, **fields})
    return _csv(rows)


def comparison_csv(comparison: Comparison, table: str) -> str:
    """One table of a comparison as CSV: ``figures``, ``kernels``, ``pairs`` or ``unmatched``."""
    if table == "figures":
        return _csv({"figure": name, "value": value} for name, value in comparison.figures.items())
    rows = []
    for item in getattr(comparison, table):
        extra = {name: getattr(item, name) for name in ("slowdown", "lost_ms") if hasattr(type(item), name)}
        rows.append({**_fields(item), **extra})
    return _csv(rows)


def _fields(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__struct_fields__}


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(out, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
    return out.getvalue()


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


def _step_table(trace: TraceFigures) -> Table:
    columns = ("compute", "comm", "hidden", "exposed", "eq. 2", "hidden %", "kernels")
    table = _table("Kernel times per step, ms", "step", *columns, first_width=4)
    shown = trace.steps if len(trace.steps) <= _MOST_STEPS else trace.steps[: _MOST_STEPS - 1]
    for step in shown:
        table.add_row(str(step.step), *_step_cells(step))
    if len(shown) < len(trace.steps):
        table.add_row(f"... {len(trace.steps) - len(shown)} more", style="dim")
    table.add_section()
    table.add_row("all", *_step_cells(trace.total), style="bold")
    return table


def _step_cells(step: StepFigures) -> tuple[str, ...]:
    times = (step.compute_ms, step.comm_ms, step.hidden_comm_ms, step.exposed_comm_ms)
    ratios = (step.overlap_ratio, step.hidden_comm_fraction)
    return (
        *(f"{ms:.3f}" for ms in times),
        *("-" if ratio is None else f"{ratio:.2%}" for ratio in ratios),
        str(step.kernels),
    )


def _collective_table(trace: TraceFigures) -> Table:
    table = _table("Collectives", "collective", "ranks", "count", "MB", "ms", "hidden", "alg GB/s", "bus")
    table.columns[0].no_wrap = False
    for row in trace.collectives[:_MOST_ROWS]:
        name = (
            row.collective
            if not (row.description or row.group)
            else f"{row.collective}, {row.description or row.group}"
        )
        bandwidths = (row.algorithm_bandwidth_gb_s, row.bus_bandwidth_gb_s)
        table.add_row(
            shortened(name),
            "" if row.group_size is None else str(row.group_size),
            str(row.count),
            "" if row.bytes is None else f"{row.bytes / 1e6:.2f}",
            f"{row.time_ms:.3f}",
            f"{row.hidden_ms:.3f}",
            *("" if bandwidth is None else f"{bandwidth:.2f}" for bandwidth in bandwidths),
        )
    return table


def _family_table(trace: TraceFigures) -> Table:
    kinds = list(dict.fromkeys(kind for family in trace.families for kind in family.beside))[:4]
    table = _table(
        "Compute by family, ms, and how long beside which collective",
        "family",
        "calls",
        "ms",
        *(f"by {kind}" for kind in kinds),
    )
    for family in trace.families:
        beside = (family.beside.get(kind) for kind in kinds)
        cells = ("" if ms is None else f"{ms:.3f}" for ms in beside)
        table.add_row(shortened(family.family), str(family.calls), f"{family.time_ms:.3f}", *cells)
    return table


def _estimate_line(trace: TraceFigures) -> Text:
    found = trace.estimate
    if found is None:
        return Text("Slowdown: no estimate, since no kernel is found both beside communication and alone.", style="dim")
    return Text(f"Slowdown, an estimate from this file alone: {_estimate(found)}; {found.method}. {_LIMITS}")


_LIMITS = "It shows an association; `overlap compare` with a sequential trace, or the live monitor, measures the cause."


def _estimate(found: SlowdownEstimate) -> str:
    return (
        f"{found.slowdown:+.1%} ({found.calls_beside} calls of {found.kernels} kernels beside communication, "
        f"{found.time_beside_ms:.2f} ms, against {found.calls_alone} calls alone)"
    )


def _skew_table(rows: Sequence[CollectiveSkew]) -> Table:
    table = _table(
        "Ranks side by side: transfer and waiting", "collective", "count", "transfer, ms", "waiting by rank, ms"
    )
    table.columns[-1].no_wrap = False
    for row in rows[:_MOST_ROWS]:
        longest = sorted(row.ranks, key=lambda rank: -rank.waiting_ms)[:8]
        waiting = ", ".join(f"{rank.rank}: {rank.waiting_ms:.2f}" for rank in longest)
        name = row.collective if not row.group else f"{row.collective}, {row.group}"
        table.add_row(shortened(name), str(row.count), f"{row.transfer_ms:.3f}", waiting)
    return table


def _compared(comparison: Comparison) -> str:
    ov, seq = (Path(side.file).name for side in (comparison.overlapped, comparison.sequential))
    matched = (
        "" if comparison.matched_fraction is None else f", {comparison.matched_fraction:.1%} of compute time matched"
    )
    return f"{ov} ({comparison.steps[0]} steps) against {seq} ({comparison.steps[1]} steps){matched}"


def _kernel_table(comparison: Comparison) -> Table:
    table = _table("Kernels that lose most", "kernel", "slowdown", "lost", "overlapped", "sequential")
    for kernel in comparison.kernels[:_MOST_ROWS]:
        slowdown = "" if kernel.slowdown is None else f"{kernel.slowdown:+.1%}"
        times = (kernel.lost_ms, kernel.overlapped_ms, kernel.sequential_ms)
        table.add_row(shortened(kernel.name), slowdown, *(f"{ms:.3f} ms" for ms in times))
    return table


def _notes(problems: Sequence[str]) -> list[RenderableType]:
    return [Text(f"Note: {problem}", style="yellow") for problem in problems]
