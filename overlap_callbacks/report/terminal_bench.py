"""The results of ``overlap bench`` as tables for the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.bench.figures import GemmFigures, TransferFigures
from overlap_callbacks.analysis.bench.points import work_left
from overlap_callbacks.analysis.bench.sizes import rate_in_words, size_in_words
from overlap_callbacks.analysis.formatting import PLAIN, count, three_digits
from overlap_callbacks.analysis.results.bench import BenchResults
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.report.bench_words import gemm_points, notes, transfer_points, verdict, where


def bench_tables(results: BenchResults) -> RenderableType:
    """The results for people: the answer, what it ran on, a table, and notes."""
    gemms, transfers = gemm_points(results), transfer_points(results)
    tables: list[RenderableType] = []
    if gemms:
        tables.append(_gemm_table(gemms))
    for group in dict.fromkeys(point.point.group for point in transfers):
        chosen = [point for point in transfers if point.point.group == group]
        tables.append(_transfer_table(chosen, "Bus bandwidth", lambda point: rate_in_words(point.busbw_gb_s.value)))
        tables.append(_transfer_table(chosen, "Time of a call, ms", lambda point: three_digits(point.time_ms.value)))
    return Group(
        Text(verdict(results), style="bold"),
        Text(where(results)),
        *tables,
        *[Text(f"Note: {note}") for note in notes(results)],
    )


def as_json(results: BenchResults) -> dict[str, Any]:
    """The results for programs: the first line of the file, the figures of each point, and what is missing."""
    points = [*gemm_points(results), *transfer_points(results)]
    return {
        "start": results.start,
        "points": [msgspec.structs.asdict(point) for point in points],
        "failed": results.failed,
        "left": len(work_left(results.start.plan, results)),
        "notes": notes(results),
    }


def _gemm_table(points: tuple[GemmFigures, ...]) -> RenderableType:
    shows_ctas = any(point.point.ctas for point in points)
    has_caps = any(point.point.cap_in_words for point in points)
    has_power = any(point.both_w for point in points)
    title = "Matrix products beside all-reduces (below: 95% intervals)"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    keys = ["N", "Message", "Type", *(["CTAs"] if shows_ctas else []), *(["Cap"] if has_caps else [])]
    heads = [*keys, "Slowdown", "TFLOP/s", "GB/s", "Gain"]
    for head in [*heads, *(["W"] if has_power else [])]:
        table.add_column(head, justify="left" if head == "Type" else "right", no_wrap=True)
    units = ["alone\nbeside"] * 2 + ["both at once"] + ["alone\nboth"] * has_power
    table.add_row(*[""] * (len(keys) + 1), *units)
    for point in points:
        key = point.point
        cells = [str(key.n), size_in_words(key.message_bytes), key.dtype, *([str(key.ctas)] if shows_ctas else [])]
        cells += [key.cap_in_words or "none"] if has_caps else []
        cells += [
            _with_bounds(point.slowdown),
            _pair(point.alone_tflop_s, point.beside_tflop_s),
            _pair(point.alone_busbw_gb_s, point.beside_busbw_gb_s),
            _with_bounds(point.speedup),
            *([_pair(point.compute_w, point.both_w)] if has_power else []),
        ]
        table.add_row(*cells)
    return table


def _transfer_table(
    points: list[TransferFigures], title: str, read: Callable[[TransferFigures], str]
) -> RenderableType:
    kinds = list(dict.fromkeys(point.point.kind for point in points))
    sizes = sorted({point.point.message_bytes for point in points})
    known = {(point.point.kind, point.point.message_bytes): point for point in points}
    where = f"{points[0].point.group}, {count(points[0].group_size, 'rank')}"
    title = f"{title} ({where})"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("Size", justify="right", no_wrap=True)
    for kind in kinds:
        table.add_column(kind.replace("_", " "), justify="right")
    for size in sizes:
        row = [known.get((kind, size)) for kind in kinds]
        table.add_row(size_in_words(size), *["" if point is None else read(point) for point in row])
    return table


def _pair(alone: Estimate | None, beside: Estimate | None) -> str:
    return "\n".join("-" if estimate is None else three_digits(estimate.value) for estimate in (alone, beside))


def _with_bounds(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    text, bounds = PLAIN.percent(estimate.value, signed=True), PLAIN.interval(estimate, "fraction", signed=True)
    return f"{text}\n{bounds}" if bounds else text
