"""The results of a benchmark: a document for the page and the terminal, and plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from overlap_callbacks.analysis.bench import GemmFigures, TransferFigures, rate_in_words, size_in_words
from overlap_callbacks.analysis.communication.link_peaks import Link
from overlap_callbacks.analysis.formatting import (
    CLEAR,
    NBSP,
    PAGE,
    PLAIN,
    certainty,
    change_in_words,
    count,
    none_clear_in_words,
    page_sentence,
    page_text,
    says_nothing,
    three_digits,
    useful,
)
from overlap_callbacks.analysis.headline import signless_bounds
from overlap_callbacks.analysis.results.bench import GEMM, GLOO, LOOPBACK, NCCL
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.experiments.bench.results import WORLD, Bench
from overlap_callbacks.report.views.elements import (
    EMPTY,
    RUN_COLORS,
    Block,
    Cell,
    Chart,
    Column,
    Document,
    Facts,
    Note,
    RunPage,
    Section,
    Table,
    Tile,
    Tiles,
    drawn_value,
    estimate_cells,
    estimate_tile,
    heads,
    interval_columns,
    number_cell,
    table_of,
)

_FOOT = (
    "Compute slowdown is equation 1 of arXiv 2507.03114. Bus bandwidth is what nccl-tests call so. Intervals are 95% "
    "confidence intervals over blocks."
)
# If fewer products are covered, a slowdown is doubtful.
_COVERED = 0.98
# From this slowdown on, as a factor.
_TWICE = 0.5
_LINKS = {
    GLOO: "ranks on the CPU of one host or several, with Gloo",
    NCCL: "GPUs with NCCL",
    LOOPBACK: "a loopback link: the second rank is a phantom with the same data in the same process",
}
_Read = Callable[[GemmFigures], Estimate | None]


def bench_document(bench: Bench, peak: Link | None = None) -> Document:
    """The results of a benchmark, with the peak of its link if known; a loopback link's always is."""
    plan, name = bench.start.plan, page_text(bench.folder.resolve().name, 80)
    sections = _gemm_sections(bench, peak) if plan.bench == GEMM else _transfer_sections(bench, peak)
    doubts = [(page_sentence(note), note.startswith(("Not ", "On a loop"))) for note in notes(bench)]
    run = RunPage(
        "run-1",
        name,
        page_text(_where(bench)),
        page_sentence(verdict(bench)),
        (_tiles(bench), *[Note(text, warning, first=not warning) for text, warning in doubts]),
        (*sections, _how(bench)),
    )
    return Document(f"overlap bench {plan.bench}: {name}", (run,), _FOOT, max_rows=None)


def bench_data(bench: Bench) -> dict[str, Any]:
    """The first line of the file, the figures of each point, and what is missing, as plain data."""
    return {
        "start": bench.start,
        "points": [msgspec.structs.asdict(point) for point in (*bench.gemms, *bench.transfers)],
        "failed": bench.failed,
        "left": len(bench.left),
        "notes": notes(bench),
        "file": str(bench.folder / bench.FILE_NAME),
    }


def gemm_section(bench: Bench) -> list[Section]:
    """The section on matrix products during all-reduces, for another page; empty if nothing was measured."""
    points = bench.gemms
    if not points:
        return []
    cost, gain = _gemm_charts(points, _peak(bench, None))
    blocks: list[Block] = [*cost, *gain, replace(_gemm_table(points), folded=True, first=False)]
    blocks += [Note(page_sentence(note)) for note in notes(bench)]
    title = "What do matrix products lose during an all-reduce (figure 8 of the study)?"
    return [Section(title, page_sentence(verdict(bench)), blocks)]


# -- text


def _where(bench: Bench) -> str:
    """What it ran on, in one line."""
    start, plan = bench.start, bench.start.plan
    threads = f", {count(plan.threads, 'thread')} each" if plan.threads else ""
    speed = f" ({plan.link_gb_s:g} GB/s)" if plan.link == LOOPBACK and plan.link_gb_s is not None else ""
    link = _LINKS.get(plan.link, plan.link)
    return f"{count(plan.ranks, 'rank')}{threads}: {link}{speed}; {start.device_name}; torch {start.torch_version}"


def verdict(bench: Bench) -> str:
    """The answer, in one or two sentences."""
    return _gemm_verdict(bench) if bench.start.plan.bench == GEMM else _transfer_verdict(bench)


