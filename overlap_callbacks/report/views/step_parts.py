"""Where the steps spend their time, and which rank holds the others up: from the marks of every step."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_callbacks.analysis.formatting import PAGE, count, name_ranks
from overlap_callbacks.analysis.job.frontier import LEAST_LATE, part_name, sentence_of, total
from overlap_callbacks.analysis.results.frontier import StepFrontier
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import EMPTY, Cell, Column, Section, Table, table_of

TITLE = "Where do steps spend their time?"


@dataclass(frozen=True)
class _Row:
    part: str
    mean_ms: float
    slowest_ms: float
    fraction: float
    late: Cell


def step_parts(record: Record) -> list[Section]:
    """A table of the parts of a step; nothing in a record without marks of every step."""
    whole = total(record.frontier)
    if whole is None or not whole.num_steps or not sum(whole.frontier_ns.values()):
        return []
    return [Section(TITLE, sentence_of(whole), [_table(whole)])]


def _table(whole: StepFrontier) -> Table:
    steps, step_ns = whole.num_steps, sum(whole.mean_ns.values()) or 1
    parts = [part for part in whole.frontier_ns if whole.mean_ns.get(part) or whole.frontier_ns[part]]
    rows = [
        _Row(
            part_name(part),
            whole.mean_ns.get(part, 0) / steps / 1e6,
            whole.frontier_ns[part] / steps / 1e6,
            whole.mean_ns.get(part, 0) / step_ns,
            _late(whole, part),
        )
        for part in parts
    ]
    return table_of(
        f"Parts of a step, mean of {count(steps, 'step')} outside windows" + _without(whole),
        rows,
        Column("*Part", lambda row: row.part),
        Column("Time, ms", lambda row: row.mean_ms, 3),
        Column("Share", lambda row: Cell(f"{row.fraction:.1%}", row.fraction)),
        Column("Slowest rank's, ms", lambda row: row.slowest_ms, 3),
        Column("Holds the others up", lambda row: row.late),
        caption="By marks in every step; they add up to it. The slowest rank's: how far a part moves the latest rank "
        "on. Waiting for communication that a part hides, or that is within it, is not told apart.",
        drop_empty=True,
    )


def _without(whole: StepFrontier) -> str:
    return f"; at times without {name_ranks(whole.silent)}" if whole.silent else ""


def _late(whole: StepFrontier, part: str) -> Cell:
    row = next((row for row in whole.held_up if row.part == part and row.rank >= 0), None)
    if row is None or row.ns < LEAST_LATE * sum(whole.mean_ns.values()):
        return EMPTY
    late_ms = row.ns / 1e6 / whole.num_steps
    return Cell(f"rank {row.rank}, {PAGE.quantity(late_ms, 'ms')} a step", late_ms)
