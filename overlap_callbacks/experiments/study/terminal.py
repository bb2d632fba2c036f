"""The outcome of a study for the terminal, and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN, one_line
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.study import StudyRow, StudyStart
from overlap_callbacks.analysis.study import (
    BATCH,
    CLOCK_CAP,
    GAP,
    LONGER,
    PEAK,
    POWER_CAP,
    PRECISION,
    PUBLISHED,
    RATIO,
    SLOWDOWN,
    STEP,
    last_rows,
    overall,
    pairs,
    power_key,
    value_of,
)
from overlap_callbacks.analysis.trade_off import TradeOffRow
from overlap_callbacks.experiments.study.cap_trade_off import trade_offs
from overlap_callbacks.experiments.study.names import Names
from overlap_callbacks.experiments.study.verdict import TITLES, caveats, failures, on_cpu, verdict, where

_PEAK_W = power_key(Mode.OVERLAPPED, "peak_w")


def study_tables(start: StudyStart, rows: Sequence[StudyRow]) -> RenderableType:
    """The verdict, the tables and the notes."""
    kept = last_rows(start, rows)
    measured = [row for row in kept if row.figures is not None]
    parts: list[RenderableType] = [
        Text(one_line(verdict(start, kept), 1500), style="bold"),
        Text(one_line(where(start, kept), 500)),
    ]
    if measured:
        parts += [Text(), _configurations(start, measured)]
        if len(measured) > 1:
            parts.append(_overall(start, measured))
        for factor in (POWER_CAP, CLOCK_CAP):
            parts += [
                trade_off_table(caps, f"Energy against time of a step: {one_line(name, 120)}")
                for name, caps in trade_offs(measured, Names(start.configurations), factor)
            ]
    parts += [Text(f"Note: {one_line(text, 500)}") for text in caveats(start, kept)]
    parts += [Text(one_line(text, 500)) for text in failures(start, kept)]
    return Group(*parts)


def as_data(start: StudyStart, rows: Sequence[StudyRow]) -> dict[str, Any]:
    """Everything, as plain data: what is not known is null or absent."""
    kept = last_rows(start, rows)
    figures = [figure for key in (LONGER, SLOWDOWN, GAP, RATIO, PEAK) if (figure := overall(kept, key)) is not None]
    return {
        "verdict": verdict(start, kept),
        "notes": caveats(start, kept),
        "start": start,
        "over_configurations": {
            figure.key: {
                "configurations": figure.number,
                "mean": figure.mean,
                "largest": {"configuration": figure.most.configuration, "figure": figure.most.estimate},
                "smallest": {"configuration": figure.least.configuration, "figure": figure.least.estimate},
                "study": None if figure.key not in PUBLISHED else PUBLISHED[figure.key]._asdict(),
            }
            for figure in figures
        },
        "configurations": [msgspec.structs.asdict(row) for row in kept],
        "pairs": {
            factor: [{"base": pair.base, "other": pair.other, "changes": pair.changes} for pair in pairs(kept, factor)]
            for factor in (BATCH, PRECISION, POWER_CAP, CLOCK_CAP)
        },
        "trade_offs": {
            factor: [
                {"configuration": name, "caps": [dataclasses.asdict(row) for row in caps]}
                for name, caps in trade_offs(kept, Names(start.configurations), factor)
            ]
            for factor in (POWER_CAP, CLOCK_CAP)
        },
    }


def _table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))


def _configurations(start: StudyStart, rows: Sequence[StudyRow]) -> Table:
    names = Names(start.configurations)
    table = _table("Below: 95% intervals, within each configuration's one run")
    has_power = any(value_of(row, _PEAK_W) is not None for row in rows)
    table.add_column("Configuration", overflow="fold", min_width=18)
    for head in ("Step", "Sequential", "Compute", "Overlap", *(["Peak"] if has_power else [])):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_row("", "ms", "longer by", "slower by", "ratio", *(["W"] if has_power else []))
    for row in rows:
        step, ratio, peak = (value_of(row, key) for key in (STEP, RATIO, _PEAK_W))
        cells = [
            "" if step is None else PLAIN.quantity(step.value, "ms").removesuffix(" ms"),
            _cell(value_of(row, LONGER)),
            _cell(value_of(row, SLOWDOWN)),
            "" if ratio is None else PLAIN.percent(ratio.value),
            *(["" if peak is None else PLAIN.by_size(peak.value, "W")] if has_power else []),
        ]
        table.add_row(Text(one_line(names.whole(row.configuration), 120)), *cells)
    return table


def _overall(start: StudyStart, rows: Sequence[StudyRow]) -> Table:
    names = Names(start.configurations)
    table = _table("Over all configurations")
    compares = not on_cpu(start)
    for head in ("Figure", "Mean", "Largest", "Of", *(["Study"] if compares else [])):
        is_text = head in ("Figure", "Of")
        table.add_column(head, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for key in (LONGER, SLOWDOWN, PEAK):
        figure = overall(rows, key)
        if figure is None:
            continue
        mean, most = PUBLISHED[key]
        published = f"up to {PLAIN.percent(most, signed=True)}"
        table.add_row(
            TITLES[key],
            _cell(figure.mean),
            _cell(figure.most.estimate),
            Text(one_line(names.whole(figure.most.configuration), 120)),
            *([published if mean is None else f"{PLAIN.percent(mean, signed=True)}\n{published}"] if compares else []),
        )
    return table


def _cell(value: Estimate | None) -> str:
    """A change, and its interval below it."""
    if value is None:
        return ""
    bounds = PLAIN.interval(value, "fraction", signed=True).replace("% to ", " to ")
    shown = PLAIN.percent(value.value, signed=True)
    return f"{shown}\n{bounds}" if bounds else f"{shown}\nno interval"


# -- energy against time


def trade_off_table(rows: Sequence[TradeOffRow], title: str = "Energy against time of a step") -> Table:
    """The rows in their order; those on the Pareto front are marked.

    Args:
        rows: of ``overlap_callbacks.analysis.trade_off.trade_off``.
        title: above the table.
    """
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("")
    for column in ("step ms", "energy J", "power W", "slowdown", "energy saved"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("front")
    for row in rows:
        table.add_row(
            Text(one_line(row.point.name), no_wrap=True, overflow="ellipsis"),
            PLAIN.by_size(row.point.step_ms, "ms"),
            PLAIN.by_size(row.point.energy_j, "J"),
            PLAIN.by_size(row.power_w, "W"),
            PLAIN.percent(row.slowdown, signed=True),
            PLAIN.percent(row.saving, signed=True),
            "yes" if row.on_front else "",
            style="" if row.on_front else "dim",
        )
    table.caption = "front: no other configuration is at least as good in both, and better in one."
    return table