def _gemm_verdict(bench: Bench) -> str:
    known = [(point.slowdown, point) for point in bench.gemms if point.slowdown is not None]
    if not known:
        return "No point was measured in which matrix products ran wholly during an all-reduce."
    clear = [pair for pair in known if certainty(pair[0]) == CLEAR]
    if not clear:
        words = none_clear_in_words([slowdown for slowdown, _ in known])
        return f"What a matrix product loses during an all-reduce over {bench.link_in_words}: {words}."
    slowdown, most = max(clear, key=lambda pair: pair[0].value)
    text = (
        f"At {size_in_words(most.point.message_bytes)} a product runs {_slower(slowdown)} during the "
        f"all-reduce (N {most.point.n}, {most.point.dtype}, over {bench.link_in_words})"
    )
    text += f": the most of {count(len(known), 'point')}, clear at {len(clear)}." if len(known) > 1 else "."
    if most.speedup is None or certainty(most.speedup) != CLEAR:
        return text
    words = change_in_words(most.speedup.value, "more", "less")
    return f"{text} Both at once still do {words} work in the same time ({signless_bounds(most.speedup)})."


def _slower(slowdown: Estimate) -> str:
    """E.g. ``2.0x slower (1.9x to 2.1x)`` or ``12.4% slower (11.0 to 13.8)``."""
    if slowdown.value < _TWICE or slowdown.ci_low is None or slowdown.ci_high is None:
        return f"{change_in_words(slowdown.value, 'slower', 'faster')} ({signless_bounds(slowdown)})"
    value, low, high = (f"{1 + each:.1f}x" for each in (slowdown.value, slowdown.ci_low, slowdown.ci_high))
    bounds = f"at least {low}" if says_nothing(slowdown, "fraction", signed=True) else f"{low} to {high}"
    return f"{value.replace('.0x', 'x')} slower ({bounds})"


def _transfer_verdict(bench: Bench) -> str:
    points = bench.transfers
    if not points:
        return "No collective was measured."
    best = max(points, key=lambda point: point.busbw_gb_s.value)
    least = min(points, key=lambda point: point.time_ms.value)
    return (
        f"Over {bench.link_in_words}, the bus bandwidth is at most {rate_in_words(best.busbw_gb_s.value)}, reached by "
        f"{bench.name(best.point)}; the shortest call takes {PLAIN.quantity(1e3 * least.time_ms.value, 'us')} "
        f"({bench.name(least.point)})."
    )


def notes(bench: Bench) -> list[str]:
    start, plan, points = bench.start, bench.start.plan, bench.gemms
    found = []
    if left := len(bench.left):
        found.append(f"Not finished: {left:,} of {len(bench.settings) * plan.rounds:,} measurements are left.")
    if plan.link == LOOPBACK:
        found.append(
            "On a loopback link, how long communication takes and what it occupies is given. What a real link costs "
            "needs a second rank."
        )
    if plan.bench == GEMM and plan.device == "cpu":
        found.append("On a CPU, products and the threads of Gloo share the cores. What a GPU does is another question.")
    if plan.bench == GEMM and not any(point.compute_w for point in points):
        why = start.power_missing or "blocks are shorter than the sensor needs"
        found.append(f"Power is absent: {why.removeprefix('no power: ')}.")
    if short := sum((point.covered or 1.0) < _COVERED for point in points):
        found.append(
            f"Of {count(short, 'point')} some products did not end during all-reduces and are left out: there the "
            "slowdown is too small."
        )
    if lacking := sum(point.slowdown is None for point in points):
        found.append(
            f"Of {count(lacking, 'point')} no product ran wholly during all-reduces: "
            "larger messages or smaller products would help."
        )
    found += [f"Not measured: {bench.name(one.gemm or one.transfer)}: {one.reason}" for one in bench.failed]
    if bench.resumed:
        versions = {start.torch_version, *(part.torch_version for part in bench.resumed)}
        devices = {start.device_name, *(part.device_name for part in bench.resumed)}
        found.append(f"It was ended and went on {count(len(bench.resumed), 'time')}.")
        if len(versions) + len(devices) > 2:
            found.append("Its parts ran with different versions of torch, or on different devices.")
    if bench.broken_lines:
        found.append(f"{count(bench.broken_lines, 'line')} of the file cannot be read and is left out.")
    return found


