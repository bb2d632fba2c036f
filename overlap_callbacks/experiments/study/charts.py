"""The charts of a study: a row or a point for each configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from overlap_callbacks.analysis.formatting import PAGE, rounded
from overlap_callbacks.analysis.results.catalogue import figure_with_key
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.study import (
    GAP,
    LONGER,
    PUBLISHED,
    RATIO,
    SLOWDOWN,
    STEP,
    StudyRow,
    families,
    pair_of,
    power_key,
    value_of,
)
from overlap_callbacks.experiments.study.verdict import Names, factor_in_words, strategy_in_words
from overlap_callbacks.report.views.elements import EMPTY_LEGEND, Chart, Point, bar, scatter

# A chart with more rows is unreadable; the table has all.
MAX_ROWS = 60

Legend = tuple[tuple[str, str], ...]
# A point's name, its colour, whether it is hollow, and its figure.
Mark = tuple[str, str, bool, Estimate | None]

_NO_CHANGE = Estimate(0.0, None, None, 0, 0)


def of_figure(rows: Sequence[StudyRow], names: Names, key: str, title: str, x_label: str, caption: str) -> Chart | None:
    """One figure of each configuration, with the study's published values."""

    def points(row: StudyRow) -> list[Mark]:
        return [(title.lower(), "overlapped", False, value_of(row, key))]

    return row_chart(title, _groups(rows, names, points, key), x_label, caption, limits=_published(key))


def savings(rows: Sequence[StudyRow], names: Names) -> Chart | None:
    """Ideal and sequential step time of each configuration, relative to its overlapped step."""

    def points(row: StudyRow) -> list[Mark]:
        return [
            ("ideal", "ideal", False, _ideal(value_of(row, GAP))),
            ("sequential", "sequential", False, value_of(row, LONGER)),
        ]

    return row_chart(
        "Step time against the overlapped step",
        _groups(rows, names, points, STEP),
        "step time against the overlapped step, %",
        "At zero: the overlapped step, whose time is at the right. Ideal: overlap without contention (equation 4).",
        limits=_published(LONGER),
        legend=(("ideal", "ideal"), ("sequential", "sequential")),
    )


def _ideal(gap: Estimate | None) -> Estimate | None:
    """Ideal over overlapped step time, minus one, from the gap to ideal (overlapped over ideal, minus one)."""
    if gap is None or gap.value <= -1:
        return None
    low, high = (None if bound is None or bound <= -1 else 1 / (1 + bound) - 1 for bound in (gap.ci_high, gap.ci_low))
    return Estimate(1 / (1 + gap.value) - 1, low, high, gap.num_steps, gap.num_blocks)


def power(rows: Sequence[StudyRow], names: Names) -> Chart | None:
    """Mean and peak power of each mode: as a share of the device's limit, else in watts."""
    shares = ("avg_tdp_fraction", "peak_tdp_fraction")
    is_share = any(value_of(row, power_key(Mode.OVERLAPPED, shares[0])) is not None for row in rows)
    mean, peak = shares if is_share else ("avg_w", "peak_w")

    def points(row: StudyRow) -> list[Mark]:
        return [
            (f"{mode.value}, {what}", mode.value, what == "highest", value_of(row, power_key(mode, name)))
            for what, name in (("mean", mean), ("highest", peak))
            for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED)
        ]

    return row_chart(
        "Power of a device",
        _groups(rows, names, points, power_key(Mode.OVERLAPPED, mean), signed=False),
        "% of the device's power limit (TDP)" if is_share else "W",
        "Filled: mean. Hollow: highest of any device. At the right: the mean with overlap. The axis does not start at "
        "zero.",
        limits=[["TDP", 1.0]] if is_share else [],
        legend=(("overlapped", "overlapped"), ("sequential", "sequential")),
        unit="fraction" if is_share else "W",
        zero=False,
    )


def by_factor(rows: Sequence[StudyRow], names: Names, factor: str, key: str, title: str, x_label: str) -> Chart | None:
    """A figure of configurations that differ in one factor only, grouped by the rest.

    For a time or an energy the chart shows its change from the first of each group.
    """
    is_change = figure_with_key(key).unit != "fraction"
    groups = []
    for family in families(rows, factor):
        drawn = []
        for row in family:
            value = value_of(row, key)
            if is_change:
                value = _NO_CHANGE if row is family[0] and value else pair_of(family[0], row).changes.get(key)
            label = factor_in_words(row.configuration, factor)
            drawn.append(_row(label, [(title.lower(), "overlapped", False, value)], value, "fraction"))
        groups.append({"name": names.whole(family[0].configuration, without=factor), "rows": drawn})
    caption = "Against the first of each kind, which is at zero." if is_change else ""
    return row_chart(title, groups, x_label, caption, limits=_published(key))


