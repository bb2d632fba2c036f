"""The tables of a study's page."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.formatting import PAGE, page_text
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.analysis.results.study import StudyRow, StudyStart
from overlap_callbacks.analysis.study import (
    ENERGY,
    GAP,
    IDEAL,
    LONGER,
    PEAK,
    POWER,
    PUBLISHED,
    RATIO,
    SEQUENTIAL,
    SLOWDOWN,
    STEP,
    overall,
    power_key,
    value_of,
)
from overlap_callbacks.experiments.study.names import Names, strategy_in_words
from overlap_callbacks.experiments.study.verdict import TITLES
from overlap_callbacks.report.views.elements import (
    EMPTY,
    Cell,
    Facts,
    Table,
    change_cell,
    heads,
    name_cell,
    number_cell,
    without_empty_columns,
)

_LABELS = {**TITLES, GAP: "Gap to ideal", RATIO: "Overlap ratio"}


def overall_table(rows: Sequence[StudyRow], names: Names, *, compares: bool) -> Table | None:
    """Means and extremes over the configurations, beside the study's if it ``compares``; None of one alone."""
    known = [figure for key in (LONGER, SLOWDOWN, GAP, RATIO, PEAK) if (figure := overall(rows, key)) is not None]
    if max([figure.number for figure in known], default=0) < 2:
        return None
    lines = []
    for figure in known:
        published = PUBLISHED.get(figure.key) if compares else None
        signed = figure.key != RATIO
        lines.append(
            (
                Cell(_LABELS[figure.key], _LABELS[figure.key]),
                number_cell(figure.number, 0),
                *_cells(figure.mean, signed=signed),
                *_cells(figure.most.estimate, signed=signed),
                name_cell(names.whole(figure.most.configuration)),
                *_cells(figure.least.estimate, signed=signed),
                name_cell(names.whole(figure.least.configuration)),
                EMPTY if published is None else change_cell(published.mean),
                EMPTY if published is None else change_cell(published.most),
            )
        )
    columns = heads(
        "*Figure", "Configurations", "Mean", "95% interval", "Largest", "95% interval", "*Of", "Smallest",
        "95% interval", "*Of", "Study, mean", "Study, largest",
    )  # fmt: skip
    caption = "The study's figures are of four A100, H100, MI210 or MI250 GPUs." if compares else ""
    return without_empty_columns("Over all configurations", columns, lines, caption)


def configuration_table(rows: Sequence[StudyRow]) -> Table:
    """Every configuration with its figures, or why it failed."""
    lines = []
    for row in rows:
        one, figures = row.configuration, row.figures
        longer, slowdown = value_of(row, LONGER), value_of(row, SLOWDOWN)
        lines.append(
            (
                name_cell(one.model),
                name_cell(strategy_in_words(one.strategy)),
                Cell(str(one.batch), one.batch),
                name_cell(one.precision),
                number_cell(one.power_cap_w, 0),
                number_cell(one.clock_cap_mhz, 0),
                *[_ms(value_of(row, key)) for key in (IDEAL, STEP, SEQUENTIAL)],
                *_cells(longer),
                *_cells(slowdown),
                _cells(value_of(row, RATIO), signed=False)[0],
                *[_number(value_of(row, key), 0) for key in (POWER, power_key(Mode.SEQUENTIAL, "avg_w"))],
                *[_number(value_of(row, power_key(mode, "peak_w")), 0) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL)],
                _number(value_of(row, ENERGY), 1),
                number_cell(None if figures is None else figures.num_windows, 0),
                number_cell(None if figures is None else figures.num_steps, 0),
                number_cell(row.seconds, 0),
                name_cell(row.failure or "no figures") if figures is None else EMPTY,
                EMPTY if row.record is None else name_cell(row.record, row.record.removesuffix(f"/{FILE_NAME}")),
            )
        )
    columns = heads(
        "*Model", "*Strategy", "Batch", "*Precision", "Power cap, W", "Clock cap, MHz", "Ideal, ms", "Overlapped, ms",
        "Sequential, ms", "Sequential longer by", "95% interval", "Compute slowdown", "95% interval", "Overlap ratio",
        "Mean W, overlapped", "sequential", "Highest W, overlapped", "sequential", "J a step", "Windows",
        "Steps of a mode", "Seconds", "*Failed", "*Record",
    )  # fmt: skip
    return without_empty_columns("Every configuration", columns, lines, "Seconds are those of the whole job.")


_KNOWN = {"python": "Python", "threads": "Threads of a rank", "quick": "A quick look", "device": "Ranks are on"}


def setting(start: StudyStart, rows: Sequence[StudyRow]) -> Facts:
    """What ran, with what."""
    models = {row.configuration.model: row.model for row in rows if row.model}
    facts = [
        ("Device", start.device),
        ("Ranks", str(start.ranks)),
        ("Link", start.link),
        ("Measured steps of each mode", str(start.steps)),
        ("Scale of the models", f"{start.scale:g}"),
        *[
            (f"Model {name}", ", ".join([f"{key} {_size(value)}" for key, value in sizes.items()]))
            for name, sizes in models.items()
        ],
        ("Started", start.started_at),
        ("Time in jobs", f"{sum([row.seconds for row in rows]):,.0f} s"),
        *[(_KNOWN.get(name, name), version) for name, version in start.versions.items()],
        *[(_KNOWN.get(name, name), _option(value)) for name, value in start.options.items()],
    ]
    return Facts("Setting", tuple([(page_text(name, 80), page_text(value, 500)) for name, value in facts]))


def _option(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _size(value: float | str) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else value


def _cells(value: Estimate | None, *, signed: bool = True) -> tuple[Cell, Cell]:
    """A share or a change, and its interval."""
    if value is None:
        return EMPTY, EMPTY
    bounds = PAGE.interval(value, "fraction", signed=signed)
    shown = Cell(PAGE.percent(value.value, signed=signed), value.value)
    return shown, Cell(bounds, value.ci_low) if bounds else EMPTY


def _ms(value: Estimate | None) -> Cell:
    return EMPTY if value is None else Cell(PAGE.quantity(value.value, "ms").removesuffix("\xa0ms"), value.value)


def _number(value: Estimate | None, decimals: int) -> Cell:
    return EMPTY if value is None else number_cell(value.value, decimals)