def _tiles(bench: Bench) -> Tiles:
    if bench.start.plan.bench == GEMM:
        chosen = (
            _extreme(bench, "Largest slowdown of products", lambda point: point.slowdown, max),
            _extreme(bench, "Smallest slowdown of products", lambda point: point.slowdown, min),
            _extreme(bench, "Largest slowdown of all-reduces", lambda point: point.all_reduce_slowdown, max),
            _extreme(bench, "Smallest gain of doing both at once", lambda point: point.speedup, min),
        )
        return Tiles(tuple([tile for tile in chosen if tile is not None]))
    tiles = []
    for kind in list(dict.fromkeys(point.point.kind for point in bench.transfers))[:4]:
        of_kind = [point for point in bench.transfers if point.point.kind == kind]
        best = max(of_kind, key=lambda point: point.busbw_gb_s.value)
        found = useful(best.busbw_gb_s, "GB/s")
        bounds = [rate_in_words(end, PAGE) for end in (found.ci_low, found.ci_high) if end is not None]
        value, at = rate_in_words(best.busbw_gb_s.value, PAGE), f"at {size_in_words(best.point.message_bytes)}"
        tiles.append(Tile(f"{kind}, highest bus bandwidth", value, " to ".join(bounds), at))
    return Tiles(tuple(tiles))


def _extreme(bench: Bench, label: str, read: _Read, choose: Callable[..., Any]) -> Tile | None:
    known = [(found.value, number, found) for number, point in enumerate(bench.gemms) if (found := read(point))]
    if not known:
        return None
    _, number, found = choose(known)
    return estimate_tile(label, found, "fraction", bench.name(bench.gemms[number].point))


def _how(bench: Bench) -> Section:
    start, plan = bench.start, bench.start.plan
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


# -- products during all-reduces


def _peak(bench: Bench, peak: Link | None) -> Link | None:
    """The user's peak, or that of a loopback link."""
    plan = bench.start.plan
    if peak is None and plan.link == LOOPBACK and plan.link_gb_s is not None:
        return Link("loopback link", plan.link_gb_s, "given", "")
    return peak


def _gemm_sections(bench: Bench, peak: Link | None) -> tuple[Section, ...]:
    points = bench.gemms
    if not points:
        return ()
    cost, gain = _gemm_charts(points, _peak(bench, peak))
    return (
        Section("What does an all-reduce cost matrix products that run during it?", "", cost),
        Section("Is it worth doing both at once?", "", gain),
        Section("Every point", "", [_gemm_table(points)]),
    )


def _gemm_charts(points: Sequence[GemmFigures], peak: Link | None) -> tuple[list[Chart], list[Chart]]:
    """Charts of what products lose during all-reduces, and of the gain from doing both at once."""
    lines = _lines(points)

    def chart(title: str, unit: str, caption: str, *reads: tuple[str, _Read], peak: Link | None = None) -> list[Chart]:
        # Figures against N, one colour per line; the second figure is dashed.
        series = [
            (f"{name}, {what}" if what else name, name, number > 0, [(row.point.n, read(row)) for row in rows])
            for name, rows in lines
            for number, (what, read) in enumerate(reads)
        ]
        if len(lines) > len(RUN_COLORS):
            caption += f" Of {len(lines)} lines the first {len(RUN_COLORS)} are drawn; the table has all."
        return _sweep(title, unit, series, f"{caption} Whiskers are 95% intervals.", peak)

    cost = [
        *chart("Slowdown of matrix products during an all-reduce", "fraction",
               "Time of a product during an all-reduce over its time alone, less 1. Below zero it was faster.",
               ("", lambda point: point.slowdown)),
        *chart("Products: TFLOP/s of a rank", "TFLOP/s", "Solid: alone. Dashed: during an all-reduce.",
               ("alone", lambda point: point.alone_tflop_s), ("both", lambda point: point.beside_tflop_s)),
        *chart("All-reduces: bus bandwidth", "GB/s", "Solid: alone. Dashed: during products.",
               ("alone", lambda point: point.alone_busbw_gb_s), ("both", lambda point: point.beside_busbw_gb_s),
               peak=peak),
    ]  # fmt: skip
    gain = [
        *chart("Gain of doing both at once", "fraction",
               "Work done in the same time, against one after the other: 100% if neither slows the other, 0% if "
               "nothing is gained, below 0% if it is better to do one after the other.",
               ("", lambda point: point.speedup)),
        *chart("Slowdown of all-reduces during products", "fraction",
               "Time of an all-reduce during products over its time alone, less 1.",
               ("", lambda point: point.all_reduce_slowdown)),
        *chart("Power of a device", "W", "Solid: products alone. Dashed: all-reduces alone, and both.",
               ("products", lambda point: point.compute_w), ("all-reduces", lambda point: point.communication_w),
               ("both", lambda point: point.both_w)),
    ]  # fmt: skip
    return cost, gain


