"""What ``overlap bench`` found: the answer, charts against the sweep, and every point in a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from overlap_callbacks.analysis.bench.figures import GemmFigures, TransferFigures
from overlap_callbacks.analysis.bench.sizes import rate_in_words, size_in_words
from overlap_callbacks.analysis.communication.link_peaks import Link
from overlap_callbacks.analysis.formatting import NBSP, PAGE, count, page_sentence, page_text, rounded, three_digits
from overlap_callbacks.analysis.results.bench import GEMM, LOOPBACK, BenchResults
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.report.bench_words import gemm_points, notes, transfer_points, verdict, where
from overlap_callbacks.report.views.elements import (
    EMPTY,
    Block,
    Cell,
    Chart,
    Document,
    Facts,
    Note,
    RunPage,
    Section,
    Table,
    Tile,
    Tiles,
    heads,
    without_empty_columns,
)
from overlap_callbacks.report.views.trends import RUN_COLORS

_FOOT = (
    "Compute slowdown is equation 1 of arXiv 2507.03114. Bus bandwidth is what nccl-tests call so. Intervals are 95% "
    "confidence intervals over blocks."
)
_MAX_LINES = len(RUN_COLORS)
_Read = Callable[[GemmFigures], Estimate | None]


def bench_document(results: BenchResults, name: str, peak: Link | None = None) -> Document:
    """What a benchmark found.

    Args:
        results: of the benchmark.
        name: of its folder.
        peak: of the link; None where it is not known. That of a loopback link is.
    """
    plan = results.start.plan
    peak = peak or _given_peak(results)
    sections = _gemm_sections(results, peak) if plan.bench == GEMM else _transfer_sections(results, peak)
    blocks: list[Block] = [_tiles(results)]
    blocks += [Note(page_sentence(note), warning=note.startswith(("Not ", "On a loop"))) for note in notes(results)]
    run = RunPage(
        "run-1",
        page_text(name, 80),
        page_text(where(results)),
        page_sentence(verdict(results)),
        tuple(blocks),
        (*sections, _how(results)),
    )
    return Document(f"overlap bench {plan.bench}: {page_text(name, 80)}", (run,), _FOOT)


def _given_peak(results: BenchResults) -> Link | None:
    """The peak of a loopback link, which was given; None of another."""
    plan = results.start.plan
    if plan.link != LOOPBACK or plan.link_gb_s is None:
        return None
    return Link("loopback link", plan.link_gb_s, "given", "")


# -- products beside all-reduces


def gemm_blocks(results: BenchResults) -> list[Block]:
    """Charts and table of a ``gemm-allreduce``, for a page of something else; empty where it measured nothing."""
    points = gemm_points(results)
    if not points:
        return []
    cost, gain = _gemm_charts(points, _given_peak(results))
    return [*cost, *gain, dataclasses.replace(_gemm_table(points), folded=True)]


def _gemm_sections(results: BenchResults, peak: Link | None) -> tuple[Section, ...]:
    points = gemm_points(results)
    if not points:
        return ()
    cost, gain = _gemm_charts(points, peak)
    return (
        Section("What does an all-reduce cost the matrix products beside it?", "", cost),
        Section("Is it worth doing both at once?", "", gain),
        Section("Every point", "", [_gemm_table(points)]),
    )


def _gemm_charts(points: Sequence[GemmFigures], peak: Link | None) -> tuple[list[Chart], list[Chart]]:
    """Charts of what products lose beside all-reduces, and of what doing both at once gains."""
    lines = _lines(points)
    bandwidth = [("alone", lambda point: point.alone_busbw_gb_s), ("beside", lambda point: point.beside_busbw_gb_s)]
    rates = [("alone", lambda point: point.alone_tflop_s), ("beside", lambda point: point.beside_tflop_s)]
    power: list[tuple[str, _Read]] = [
        ("products", lambda point: point.compute_w),
        ("all-reduces", lambda point: point.communication_w),
        ("both", lambda point: point.both_w),
    ]
    cost = [
        _sweep("Slowdown of matrix products beside an all-reduce", "fraction", [("", _slowdown)], lines,
               "Time of a product beside an all-reduce over its time alone, less 1. Below zero it was faster."),
        _sweep("Products: TFLOP/s of a rank", "TFLOP/s", rates, lines, "Solid: alone. Dashed: beside an all-reduce."),
        _sweep("All-reduces: bus bandwidth", "GB/s", bandwidth, lines, "Solid: alone. Dashed: beside products.", peak),
    ]  # fmt: skip
    gain = [
        _sweep("Gain of doing both at once", "fraction", [("", lambda point: point.speedup)], lines,
               "Work done in the same time, against one after the other: 100% if neither slows the other, 0% if "
               "nothing is gained, below 0% if it is better to do one after the other."),
        _sweep("Slowdown of all-reduces beside products", "fraction", [("", lambda point: point.all_reduce_slowdown)],
               lines, "Time of an all-reduce beside products over its time alone, less 1."),
        _sweep("Power of a device", "W", power, lines, "Solid: products alone. Dashed: all-reduces alone, and both."),
    ]  # fmt: skip
    return [chart for chart in cost if chart], [chart for chart in gain if chart]


def _slowdown(point: GemmFigures) -> Estimate | None:
    return point.slowdown


def _lines(points: Sequence[GemmFigures]) -> list[tuple[str, list[GemmFigures]]]:
    """Points of one line each: those that differ in N alone."""
    types = {point.point.dtype for point in points}
    ctas = {point.point.ctas for point in points}
    has_caps = any(point.point.cap_in_words for point in points)
    found: dict[tuple[str, int, int, str], list[GemmFigures]] = {}
    for point in points:
        key = point.point
        found.setdefault((key.dtype, key.ctas, key.message_bytes, key.cap_in_words), []).append(point)
    named = []
    for (dtype, ctas_of, size, cap), rows in found.items():
        parts = [size_in_words(size, NBSP)]
        parts += [dtype] if len(types) > 1 else []
        parts += [f"{ctas_of} CTAs"] if len(ctas) > 1 else []
        parts += [cap or "no cap"] if has_caps else []
        named.append((", ".join(parts), rows))
    return named


def _sweep(
    title: str,
    unit: str,
    reads: Sequence[tuple[str, _Read]],
    lines: Sequence[tuple[str, list[GemmFigures]]],
    caption: str,
    peak: Link | None = None,
) -> Chart | None:
    """Figures against N, a colour for each line; None where no point has one."""
    series: list[dict[str, Any]] = []
    legend = []
    for (name, rows), color in zip(lines, RUN_COLORS, strict=False):
        before = len(series)
        for number, (what, read) in enumerate(reads):
            points = [
                [row.point.n, *map(rounded, (found.value, found.ci_low, found.ci_high))]
                for row in rows
                if (found := read(row)) is not None
            ]
            if points:
                label = f"{name}, {what}" if what else name
                series.append({"name": label, "color": color, "points": points, "dashed": number > 0})
        if len(series) > before:
            legend.append((name, color))
    if not series:
        return None
    if len(lines) > _MAX_LINES:
        caption = f"{caption} Of {len(lines)} lines the first {_MAX_LINES} are drawn; the table has all."
    limits = [] if peak is None else [[f"peak, {peak.name}", peak.gb_s]]
    data = {"unit": unit, "series": series, "x_label": "N", "x_bytes": False, "log_y": False, "limits": limits}
    return Chart("sweep", title, data, f"{caption} Whiskers are 95% intervals.", tuple(legend))


def _gemm_table(points: Sequence[GemmFigures]) -> Table:
    columns = heads(
        "N", "*All-reduce", "*Type", "CTAs", "Cap, W", "Cap, MHz", "Slowdown", "Low", "High", "ms alone", "ms beside",
        "TFLOP/s alone", "beside", "All-reduce, ms alone", "beside", "GB/s alone", "beside", "Gain", "Covered",
        "W products", "W all-reduces", "W both", "MHz products", "MHz both",
    )  # fmt: skip
    rows = []
    for point in points:
        key, slow = point.point, point.slowdown
        rows.append(
            (
                Cell(f"{key.n:,}", key.n),
                Cell(size_in_words(key.message_bytes, NBSP), key.message_bytes),
                Cell(key.dtype, key.dtype),
                Cell(str(key.ctas), key.ctas) if key.ctas else EMPTY,
                *[EMPTY if cap is None else Cell(f"{cap:g}", cap) for cap in (key.power_cap_w, key.clock_cap_mhz)],
                *[_percent(value) for value in ((slow.value, slow.ci_low, slow.ci_high) if slow else (None,) * 3)],
                _number(point.gemm_alone_ms),
                _number(point.gemm_beside_ms),
                _number(point.alone_tflop_s),
                _number(point.beside_tflop_s),
                _number(point.all_reduce_alone_ms),
                _number(point.all_reduce_beside_ms),
                _number(point.alone_busbw_gb_s),
                _number(point.beside_busbw_gb_s),
                _percent(None if point.speedup is None else point.speedup.value),
                EMPTY if point.covered is None else Cell(PAGE.percent(point.covered, decimals=0), point.covered),
                *map(_number, (point.compute_w, point.communication_w, point.both_w)),
                *map(_number, (point.compute_mhz, point.both_mhz)),
            )
        )
    return without_empty_columns(
        "Matrix products beside all-reduces",
        columns,
        rows,
        "Times are geometric means over blocks and ranks. Covered is the share of the products counted that ended "
        "beside all-reduces; the others are left out.",
    )


# -- collectives by size


def _transfer_sections(results: BenchResults, peak: Link | None) -> tuple[Section, ...]:
    points = transfer_points(results)
    sections = []
    for group in dict.fromkeys(point.point.group for point in points):
        chosen = [point for point in points if point.point.group == group]
        name = _group_words(group, chosen[0].group_size)
        sections.append(
            Section(
                f"How fast is each collective{name}?",
                "",
                [
                    _by_size("Bus bandwidth", "rate", chosen, lambda point: point.busbw_gb_s,
                             "What passes a rank's link in a second. It rises until the link is full.", peak),
                    _by_size("Time of a call", "ms", chosen, lambda point: point.time_ms,
                             "Small messages take the latency of a call, whatever their size."),
                ],
            )
        )  # fmt: skip
    if points:
        sections.append(Section("Every point", "", [_transfer_table(points)]))
    return tuple(sections)


def _group_words(group: str, size: int) -> str:
    if group == "world":
        return f", on {size} ranks"
    _, _, apart = group.partition(":")
    return f", in groups of {size} ranks" + (f" that are {apart} apart" if apart else "")


def _by_size(
    title: str,
    unit: str,
    points: Sequence[TransferFigures],
    read: Callable[[TransferFigures], Estimate],
    caption: str,
    peak: Link | None = None,
) -> Chart:
    kinds = list(dict.fromkeys(point.point.kind for point in points))
    series = []
    for kind, color in zip(kinds, RUN_COLORS, strict=False):
        rows = [
            [point.point.message_bytes, *map(rounded, (found.value, found.ci_low, found.ci_high))]
            for point in points
            if point.point.kind == kind and (found := read(point)).value > 0
        ]
        series.append({"name": kind, "color": color, "points": rows, "dashed": False})
    limits = [] if peak is None else [[f"peak, {peak.name}", peak.gb_s]]
    data = {"unit": unit, "series": series, "x_label": "message", "x_bytes": True, "log_y": True, "limits": limits}
    legend = tuple(zip(kinds, RUN_COLORS, strict=False))
    return Chart("sweep", title, data, f"{caption} Both axes are logarithmic. Whiskers are 95% intervals.", legend)


def _transfer_table(points: Sequence[TransferFigures]) -> Table:
    rows = []
    for point in points:
        key, bus = point.point, point.busbw_gb_s
        rows.append(
            (
                Cell(key.kind, key.kind),
                Cell(key.group, key.group),
                Cell(size_in_words(key.message_bytes, NBSP), key.message_bytes),
                _number(point.time_ms),
                *[
                    EMPTY if gb_s is None else Cell(rate_in_words(gb_s, PAGE), gb_s)
                    for gb_s in (point.algbw_gb_s.value, bus.value, bus.ci_low, bus.ci_high)
                ],
                Cell(str(point.rounds), point.rounds),
            )
        )
    columns = heads("*Kind", "*Group", "Size", "ms", "Algorithm", "Bus", "Low", "High", "Rounds")
    caption = "Bus bandwidth is algorithm bandwidth times the factor of nccl-tests, 2(n-1)/n of an all-reduce."
    return without_empty_columns("Collectives", columns, rows, caption)


# -- what both share


def _tiles(results: BenchResults) -> Tiles:
    if results.start.plan.bench == GEMM:
        return Tiles(tuple(_gemm_tiles(gemm_points(results))))
    points = transfer_points(results)
    tiles = []
    for kind in list(dict.fromkeys(point.point.kind for point in points))[:4]:
        best = max((p for p in points if p.point.kind == kind), key=lambda point: point.busbw_gb_s.value)
        tiles.append(
            Tile(
                f"{kind}, highest bus bandwidth",
                rate_in_words(best.busbw_gb_s.value, PAGE),
                _rates(best.busbw_gb_s),
                f"at {size_in_words(best.point.message_bytes)}",
            )
        )
    return Tiles(tuple(tiles))


def _gemm_tiles(points: Sequence[GemmFigures]) -> list[Tile]:
    def tile(label: str, read: _Read, largest: bool) -> Tile | None:
        known = [point for point in points if read(point) is not None]
        if not known:
            return None
        chosen = (max if largest else min)(known, key=lambda point: read(point).value)  # type: ignore[union-attr]
        found = read(chosen)
        assert found is not None
        key = chosen.point
        remark = f"N {key.n:,}, {key.dtype}, all-reduce of {size_in_words(key.message_bytes)}"
        remark += f", {key.cap_in_words}" if key.cap_in_words else ""
        value = PAGE.percent(found.value, signed=True)
        return Tile(label, value, PAGE.interval(found, "fraction", signed=True), remark)

    tiles = (
        tile("Largest slowdown of products", _slowdown, True),
        tile("Smallest slowdown of products", _slowdown, False),
        tile("Largest slowdown of all-reduces", lambda point: point.all_reduce_slowdown, True),
        tile("Smallest gain of doing both at once", lambda point: point.speedup, False),
    )
    return [made for made in tiles if made is not None]


def _how(results: BenchResults) -> Section:
    start, plan = results.start, results.start.plan
    facts = [
        ("Link", f"{plan.link} on {plan.device}"),
        ("Ranks", f"{plan.ranks}" + (f", {count(plan.threads, 'thread')} each" if plan.threads else "")),
        ("Device", start.device_name),
        ("Rounds of each point", f"{plan.rounds}"),
        ("Least length of a block", f"{plan.block_s:g} s"),
        ("Power", start.power_source or "no sensor"),
        ("Started", start.started_at),
        ("Versions", f"overlap-callbacks {start.library_version}, torch {start.torch_version}"),
        ("Python", start.python_version),
        ("Command", start.command),
    ]
    answer = (
        "In each round the conditions of a point run in the order products, all-reduces, both, both, all-reduces, "
        "products, so that slow drift cancels."
        if plan.bench == GEMM
        else "Each point is measured once a round. Every second round runs backwards, so that slow drift cancels."
    )
    shown = tuple([(name, page_text(value)) for name, value in facts])
    return Section("How was it measured?", answer, [Facts("Setting", shown)])


def _rates(bandwidth: Estimate) -> str:
    """The interval of a bandwidth; empty without one."""
    if bandwidth.ci_low is None or bandwidth.ci_high is None:
        return ""
    return " to ".join([rate_in_words(bound, PAGE) for bound in (bandwidth.ci_low, bandwidth.ci_high)])


def _number(estimate: Estimate | None) -> Cell:
    return EMPTY if estimate is None else Cell(three_digits(estimate.value, PAGE), estimate.value)


def _percent(value: float | None) -> Cell:
    return EMPTY if value is None else Cell(PAGE.percent(value, signed=True), value)
