"""The effect of each arm: the job with one switch turned, compared with the job as configured."""

from __future__ import annotations

from overlap_callbacks.analysis.arms import ArmSummary, arm_summaries, trade_offs
from overlap_callbacks.analysis.decision_words import decision_in_words, why_in_words
from overlap_callbacks.analysis.formatting import PAGE, includes_zero, page_sentence, page_text, rounded
from overlap_callbacks.analysis.results.decision import Decision
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.sums import grouped
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import (
    EMPTY,
    RUN_COLORS,
    Block,
    Cell,
    Chart,
    Column,
    Note,
    Point,
    Section,
    Table,
    line,
    scatter,
    table_of,
)

_MAX_LENGTH = 1000


def arms(record: Record) -> list[Section]:
    """A table of the arms; nothing if the run only has sequential steps."""
    rows = arm_summaries(record.summary, record.arms)
    if not rows:
        return []
    blocks: list[Block] = [_table(rows), *_curves(rows), *_left_out(record.decision), *_further(rows), *_energy(rows)]
    blocks += [
        Note(f"{row.arm.name} changes results: losses and weights are not those of the job without it.", warning=True)
        for row in rows
        if not row.arm.equal_results
    ]
    blocks += [Note(page_text(f"{row.arm.name}: {problem}", _MAX_LENGTH)) for row in rows for problem in row.problems]
    answer = _answer(rows) if record.decision is None else page_sentence(decision_in_words(record.decision))
    return [Section("What would a switch change?", answer, blocks)]


def _answer(rows: list[ArmSummary]) -> str:
    best = next((row for row in rows if row.speedup is not None), None)
    if best is None or best.speedup is None:
        return "No window of an arm counts."
    if best.control:
        return f"{best.verdict()}."
    if best.speedup.value > 0 and best.speedup.ci_low is not None and not includes_zero(best.speedup):
        which = "" if best.arm.equal_results else ", which changes results,"
        return f"{best.arm.name}{which} is the best arm: {best.verdict()}."
    if any(row.speedup is None or row.speedup.ci_low is None or includes_zero(row.speedup) for row in rows):
        return "No arm is known to make steps shorter: where one seems to, that is within noise or inconclusive."
    return "No arm makes steps shorter."


def _table(rows: list[ArmSummary]) -> Table:
    return table_of(
        "The job with one thing turned, and as configured",
        rows,
        Column("~arm", lambda row: row.arm.name),
        Column("setting", lambda row: _setting(row.arm.setting)),
        Column("speed-up", lambda row: row.speedup, "change"),
        Column("_95% interval", lambda row: _interval(row.speedup)),
        Column("step", lambda row: _step(row.figures.get("step_ms"))),
        Column("windows", lambda row: row.num_windows, "whole"),
        Column("*", lambda row: row.verdict()),
        caption="Speed-up: step time as configured over that with the arm, less one. Above zero the arm wins. "
        "Intervals are valid however often you look, and for all arms together.",
        drop_empty=True,
    )


def _curves(rows: list[ArmSummary]) -> list[Chart]:
    """The speed-up against the setting, for each family of arms."""
    families = grouped([row for row in rows if row.speedup and row.arm.setting is not None], lambda row: row.arm.family)
    charts = []
    for family, arms_of in families.items():
        if len(arms_of) > 1:
            ordered = sorted(arms_of, key=lambda row: row.arm.setting or 0.0)
            points = [(row.arm.setting, row.arm.name, row.speedup) for row in ordered]
            series = [line(family, RUN_COLORS[0], points)]
            data = {
                "unit": "fraction", "series": series, "x_label": page_text(family, 60), "numeric": True, "ideal": 0,
                "signed": True,
            }  # fmt: skip
            title = page_text(f"Speed-up against {family}", 80)
            caption = "Above zero the setting wins over the job as configured. Whiskers are 95% intervals."
            charts.append(Chart("against", title, data, caption, narrow=True))
    return charts


def _left_out(decision: Decision | None) -> list[Table]:
    """The arms that a job which decides no longer measures, and why."""
    if decision is None or not decision.left_out:
        return []
    return [
        table_of(
            "No longer measured",
            decision.left_out,
            Column("~arm", lambda one: one.arm),
            Column("*", why_in_words),
            Column("speed-up then", lambda one: one.speedup, "change"),
            Column("95% interval", lambda one: _interval(one.speedup)),
            Column("by windows", lambda one: one.num_windows, "whole"),
            Column("since window", lambda one: one.window, "whole"),
        )
    ]


def _setting(value: float | None) -> Cell:
    return EMPTY if value is None else Cell(f"{value:,.10g}", value)


def _interval(speedup: Estimate | None) -> Cell:
    return EMPTY if speedup is None else Cell(PAGE.interval(speedup, "fraction", signed=True), speedup.value)


def _step(time: Estimate | None) -> Cell:
    return EMPTY if time is None else Cell(PAGE.quantity(time.value, "ms"), time.value)


def _further(rows: list[ArmSummary]) -> list[Table]:
    """Compute, exposed communication, power and memory, if measured."""
    table = table_of(
        "With the arm, and as configured (in brackets)",
        rows,
        Column("~arm", lambda row: row.arm.name),
        Column("compute", lambda row: _both(row, "compute_ms")),
        Column("exposed comm.", lambda row: _both(row, "exposed_comm_ms")),
        Column("power", lambda row: _both(row, "avg_w", "W")),
        Column("energy of a step", lambda row: _both(row, "energy_per_step_j", "J")),
        Column("peak memory", lambda row: _both(row, "peak_memory_bytes", "GiB", 2**30)),
        folded=len(rows) > 8,
        drop_empty=True,
    )
    return [table] if len(table.columns) > 1 else []


def _energy(rows: list[ArmSummary]) -> list[Block]:
    """Time and energy of a step with each arm, and the Pareto front."""
    points = trade_offs(rows)
    if not points:
        return []
    families = {row.arm.name: row.arm.family or row.arm.name for row in rows}
    series: dict[str, list[Point]] = {}
    for row in points:
        name = row.point.name
        series.setdefault(families.get(name, name), []).append((name, rounded(row.slowdown), -row.saving))
    caption = "Each point is an arm, by its means; the job as configured is at 0, 0. Lower and further left is better."
    table = table_of(
        "Energy against time",
        points,
        Column("~arm", lambda row: row.point.name),
        Column("step longer by", lambda row: row.slowdown, "change"),
        Column("energy saved", lambda row: row.saving, "change"),
        Column("*front", lambda row: "yes" if row.on_front else ""),
        caption="Front (Pareto): nothing else is at least as good in both, and better in one. Means only.",
    )
    labels = ("change of the step time", "change of energy")
    return [scatter("Energy of a step against its time", series, labels, caption), table]


def _both(row: ArmSummary, name: str, unit: str = "ms", divisor: float = 1.0) -> Cell:
    """A figure with the arm and as configured, e.g. ``21.0 (24.0) W``; empty without a value for the arm."""
    value, configured = row.value(name), row.value(f"configured_{name}")
    if value is None:
        return EMPTY
    value /= divisor
    shown = PAGE.quantity(value, unit)
    if configured is not None:
        number, _, unit_shown = shown.partition(PAGE.space)
        before = PAGE.quantity(configured / divisor, unit).partition(PAGE.space)[0]
        shown = f"{number} ({before}){PAGE.space}{unit_shown}"
    return Cell(shown, value)
