"""The parts of a study's page on one factor each: what changes where nothing else does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from overlap_callbacks.analysis.formatting import NBSP, PAGE, count, may_be_chance, page_sentence
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.study import StudyRow
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
    pairs,
)
from overlap_callbacks.experiments.study.cap_trade_off import trade_off_blocks
from overlap_callbacks.experiments.study.charts import by_factor
from overlap_callbacks.experiments.study.names import Names, factor_in_words
from overlap_callbacks.report.views.elements import (
    EMPTY,
    Block,
    Cell,
    Section,
    Table,
    heads,
    without_empty_columns,
)

_STEP_CHART = (STEP, "Step time with overlap", "change of the step time, %")
_SLOWDOWN_CHART = (SLOWDOWN, "Compute slowdown", "slower with overlap, %")
_ENERGY_CHART = (ENERGY, "Energy of a step with overlap", "change of the energy of a step, %")


def factor_sections(rows: Sequence[StudyRow], names: Names) -> list[Section]:
    """A part for each factor of which the study has pairs: caps, precisions, tensor cores."""
    cores = [row for row in rows if row.configuration.precision in ("fp32", "tf32")]
    asked = (
        ("What does a power cap do?", rows, POWER_CAP),
        ("What does a cap on the clock do?", rows, CLOCK_CAP),
        ("Does the precision matter?", _types(rows), PRECISION),
        ("What do tensor cores change (TF32 against FP32)?", cores, PRECISION),
    )
    return [_section(title, of, names, factor, pairs(of, factor)) for title, of, factor in asked if pairs(of, factor)]


def missing_factors(rows: Sequence[StudyRow], *, on_cpu: bool) -> list[tuple[str, str]]:
    """Of each of the study's factors that these rows cannot tell of, its name and what to do."""
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
    """The rows without TF32 where it stands against FP32: that is about tensor cores, and has a part of its own."""
    both = {"fp32", "tf32"} <= _precisions(rows)
    return [row for row in rows if not (both and row.configuration.precision == "tf32")]


def _precisions(rows: Sequence[StudyRow]) -> set[str]:
    return {row.configuration.precision for row in rows if row.figures is not None}


def batches(rows: Sequence[StudyRow], names: Names) -> list[Block]:
    """What the batch changes, as a table; nothing where there is one batch only."""
    compared = pairs(rows, BATCH)
    return [dataclasses.replace(_table(compared, names, BATCH), folded=True)] if compared else []


def batch_answer(rows: Sequence[StudyRow], names: Names) -> str:
    """What the batch does to the compute slowdown; empty where there is one batch only."""
    return _answer(pairs(rows, BATCH), names, BATCH)


def _section(title: str, rows: Sequence[StudyRow], names: Names, factor: str, compared: Sequence[Pair]) -> Section:
    charts = [
        chart
        for key, name, x_label in (_SLOWDOWN_CHART, _STEP_CHART, _ENERGY_CHART)
        if (chart := by_factor(rows, names, factor, key, name, x_label)) is not None
    ]
    if len(charts) == 3:  # two side by side; two alone would differ from the other parts
        charts[1:] = [dataclasses.replace(chart, narrow=True) for chart in charts[1:]]
    blocks: list[Block] = [*charts, _table(compared, names, factor)]
    if factor in (POWER_CAP, CLOCK_CAP):
        blocks += trade_off_blocks(rows, names, factor)
    return Section(title, _answer(compared, names, factor), blocks)


def _answer(compared: Sequence[Pair], names: Names, factor: str) -> str:
    """In how many pairs the slowdown changes beyond chance, and where most."""
    known = [(pair, pair.changes[SLOWDOWN]) for pair in compared if SLOWDOWN in pair.changes]
    bounded = [(pair, change) for pair, change in known if change.ci_low is not None]
    if not bounded:
        return ""
    sure = [(pair, change) for pair, change in bounded if not may_be_chance(change)]
    if not sure:
        if len(known) == 1:
            return f"One pair differs in {_FACTORS[factor]} only: a change of its compute slowdown may be chance."
        return (
            f"{count(len(known), 'pair')} differ in {_FACTORS[factor]} only: in none can a change of the compute "
            "slowdown be told from chance."
        )
    more, less = sum([change.value > 0 for _, change in sure]), sum([change.value < 0 for _, change in sure])
    parts = [f"{word} in {number}" for word, number in (("higher", more), ("lower", less)) if number]
    pair, change = max(sure, key=lambda one: abs(one[1].value))
    bases = {factor_in_words(one.base, factor) for one in compared}
    against = bases.pop() if len(bases) == 1 else "the first of each kind"
    return page_sentence(
        f"Against {against} the compute slowdown is {' and '.join(parts)} of {count(len(known), 'pair')}, beyond "
        f"chance. It changes most from {factor_in_words(pair.base, factor)} to {factor_in_words(pair.other, factor)}: "
        f"by {_points(change)} (95% interval {_points_interval(change)}), {names.whole(pair.base, without=factor)}."
    )


def _table(compared: Sequence[Pair], names: Names, factor: str) -> Table:
    rows = []
    for pair in compared:
        changes = [pair.changes.get(key) for key in (SLOWDOWN, LONGER)]
        # A larger batch has more to do: its step time and energy say nothing of what it costs.
        sizes = [None if factor == BATCH else pair.changes.get(key) for key in (STEP, POWER, ENERGY)]
        rows.append(
            (
                _words(names.whole(pair.base, without=factor)),
                _words(factor_in_words(pair.base, factor)),
                _words(factor_in_words(pair.other, factor)),
                *[cell for change in changes for cell in _cells(change, points=True)],
                *[cell for change in sizes for cell in _cells(change, points=False)],
            )
        )
    columns = heads(
        "*Configuration", "*From", "*To", "Compute slowdown", "95% interval", "Sequential longer by", "95% interval",
        "Step time", "95% interval", "Mean power", "95% interval", "Energy of a step", "95% interval",
    )  # fmt: skip
    caption = (
        "Changes: pp are percentage points. A change is beyond chance where its interval does not hold zero; of twenty "
        "comparisons, chance alone puts about one there."
    )
    return without_empty_columns(f"Pairs that differ in {_FACTORS[factor]} only", columns, rows, caption)


_FACTORS = {BATCH: "the batch", PRECISION: "the precision", POWER_CAP: "the power cap", CLOCK_CAP: "the clock's cap"}


def _words(text: str) -> Cell:
    return Cell(text, text.lower())


def _cells(change: Estimate | None, *, points: bool) -> tuple[Cell, Cell]:
    if change is None:
        return EMPTY, EMPTY
    shown = _points(change) if points else PAGE.percent(change.value, signed=True)
    bounds = _points_interval(change) if points else PAGE.interval(change, "fraction", signed=True)
    return Cell(shown, change.value), Cell(bounds, change.ci_low) if bounds else EMPTY


def _points(change: Estimate) -> str:
    return PAGE.percent(change.value, signed=True).replace("%", f"{NBSP}pp")


def _points_interval(change: Estimate) -> str:
    return PAGE.interval(change, "fraction", signed=True).replace("% to", " to").replace("%", f"{NBSP}pp")