def _lines(points: Sequence[GemmFigures]) -> list[tuple[str, list[GemmFigures]]]:
    """Each line's name and points, which differ only in N."""
    types = {point.point.dtype for point in points}
    ctas = {point.point.ctas for point in points}
    has_caps = any(point.point.cap_in_words for point in points)
    found: dict[str, list[GemmFigures]] = {}
    for point in points:
        key = point.point
        parts = [size_in_words(key.message_bytes, NBSP)]
        parts += [key.dtype] if len(types) > 1 else []
        parts += [f"{key.ctas} CTAs"] if len(ctas) > 1 else []
        parts += [key.cap_in_words or "no cap"] if has_caps else []
        found.setdefault(", ".join(parts), []).append(point)
    return list(found.items())


def _gemm_table(points: Sequence[GemmFigures]) -> Table:
    return table_of(
        "Matrix products during all-reduces",
        points,
        Column("N", lambda row: row.point.n, "whole"),
        Column("*All-reduce", lambda row: _size(row.point.message_bytes)),
        Column("*Type", lambda row: row.point.dtype),
        Column("CTAs", lambda row: row.point.ctas or None, "whole"),
        Column("Cap, W", lambda row: _cap(row.point.power_cap_w)),
        Column("Cap, MHz", lambda row: _cap(row.point.clock_cap_mhz)),
        *interval_columns("Slowdown", lambda row: estimate_cells(row.slowdown, "fraction", signed=True)),
        Column("-ms alone", lambda row: _digits(row.gemm_alone_ms)),
        Column("-ms both", lambda row: _digits(row.gemm_beside_ms)),
        Column("TFLOP/s alone", lambda row: _digits(row.alone_tflop_s)),
        Column("_both", lambda row: _digits(row.beside_tflop_s)),
        Column("-All-reduce, ms alone", lambda row: _digits(row.all_reduce_alone_ms)),
        Column("-both", lambda row: _digits(row.all_reduce_beside_ms)),
        Column("GB/s alone", lambda row: _digits(row.alone_busbw_gb_s)),
        Column("_both", lambda row: _digits(row.beside_busbw_gb_s)),
        *interval_columns("Gain", lambda row: estimate_cells(row.speedup, "fraction", signed=True)),
        Column("-Covered", lambda row: number_cell(row.covered, "whole percent")),
        Column("W products", lambda row: _digits(row.compute_w)),
        Column("-W all-reduces", lambda row: _digits(row.communication_w)),
        Column("_both", lambda row: _digits(row.both_w)),
        Column("-MHz products", lambda row: _digits(row.compute_mhz)),
        Column("-MHz both", lambda row: _digits(row.both_mhz)),
        caption="Times are geometric means over blocks and ranks. Covered is the share of the products counted that "
        "ended during all-reduces; the others are left out. Both: at the same time.",
        first=True,
        drop_empty=True,
    )


def _size(size: int) -> Cell:
    return Cell(size_in_words(size, NBSP), size)


def _cap(cap: float | None) -> Cell:
    return EMPTY if cap is None else Cell(f"{cap:g}", cap)


def _digits(found: Estimate | None) -> Cell:
    return EMPTY if found is None else Cell(three_digits(found.value, PAGE), found.value)


# -- collectives by size


