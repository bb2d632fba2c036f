"""The sections of a study on one factor each: its effect with all else equal, and the energy that a cap saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from overlap_callbacks.analysis.formatting import NBSP, PAGE, count, includes_zero, page_sentence, rounded
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.study import (
    BATCH,
    CLOCK_CAP,
    ENERGY,
    LONGER,
    POWER,
    POWER_CAP,
    PRECISION,
    SLOWDOWN,
    STEP,
    Pair,
    StudyRow,
    families,
    pairs,
    value_of,
)
from overlap_callbacks.analysis.trade_off import TradeOffPoint, TradeOffRow, trade_off
from overlap_callbacks.experiments.study.charts import by_factor
from overlap_callbacks.experiments.study.verdict import Names, factor_in_words
from overlap_callbacks.report.views.elements import (
    EMPTY,
    Block,
    Cell,
    Column,
    Point,
    Section,
    Table,
    estimate_cells,
    interval_columns,
    scatter,
    table_of,
)

_FACTORS = {BATCH: "the batch", PRECISION: "the precision", POWER_CAP: "the power cap", CLOCK_CAP: "the clock's cap"}
CAPS = (POWER_CAP, CLOCK_CAP)
# Figures charted in a section: key, title, and label of the axis.
_CHARTS = (
    (SLOWDOWN, "Compute slowdown", "slower with overlap, %"),
    (STEP, "Step time with overlap", "change of the step time, %"),
    (ENERGY, "Energy of a step with overlap", "change of the energy of a step, %"),
)


def factor_sections(rows: Sequence[StudyRow], names: Names) -> list[Section]:
    """A section for each factor for which the study has pairs: caps, precisions, tensor cores."""
    cores = [row for row in rows if row.configuration.precision in ("fp32", "tf32")]
    asked = (
        ("What does a power cap do?", rows, POWER_CAP),
        ("What does a cap on the clock do?", rows, CLOCK_CAP),
        ("Does the precision matter?", _types(rows), PRECISION),
        ("What do tensor cores change (TF32 against FP32)?", cores, PRECISION),
    )
    return [_section(title, of, names, factor) for title, of, factor in asked if pairs(of, factor)]


def missing_factors(rows: Sequence[StudyRow], *, on_cpu: bool) -> list[tuple[str, str]]:
    """The study's factors that these rows do not cover: name and what to do."""
    lacking = []
    if not pairs(rows, POWER_CAP):
        how = "A CPU cannot be capped here." if on_cpu else "Run, as root: overlap study --power-cap none,500,400"
        lacking.append(("Power caps", how))
    if not pairs(_types(rows), PRECISION):
        kinds = "fp32,bf16" if on_cpu else "fp32,fp16,bf16"
        lacking.append(("Precisions", f"Run: overlap study --precision {kinds}"))
    if not {"fp32", "tf32"} <= _precisions(rows):
        how = "A CPU has none." if on_cpu else "Run: overlap study --precision fp32,tf32"
        lacking.append(("Tensor cores", how))
    return lacking


def _types(rows: Sequence[StudyRow]) -> list[StudyRow]:
    """The rows without TF32 if there is FP32 too: that compares tensor cores, and has its own section."""
    both = {"fp32", "tf32"} <= _precisions(rows)
    return [row for row in rows if not (both and row.configuration.precision == "tf32")]


def _precisions(rows: Sequence[StudyRow]) -> set[str]:
    return {row.configuration.precision for row in rows if row.figures is not None}


def _section(title: str, rows: Sequence[StudyRow], names: Names, factor: str) -> Section:
    charts = [chart for one in _CHARTS if (chart := by_factor(rows, names, factor, *one)) is not None]
    if len(charts) == 3:  # in pairs; a pair alone would look different from the other sections
        charts[1:] = [replace(chart, narrow=True) for chart in charts[1:]]
    compared = pairs(rows, factor)
    blocks: list[Block] = [*charts, pair_table(compared, names, factor)]
    if factor in CAPS:
        blocks += _trade_off_blocks(rows, names, factor)
    return Section(title, pair_answer(compared, names, factor), blocks)


# -- pairs that differ in one factor


def pair_answer(compared: Sequence[Pair], names: Names, factor: str) -> str:
    """In how many pairs the slowdown changes beyond noise, and where most; empty if none has an interval."""
    known = [(pair, pair.changes[SLOWDOWN]) for pair in compared if SLOWDOWN in pair.changes]
    bounded = [(pair, change) for pair, change in known if change.ci_low is not None]
    if not bounded:
        return ""
    sure = [(pair, change) for pair, change in bounded if not includes_zero(change)]
    if not sure:
        if len(known) == 1:
            return f"One pair differs in {_FACTORS[factor]} only: a change of its compute slowdown is inconclusive."
        return (
            f"{count(len(known), 'pair')} differ in {_FACTORS[factor]} only: every change of the compute "
            "slowdown is inconclusive."
        )
    more, less = sum([change.value > 0 for _, change in sure]), sum([change.value < 0 for _, change in sure])
    parts = [f"{word} in {number}" for word, number in (("higher", more), ("lower", less)) if number]
    pair, change = max(sure, key=lambda one: abs(one[1].value))
    bases = {factor_in_words(one.base, factor) for one in compared}
    against = bases.pop() if len(bases) == 1 else "the first of each kind"
    value, bounds = (cell.text for cell in _points(change))
    return page_sentence(
        f"Against {against} the compute slowdown is clearly {' and '.join(parts)} of {count(len(known), 'pair')}. It "
        f"changes most from {factor_in_words(pair.base, factor)} to {factor_in_words(pair.other, factor)}: "
        f"by {value} (95% interval {bounds}), {names.whole(pair.base, without=factor)}."
    )


