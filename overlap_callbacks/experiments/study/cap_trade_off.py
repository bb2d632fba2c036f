"""Energy against time of the caps of a study: for the page, and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap_callbacks.analysis.formatting import PAGE, rounded
from overlap_callbacks.analysis.results.study import StudyRow
from overlap_callbacks.analysis.study import ENERGY, STEP, families, value_of
from overlap_callbacks.analysis.trade_off import TradeOffPoint, TradeOffRow, trade_off
from overlap_callbacks.experiments.study.names import Names, factor_in_words
from overlap_callbacks.report.views.elements import Block, Cell, Chart, Table, heads
from overlap_callbacks.report.views.trends import RUN_COLORS

_CAPTION = (
    "Mean values of one run each, with overlap. Front (Pareto): no other cap is at least as good in both, and better "
    "in one."
)


def trade_offs(rows: Sequence[StudyRow], names: Names, factor: str) -> list[tuple[str, list[TradeOffRow]]]:
    """For each job that was trained under several caps: its name, and step time and energy of each cap.

    Args:
        rows: one of each configuration.
        names: of the study's configurations.
        factor: the field of the cap.
    """
    found = []
    for family in families(rows, factor):
        points = [point for row in family if (point := _point(row, factor)) is not None]
        if len(points) > 1:
            found.append((names.whole(family[0].configuration, without=factor), trade_off(points, points[0])))
    return found


def _point(row: StudyRow, factor: str) -> TradeOffPoint | None:
    step, energy = value_of(row, STEP), value_of(row, ENERGY)
    if step is None or energy is None or step.value <= 0 or energy.value <= 0:
        return None
    return TradeOffPoint(factor_in_words(row.configuration, factor), step.value, energy.value)


def trade_off_blocks(rows: Sequence[StudyRow], names: Names, factor: str) -> list[Block]:
    """A chart of all jobs and a table; nothing where there is no power."""
    jobs = trade_offs(rows, names, factor)
    if not jobs:
        return []
    series: list[dict[str, Any]] = [
        {
            "name": name,
            "color": RUN_COLORS[place % len(RUN_COLORS)],
            "points": [
                [f"{name}, {row.point.name}", rounded(row.slowdown), rounded(-row.saving), None, None] for row in caps
            ],
        }
        for place, (name, caps) in enumerate(jobs)
    ]
    data = {"series": series, "x_label": "change of the step time", "y_label": "change of energy", "limits": []}
    caption = "Each point is a cap, against the first of its job at 0, 0. Lower and further left is better."
    legend = tuple([(str(line["name"]), str(line["color"])) for line in series])
    return [Chart("scatter", "Energy of a step against its time", data, caption, legend), _table(jobs)]


def _table(jobs: Sequence[tuple[str, Sequence[TradeOffRow]]]) -> Table:
    columns = heads("*Configuration", "*Cap", "Step", "Energy of a step", "Mean power", "Longer", "Saved", "*Front")
    rows = [
        (
            Cell(name, name.lower()),
            Cell(row.point.name, row.point.name),
            Cell(PAGE.quantity(row.point.step_ms, "ms"), row.point.step_ms),
            Cell(PAGE.quantity(row.point.energy_j, "J"), row.point.energy_j),
            Cell(PAGE.quantity(row.power_w, "W"), row.power_w),
            Cell(PAGE.percent(row.slowdown, signed=True), row.slowdown),
            Cell(PAGE.percent(row.saving, signed=True), row.saving),
            Cell("yes" if row.on_front else "", "yes" if row.on_front else ""),
        )
        for name, caps in jobs
        for row in caps
    ]
    return Table("Energy against time", columns, tuple(rows), _CAPTION)