def _transfer_sections(bench: Bench, peak: Link | None) -> tuple[Section, ...]:
    points, peak = bench.transfers, _peak(bench, peak)
    sections = []
    for group in dict.fromkeys(point.point.group for point in points):
        chosen = [point for point in points if point.point.group == group]
        name = _group_in_words(group, chosen[0].group_size)
        blocks: list[Block] = [
            *_by_size("Bus bandwidth", "rate", chosen, lambda point: point.busbw_gb_s,
                      "What passes a rank's link in a second. It rises until the link is full.", peak),
            *_by_size("Time of a call", "ms", chosen, lambda point: point.time_ms,
                      "Small messages take the latency of a call, whatever their size."),
            _size_table(f"Bus bandwidth{name}", chosen, lambda point: rate_in_words(point.busbw_gb_s.value, PAGE)),
            _size_table(f"Time of a call, ms{name}", chosen, lambda point: three_digits(point.time_ms.value, PAGE)),
        ]  # fmt: skip
        sections.append(Section(f"How fast is each collective{name}?", "", blocks))
    if points:
        sections.append(Section("Every point", "", [_transfer_table(points)]))
    return tuple(sections)


def _group_in_words(group: str, size: int) -> str:
    if group == WORLD:
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
) -> list[Chart]:
    of_kind = [
        (kind, [(point.point.message_bytes, read(point)) for point in points if point.point.kind == kind])
        for kind in dict.fromkeys(point.point.kind for point in points)
    ]
    series = [(kind, kind, False, [(size, found) for size, found in rows if found.value > 0]) for kind, rows in of_kind]
    caption = f"{caption} Both axes are logarithmic. Whiskers are 95% intervals."
    return _sweep(title, unit, series, caption, peak, x_label="message", x_bytes=True, log_y=True)


def _size_table(title: str, points: Sequence[TransferFigures], read: Callable[[TransferFigures], str]) -> Table:
    kinds = list(dict.fromkeys(point.point.kind for point in points))
    cells = {(point.point.message_bytes, point.point.kind): Cell(read(point)) for point in points}
    rows = [
        (Cell(size_in_words(size, NBSP)), *[cells.get((size, kind), EMPTY) for kind in kinds])
        for size in sorted({size for size, _ in cells})
    ]
    columns = heads("Size", *[kind.replace("_", " ") for kind in kinds])
    return Table(title, columns, tuple(rows), folded=True, sorts=False, first=True)


def _transfer_table(points: Sequence[TransferFigures]) -> Table:
    return table_of(
        "Collectives",
        points,
        Column("*Kind", lambda row: row.point.kind),
        Column("*Group", lambda row: row.point.group),
        Column("Size", lambda row: _size(row.point.message_bytes)),
        Column("ms", lambda row: _digits(row.time_ms)),
        Column("Algorithm", lambda row: _rate(row.algbw_gb_s.value)),
        Column("Bus", lambda row: _rate(row.busbw_gb_s.value)),
        Column("Low", lambda row: _rate(useful(row.busbw_gb_s, "GB/s").ci_low)),
        Column("High", lambda row: _rate(useful(row.busbw_gb_s, "GB/s").ci_high)),
        Column("Rounds", lambda row: row.rounds, "whole"),
        caption="Bus bandwidth is algorithm bandwidth times the factor of nccl-tests, 2(n-1)/n of an all-reduce.",
        drop_empty=True,
    )


def _rate(gb_s: float | None) -> Cell:
    return EMPTY if gb_s is None else Cell(rate_in_words(gb_s, PAGE), gb_s)


# -- shared by both benchmarks


def _sweep(
    title: str,
    unit: str,
    series: Iterable[tuple[str, str, bool, Sequence[tuple[int, Estimate | None]]]],
    caption: str,
    peak: Link | None,
    *,
    x_label: str = "N",
    x_bytes: bool = False,
    log_y: bool = False,
) -> list[Chart]:
    """A chart of figures against a size, with the link's peak; nothing if there are none.

    A series is its name, the name of its colour, whether it is dashed, and its points.
    """
    drawn: list[dict[str, Any]] = []
    colors: dict[str, str] = {}
    for name, line, dashed, rows in series:
        points = [[size, *drawn_value(found)] for size, found in rows if found is not None]
        if points and line not in colors and len(colors) < len(RUN_COLORS):
            colors[line] = RUN_COLORS[len(colors)]
        if points and line in colors:
            drawn.append({"name": name, "color": colors[line], "points": points, "dashed": dashed})
    if not drawn:
        return []
    limits = [] if peak is None else [[f"peak, {peak.name}", peak.gb_s]]
    data = {"unit": unit, "series": drawn, "x_label": x_label, "x_bytes": x_bytes, "log_y": log_y, "limits": limits}
    return [Chart("sweep", title, data, caption, tuple(colors.items()))]