# -- rows of points


def _groups(
    rows: Sequence[StudyRow],
    names: Names,
    points: Callable[[StudyRow], list[Mark]],
    noted: str,
    *,
    signed: bool = True,
) -> list[dict[str, Any]]:
    """Rows under the names of their jobs; without headings if each job has one row."""
    jobs: dict[str, list[StudyRow]] = {}
    for row in rows:
        if row.figures is not None:
            jobs.setdefault(names.job(row.configuration), []).append(row)
    has_headings = any(len(of_job) > 1 for of_job in jobs.values())

    def drawn(row: StudyRow) -> dict[str, Any]:
        label = (names.setting if has_headings else names.whole)(row.configuration)
        return _row(label, points(row), value_of(row, noted), figure_with_key(noted).unit, signed=signed)

    if has_headings:
        return [{"name": job, "rows": [drawn(row) for row in of_job]} for job, of_job in jobs.items()]
    return [{"name": "", "rows": [drawn(row) for of_job in jobs.values() for row in of_job]}]


def _row(
    label: str, points: Sequence[Mark], noted: Estimate | None, unit: str, *, signed: bool = True
) -> dict[str, Any]:
    return {
        "label": label,
        "note": "" if noted is None else PAGE.quantity(noted.value, unit, signed=signed and unit == "fraction"),
        "points": [
            {
                "name": name,
                "color": color,
                "hollow": hollow,
                **bar(estimate),
            }
            for name, color, hollow, estimate in points
            if estimate is not None
        ],
    }


def _published(key: str) -> list[list[Any]]:
    """The published values of a figure, as reference lines."""
    found = PUBLISHED.get(key)
    if found is None:
        return []
    mean = [] if found.mean is None else [["study, mean", found.mean]]
    return [*mean, ["study, most", found.most]]


def row_chart(
    title: str,
    groups: Sequence[dict[str, Any]],
    x_label: str,
    caption: str,
    *,
    limits: Sequence[list[Any]] = (),
    legend: Legend = EMPTY_LEGEND,
    unit: str = "fraction",
    zero: bool = True,
) -> Chart | None:
    """Rows of points under headings; None without any point.

    Args:
        title: of the chart.
        groups: their names, and the rows of each. Rows without points are omitted.
        x_label: meaning and unit of the points.
        caption: how to read it.
        limits: names and values of reference lines, smallest first.
        legend: names and colours.
        unit: of the points.
        zero: whether the axis includes zero.
    """
    drawn, total = [], 0
    for group in groups:
        rows = [row for row in group["rows"] if row["points"]]
        if rows[: max(0, MAX_ROWS - total)]:
            drawn.append({**group, "rows": rows[: MAX_ROWS - total]})
        total += len(rows)
    if not total:
        return None
    sentences = [caption]
    study = [
        f"{name.removeprefix('study, ')} {PAGE.percent(value)}" for name, value in limits if name.startswith("study")
    ]
    if study:
        sentences.append(f"Dashed: the study's GPUs, {' and '.join(study)}.")
    if any(point["low"] is not None for group in drawn for row in group["rows"] for point in row["points"]):
        sentences.append("Lines through points are 95% intervals; one that reaches the edge goes on beyond it.")
    if total > MAX_ROWS:
        sentences.append(f"The first {MAX_ROWS} of {total} configurations; the table has all.")
    data = {"groups": drawn, "unit": unit, "x_label": x_label, "limits": list(limits), "zero": zero}
    return Chart("rows", title, data, " ".join(sentences), legend)


# -- one figure against another


def against_ratio(rows: Sequence[StudyRow], names: Names) -> Chart | None:
    """Compute slowdown against the overlap ratio, one colour per strategy."""
    by_strategy: dict[str, list[Point]] = {}
    for row in rows:
        ratio, slowdown = value_of(row, RATIO), value_of(row, SLOWDOWN)
        if ratio is not None and slowdown is not None:
            strategy = strategy_in_words(row.configuration.strategy)
            point = (names.whole(row.configuration), rounded(ratio.value), slowdown)
            by_strategy.setdefault(strategy, []).append(point)
    if sum(map(len, by_strategy.values())) < 2:
        return None
    caption = (
        "The overlap ratio is the share of compute time in which communication is in flight (equation 2). Dashed: the "
        "mean slowdown of the study. Whiskers are 95% intervals."
    )
    limits = [["study, mean", PUBLISHED[SLOWDOWN].mean]]
    title = "Compute slowdown against overlap ratio"
    return scatter(title, by_strategy, ("overlap ratio", "compute slowdown"), caption, limits)