def pair_table(compared: Sequence[Pair], names: Names, factor: str) -> Table:
    """The changes from the first of each group to the others."""

    def points(key: str) -> Callable[[Pair], tuple[Cell, Cell]]:
        return lambda pair: _points(pair.changes.get(key))

    def size(key: str) -> Callable[[Pair], tuple[Cell, Cell]]:
        # A larger batch does more work: its step time and energy do not show a cost.
        return lambda pair: estimate_cells(None if factor == BATCH else pair.changes.get(key), "fraction", signed=True)

    return table_of(
        f"Pairs that differ in {_FACTORS[factor]} only",
        compared,
        Column("*Configuration", lambda pair: names.whole(pair.base, without=factor)),
        Column("*From", lambda pair: factor_in_words(pair.base, factor)),
        Column("*To", lambda pair: factor_in_words(pair.other, factor)),
        *interval_columns("Compute slowdown", points(SLOWDOWN)),
        *interval_columns("Sequential longer by", points(LONGER)),
        *interval_columns("Step time", size(STEP)),
        *interval_columns("Mean power", size(POWER)),
        *interval_columns("Energy of a step", size(ENERGY)),
        caption="Changes: pp are percentage points. A change is clear where its interval excludes zero; "
        "of twenty comparisons, chance alone puts about one there.",
        drop_empty=True,
    )


def _points(change: Estimate | None) -> tuple[Cell, Cell]:
    """The change of a share, in percentage points, and its interval."""
    value, bounds = estimate_cells(change, "fraction", signed=True)
    shown = bounds.text.replace("% to", " to").replace("%", f"{NBSP}pp")
    return replace(value, text=value.text.replace("%", f"{NBSP}pp")), replace(bounds, text=shown)


# -- energy against time under caps


def trade_offs(rows: Sequence[StudyRow], names: Names, factor: str) -> list[tuple[str, list[TradeOffRow]]]:
    """For each job trained under several caps: its name, and step time and energy under each cap."""
    found = []
    for family in families(rows, factor):
        points = [point for row in family if (point := _point(row, factor)) is not None]
        if len(points) > 1:
            found.append((names.whole(family[0].configuration, without=factor), trade_off(points, points[0])))
    return found


def trade_off_data(rows: Sequence[StudyRow], names: Names) -> dict[str, list[dict[str, Any]]]:
    """The same for each kind of cap, as plain data."""
    return {
        factor: [
            {"configuration": name, "caps": [asdict(row) for row in caps]}
            for name, caps in trade_offs(rows, names, factor)
        ]
        for factor in CAPS
    }


def _point(row: StudyRow, factor: str) -> TradeOffPoint | None:
    step, energy = value_of(row, STEP), value_of(row, ENERGY)
    if step is None or energy is None or step.value <= 0 or energy.value <= 0:
        return None
    return TradeOffPoint(factor_in_words(row.configuration, factor), step.value, energy.value)


def _trade_off_blocks(rows: Sequence[StudyRow], names: Names, factor: str) -> list[Block]:
    """A chart of all jobs and a table; nothing without power."""
    jobs = trade_offs(rows, names, factor)
    if not jobs:
        return []
    series: dict[str, list[Point]] = {
        name: [(f"{name}, {row.point.name}", rounded(row.slowdown), -row.saving) for row in caps] for name, caps in jobs
    }
    labels = ("change of the step time", "change of energy")
    caption = "Each point is a cap, against the first of its job at 0, 0. Lower and further left is better."
    return [scatter("Energy of a step against its time", series, labels, caption), trade_off_table(jobs)]


def trade_off_table(jobs: Sequence[tuple[str, Sequence[TradeOffRow]]]) -> Table:
    """Step time and energy under each cap, with the Pareto front marked."""
    return table_of(
        "Energy against time",
        [(name, row) for name, caps in jobs for row in caps],
        Column("*Configuration", lambda item: item[0]),
        Column("*Cap", lambda item: item[1].point.name),
        Column("Step, ms", lambda item: item[1].point.step_ms),
        Column("Energy of a step, J", lambda item: item[1].point.energy_j),
        Column("Mean power, W", lambda item: Cell(PAGE.by_size(item[1].power_w, "W"), item[1].power_w)),
        Column("Longer", lambda item: item[1].slowdown, "change"),
        Column("Saved", lambda item: item[1].saving, "change"),
        Column("*Front", lambda item: Cell("yes", "yes") if item[1].on_front else EMPTY),
        caption="Mean values of one run each, with overlap. Front (Pareto): no other cap is at least as good in both, "
        "and better in one.",
        first=True,
    )
