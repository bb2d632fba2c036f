"""What each arm changes: the job with one thing turned, against the job as configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from overlap_callbacks.analysis.arms import ArmSummary, arm_summaries
from overlap_callbacks.analysis.formatting import PAGE, may_be_chance, page_text
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.report.views.elements import Block, Cell, Head, Note, Section, Table
from overlap_callbacks.report.views.run import RunView

_MAX_LENGTH = 1000


def arms(view: RunView) -> list[Section]:
    """A table of the arms; nothing in a run without any but sequential steps."""
    rows = arm_summaries(view.summary, view.record.arms)
    if not rows:
        return []
    blocks: list[Block] = [_table(rows), *_further(rows)]
    blocks += [Note(f"{row.arm.name} {RESULTS_DIFFER}", warning=True) for row in rows if not row.arm.equal_results]
    blocks += [
        Note(page_text(f"{row.arm.name}: {problem}", _MAX_LENGTH), first=True)
        for row in rows
        for problem in row.problems
    ]
    return [Section("What would a switch change?", _answer(rows), blocks)]


def _answer(rows: list[ArmSummary]) -> str:
    best = next((row for row in rows if row.speedup is not None), None)
    if best is None or best.speedup is None:
        return "No window of an arm counts."
    if best.speedup.value > 0 and best.speedup.ci_low is not None and not may_be_chance(best.speedup):
        return f"{best.arm.name} is the best of them: {best.verdict()}."
    if any(row.speedup is None or row.speedup.ci_low is None or may_be_chance(row.speedup) for row in rows):
        return "None of them is known to make steps shorter: where one seems to, that is within noise or inconclusive."
    return "None of them makes steps shorter."


def _table(rows: list[ArmSummary]) -> Table:
    columns = (
        Head("arm", words=True, names=True), Head("speed-up"), Head("95% interval"), Head("step"), Head("windows"),
        Head("", words=True),
    )  # fmt: skip
    cells = []
    for row in rows:
        speedup, step = row.speedup, row.figures.get("step_ms")
        cells.append(
            (
                Cell(row.arm.name, row.arm.name),
                Cell("" if speedup is None else PAGE.percent(speedup.value, signed=True), _sort(speedup)),
                Cell("" if speedup is None else PAGE.interval(speedup, "fraction", signed=True), _sort(speedup)),
                Cell("" if step is None else PAGE.quantity(step.value, "ms"), _sort(step)),
                Cell(str(row.num_windows), row.num_windows),
                Cell(row.verdict(), row.verdict()),
            )
        )
    title = "The job with one thing turned, and as configured"
    return Table(title, columns, tuple(cells), SPEEDUP_IN_WORDS, first=True)


def _further(rows: list[ArmSummary]) -> list[Table]:
    """Compute, exposed communication, power and memory, where they were measured."""
    found = [column for column in OPTIONAL_ARM_COLUMNS if any(column.of(row) for row in rows)]
    if not found:
        return []
    cells = tuple(
        (Cell(row.arm.name, row.arm.name), *[Cell(column.of(row), column.values(row)[0]) for column in found])
        for row in rows
    )
    columns = (Head("arm", words=True, names=True), *[Head(column.title) for column in found])
    title = "With the arm, and as configured (in brackets)"
    return [Table(title, columns, cells, folded=len(rows) > 8, first=True)]


def _sort(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


# -- columns


SPEEDUP_IN_WORDS = "Speed-up: step time as configured over that with the arm, less one. Above zero the arm wins."
RESULTS_DIFFER = "changes results: losses and weights are not those of the job without it."


@dataclass(frozen=True)
class ArmColumn:
    """A column that is shown where any arm has it.

    Attributes:
        title: its head.
        values: with the arm and as configured; None where not measured.
        unit: of both.
    """

    title: str
    values: Callable[[ArmSummary], tuple[float | None, float | None]]
    unit: str

    def of(self, row: ArmSummary) -> str:
        """Both, e.g. ``21.0 (24.0) W``; empty without a value with the arm."""
        value, configured = self.values(row)
        if value is None:
            return ""
        shown = PAGE.quantity(value, self.unit)
        if configured is None:
            return shown
        number, _, unit = shown.partition(PAGE.space)
        before = PAGE.quantity(configured, self.unit).partition(PAGE.space)[0]
        return f"{number} ({before}){PAGE.space}{unit}" if unit else f"{number} ({before})"


def _figures(name: str) -> Callable[[ArmSummary], tuple[float | None, float | None]]:
    def values(row: ArmSummary) -> tuple[float | None, float | None]:
        pair = row.figures.get(name), row.figures.get(f"configured_{name}")
        return pair[0].value if pair[0] else None, pair[1].value if pair[1] else None

    return values


OPTIONAL_ARM_COLUMNS = (
    ArmColumn("compute", _figures("compute_ms"), "ms"),
    ArmColumn("exposed comm.", _figures("exposed_comm_ms"), "ms"),
    ArmColumn("power", lambda row: (row.avg_w, row.configured_avg_w), "W"),
    ArmColumn("energy of a step", lambda row: (row.energy_per_step_j, row.configured_energy_per_step_j), "J"),
    ArmColumn(
        "peak memory",
        lambda row: (_gib(row.peak_memory_bytes), _gib(row.configured_peak_memory_bytes)),
        "GiB",
    ),
)


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / 2**30
