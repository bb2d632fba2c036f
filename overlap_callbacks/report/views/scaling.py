"""Several runs against what varies between them: charts and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from overlap_callbacks.analysis.formatting import PAGE, count, page_text, rounded
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.scaling import WORLD_SIZE, RunFigures, ScaledRun, Value, scaled
from overlap_callbacks.report.axis import Comparison
from overlap_callbacks.report.views.elements import EMPTY_LEGEND, Block, Cell, Chart, Head, Note, Section, Table
from overlap_callbacks.report.views.tables import EMPTY, name_cell
from overlap_callbacks.report.views.trends import RUN_COLORS

# Words on an axis, and names of dimensions.
_MAX_LABEL = 40
_UNITS = {"tokens": "tokens/s", "samples": "samples/s"}

# Of a run its value, and the bounds of its interval.
Reader = Callable[[RunFigures], tuple[float, float | None, float | None] | None]


def scaling(found: Comparison) -> Section:
    """Throughput, scaling, communication and bandwidth of the runs against the axis."""
    relative = scaled(found.runs) if found.axis == WORLD_SIZE else {}
    charts = [chart for chart in _charts(found, relative) if chart is not None]
    if len(charts) % 2:  # the last has the row to itself
        charts[-1] = dataclasses.replace(charts[-1], narrow=False)
    blocks: list[Block] = [*charts, _table(found, relative)]
    if found.axis == WORLD_SIZE and not relative:
        blocks.append(
            Note(
                "Scaling factor and efficiency need tokens_per_step or samples_per_step of every run that is compared."
            )
        )
    if found.without:
        names = ", ".join(page_text(name, 80) for name in found.without)
        blocks.append(Note(f"Without {_label(found.axis)} in the record: {names}.", warning=True))
    if found.axis == WORLD_SIZE:
        return Section("How does it scale?", _answer(found.runs, relative), blocks)
    return Section(f"How does it change with {_label(found.axis)}?", "", blocks)


def _answer(runs: Sequence[RunFigures], relative: dict[str, ScaledRun]) -> str:
    largest = max((run for run in runs if run.name in relative), key=lambda run: run.ranks, default=None)
    if largest is None:
        return ""
    base, run = min(run.ranks for run in runs if run.name in relative), relative[largest.name]
    return (
        f"On {largest.ranks:,} ranks the job does {PAGE.number(run.factor, 2)} times as much in a second as on "
        f"{count(base, 'rank')}: {PAGE.percent(run.efficiency)} of the factor of the ranks."
    )


def _charts(found: Comparison, relative: dict[str, ScaledRun]) -> list[Chart | None]:
    def factor(run: RunFigures) -> tuple[float, None, None] | None:
        return (relative[run.name].factor, None, None) if run.name in relative else None

    def efficiency(run: RunFigures) -> tuple[float, None, None] | None:
        return (relative[run.name].efficiency, None, None) if run.name in relative else None

    dimensions = sorted({name for run in found.runs for name in run.bandwidths})
    bandwidths = [
        (page_text(name, _MAX_LABEL), color, _bandwidth(name))
        for name, color in zip(dimensions, RUN_COLORS, strict=False)
    ]
    shares = [
        ("communication", "communication", _of_estimate(lambda run: run.comm_ratio)),
        ("exposed", "sequential", _of_number(lambda run: run.exposed)),
    ]
    work = _of_estimate(lambda run: run.work_per_s)
    base = min((run.ranks for run in found.runs if run.name in relative), default=0)
    return [
        _chart(found, "Throughput", _UNITS.get(found.work, ""), [("throughput", "ink", work)]),
        _chart(found, "Step time, overlapped", "ms", [("step", "overlapped", _of_estimate(lambda run: run.step_ms))]),
        _chart(found, "Scaling factor", "times", [("scaling factor", "ink", factor)], ideal=base),
        _chart(found, "Scaling efficiency", "fraction", [("efficiency", "ink", efficiency)]),
        _chart(found, "Communication as a share of the step", "fraction", shares),
        _chart(found, "Effective bandwidth", "GB/s", bandwidths),
        _chart(found, "Model FLOP utilisation", "fraction", [("MFU", "ink", _of_number(lambda run: run.mfu))]),
    ]


_CAPTIONS = {
    "Scaling factor": "Throughput over that of the fewest ranks. The dashed line is as many times as there are ranks.",
    "Communication as a share of the step": "All communication, and the part of it beside which no compute runs.",
    "Effective bandwidth": "Bytes on the wire of a rank over the time of transfers alone, without waiting.",
}


def _chart(
    found: Comparison, title: str, unit: str, lines: Sequence[tuple[str, str, Reader]], *, ideal: int = 0
) -> Chart | None:
    """One chart; None where no run has any of its figures.

    Args:
        found: the runs.
        title: of the chart.
        unit: of its figures.
        lines: name, colour and figure of each.
        ideal: ranks of the smallest job, where a line shows as many times as there are ranks; 0 for no line.
    """
    series: list[dict[str, Any]] = []
    for name, color, read in lines:
        points = [
            [_place(run.value), page_text(run.name, 80), *map(rounded, figure)]
            for run in found.runs
            if (figure := read(run)) is not None
        ]
        if points:
            series.append({"name": name, "color": color, "points": points})
    if not series:
        return None
    caption = _CAPTIONS.get(title, "")
    if any(point[3] is not None for line in series for point in line["points"]):
        caption = f"{caption} Whiskers are 95% intervals.".strip()
    legend = tuple((line["name"], line["color"]) for line in series) if len(lines) > 1 else EMPTY_LEGEND
    data = {"unit": unit, "series": series, "x_label": _label(found.axis), "numeric": found.numeric, "ideal": ideal}
    return Chart("against", title, data, caption, legend, narrow=True)


def _of_estimate(read: Callable[[RunFigures], Estimate | None]) -> Reader:
    def figure(run: RunFigures) -> tuple[float, float | None, float | None] | None:
        found = read(run)
        return None if found is None else (found.value, found.ci_low, found.ci_high)

    return figure


def _of_number(read: Callable[[RunFigures], float | None]) -> Reader:
    def figure(run: RunFigures) -> tuple[float, None, None] | None:
        found = read(run)
        return None if found is None else (found, None, None)

    return figure


def _bandwidth(dimension: str) -> Reader:
    return _of_number(lambda run: run.bandwidths.get(dimension))


def _place(value: Value) -> Value:
    return value if not isinstance(value, str) else page_text(value, _MAX_LABEL)


def _table(found: Comparison, relative: dict[str, ScaledRun]) -> Table:
    dimensions = sorted({name for run in found.runs for name in run.bandwidths})[: len(RUN_COLORS)]
    rows = []
    for run in found.runs:
        own = relative.get(run.name)
        place = _place(run.value)
        rows.append(
            (
                name_cell(run.name),
                Cell(f"{place:,}" if isinstance(place, (int, float)) else place, place),
                Cell(f"{run.ranks:,}", run.ranks),
                _cell(None if run.step_ms is None else run.step_ms.value, "ms"),
                _cell(None if run.work_per_s is None else run.work_per_s.value, ""),
                _cell(None if own is None else own.factor, ""),
                _cell(None if own is None else own.efficiency, "fraction"),
                _cell(None if run.comm_ratio is None else run.comm_ratio.value, "fraction"),
                _cell(run.exposed, "fraction"),
                _cell(run.mfu, "fraction"),
                *[_cell(run.bandwidths.get(name), "") for name in dimensions],
            )
        )
    work = f"{found.work.capitalize()} a second" if found.work else "Throughput"
    heads = (
        Head("Run", words=True), Head(_label(found.axis), words=not found.numeric), Head("Ranks"), Head("Step, ms"),
        Head(work), Head("Scaling factor"), Head("Efficiency"), Head("Communication ratio"), Head("Exposed"),
        Head("MFU"), *[Head(f"GB/s, {page_text(name, _MAX_LABEL)}") for name in dimensions],
    )  # fmt: skip
    empty = [all(row[column].sort is None for row in rows) for column in range(len(heads))]
    kept = [
        column for column, nothing in enumerate(empty) if not nothing and not (column == 2 and found.axis == WORLD_SIZE)
    ]
    return Table(
        "Runs in the order of the axis",
        tuple(heads[column] for column in kept),
        tuple(tuple(row[column] for column in kept) for row in rows),
        "Over the windows that count. Communication ratio and exposed communication are shares of a profiled step, "
        "which is longer than others.",
    )


def _cell(value: float | None, unit: str) -> Cell:
    if value is None:
        return EMPTY
    text = PAGE.percent(value) if unit == "fraction" else PAGE.quantity(value, "").strip()
    return Cell(text, rounded(value))


def _label(axis: str) -> str:
    return page_text({WORLD_SIZE: "ranks"}.get(axis, axis.replace("_", " ")), _MAX_LABEL)
