"""The tables of a window for W&B, as plain columns and rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from overlap_callbacks.analysis.arms import arm_summaries
from overlap_callbacks.analysis.causal import slopes_by_name
from overlap_callbacks.analysis.causal_findings import findings_of, fix_of
from overlap_callbacks.analysis.exposure import MAX_WINDOWS, over_windows, with_blocking
from overlap_callbacks.analysis.formatting import one_line
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.causal import CausalWindow
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.exposure import Exposure
from overlap_callbacks.analysis.results.kernel_times import PairTime, beside_in_words
from overlap_callbacks.analysis.results.power import PowerTrace
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo, Setting
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.analysis.run_summary import RunSummary

NAMES_TABLE = "comm/names"
_MAX_CELL_LENGTH = 500

FIGURE_COLUMNS = (
    "figure", "unit", "window", "ci_low", "ci_high", "rank_low", "rank_high", "run", "run_ci_low", "run_ci_high",
)  # fmt: skip
KERNEL_COLUMNS = (
    "kernel", "communication", "slowdown", "lost_ms", "overlapped_ms", "sequential_ms",
    "overlapped_calls", "sequential_calls",
)  # fmt: skip
PAIR_COLUMNS = (
    "kernels", "communication", "concurrent_with", "slowdown", "lost_ms", "time_ms", "alone_ms", "concurrent_ms",
    "calls", "slowdown_during",
)  # fmt: skip
COLLECTIVE_COLUMNS = (
    "operator", "dimension", "group", "group_size", "backend", "messages", "bytes_in", "bytes_out", "isolated_ms",
    "timed_bytes", "kernels_ms", "transfer_ms",
)  # fmt: skip
DIMENSION_COLUMNS = ("dimension", "messages", "bytes_in", "comm_ms", "exposed_ms", "slowdown")
MESSAGE_COLUMNS = (
    "dimension", "stage", "operator", "group_size", "num_members", "messages", "bytes", "bytes_in", "equal",
)  # fmt: skip
EXPERT_COLUMNS = (
    "step", "in_window", "load_max_over_mean", "load_cv", "split_max_over_mean", "split_cv",
)  # fmt: skip
CAUSAL_TABLE = "overlap/causal"
CAUSAL_COLUMNS = (
    "delayed", "windows", "delay_ms", "slope", "slope_ci_low", "slope_ci_high", "slack_at_least_ms",
    "removed_wins_at_most_ms", "exposed_ms", "verdict", "profile_differs", "change", "tried_by",
)  # fmt: skip
LATE_COLUMNS = (
    "rank", "host", "dimension", "calls", "last", "steps", "worst", "chance", "waiting_ms", "lost_fraction",
)  # fmt: skip
NAME_COLUMNS = (
    "name", "collective", "dimension", "most_bytes", "calls", "exposed_ms", "hidden_ms", "waiting_ms", "queued_ms",
    "blocking", "worst_rank",
)  # fmt: skip
TRANSFER_COLUMNS = ("operator", "dimension", "group_size", "reach", "size", "calls", "bytes", "transfer_ms")
TRACE_COLUMNS = ("time_ms", "power_w", "sm_clock_mhz", "mode", "communication_in_flight")


ARM_COLUMNS = ("arm", "family", "setting", "windows", "equal_results", "speedup", "speedup_ci_low", "speedup_ci_high",
               "step_ms", "configured_step_ms", "compute_slowdown", "exposed_comm_ms", "configured_exposed_comm_ms",
               "avg_w", "configured_avg_w", "energy_per_step_j", "configured_energy_per_step_j", "peak_memory_bytes",
               "configured_peak_memory_bytes", "verdict")  # fmt: skip


class Table(NamedTuple):
    columns: tuple[str, ...]
    rows: list[list[Any]]


def arm_table(summary: RunSummary, reports: Sequence[ArmReport]) -> Table:
    """The arms of a run, best first."""
    rows = []
    for row in arm_summaries(summary, reports):
        speedup = row.speedup
        of_row = {
            "arm": row.arm.name,
            "family": row.arm.family,
            "setting": row.arm.setting,
            "windows": row.num_windows,
            "equal_results": row.arm.equal_results,
            "speedup_ci_low": None if speedup is None else speedup.ci_low,
            "speedup_ci_high": None if speedup is None else speedup.ci_high,
            "verdict": row.verdict(),
        }
        rows.append([of_row[name] if name in of_row else row.value(name) for name in ARM_COLUMNS])
    return Table(ARM_COLUMNS, rows)


class CausalTable:
    """What delaying each set of collectives did to the step, so far.

    Attributes:
        windows: the causal ones.
    """

    def __init__(self) -> None:
        self.windows: list[CausalWindow] = []
        self._collectives: Sequence[CollectiveTime] = ()  # of the last window that counts
        self._exposed: deque[Exposure] = deque(maxlen=MAX_WINDOWS)
        self._configuration: Mapping[str, Setting] = {}

    def note(self, report: OverlapReport, run: RunInfo | None) -> None:
        """Note a window of the usual kind: it tells what is exposed."""
        if report.valid and report.complete:
            self._collectives = report.collectives or self._collectives
            self._exposed += filter(None, [report.exposure])
        self._configuration = {} if run is None else run.configuration

    @property
    def exposure(self) -> Exposure | None:
        """Over the last windows that count, as on the page, with the slopes of delays; None if that is not known."""
        found = over_windows(self._exposed)
        return None if found is None else with_blocking(found, slopes_by_name(self.windows))

    def content(self, late_rank: int | None = None) -> dict[str, Table]:
        """The table by its key, and that of names with their slopes; nothing without causal windows.

        ``late_rank``: that others wait for, if any.
        """
        exposure = self.exposure
        rows: list[list[Any]] = []
        for found in findings_of(self.windows, exposure, self._collectives, late_rank=late_rank):
            of, fix = found.response, fix_of(found, exposure, self._configuration, late_rank)
            rows.append([
                of.label, of.num_windows, of.delayed.delay_ms, of.slope.value, of.slope.ci_low, of.slope.ci_high,
                found.slack_ms, found.won_ms, found.exposed_ms, of.verdict.value, found.contradiction(),
                "" if fix is None else fix.what, "" if fix is None else fix.arm,
            ])  # fmt: skip
        if not rows:
            return {}
        names = {} if exposure is None or not exposure.names else {NAMES_TABLE: _table(NAME_COLUMNS, exposure.names)}
        return {CAUSAL_TABLE: Table(CAUSAL_COLUMNS, rows), **names}


def tables(report: OverlapReport, of_run: Mapping[str, Estimate]) -> dict[str, Table]:
    """The tables of a window by key; a table without rows is left out.

    Kernels and pairs compare with sequential steps, so an invalid window has none. ``of_run``: headline figures of the
    run so far, by name.
    """
    several = report.has_several_dimensions  # else other tables have the same
    by_key = {
        "overlap/figures": _figures(report, of_run),
        "overlap/kernels": _table(KERNEL_COLUMNS, report.kernels if report.compared else ()),
        "overlap/pairs": _pairs(report.pairs if report.compared else ()),
        "comm/collectives": _table(COLLECTIVE_COLUMNS, report.collectives),
        "dimension/dimensions": _table(DIMENSION_COLUMNS, report.dimensions if several else ()),
        "traffic/messages": _table(MESSAGE_COLUMNS, () if report.messages is None else report.messages.groups),
        "expert/steps": _table(EXPERT_COLUMNS, () if report.expert_details is None else report.expert_details.steps),
        "straggler/ranks": _table(
            LATE_COLUMNS, report.arrivals.ranks if report.arrivals is not None and report.compared else ()
        ),
        NAMES_TABLE: _table(NAME_COLUMNS, () if report.exposure is None else report.exposure.names),
        "comm/transfers": _table(TRANSFER_COLUMNS, report.transfers if report.compared else ()),
        "dimension/pairs": _pairs(report.dimension_pairs if report.compared and several else ()),
    }
    if not report.compared:
        for row in by_key["dimension/dimensions"].rows:
            row[-1] = None
        for row in by_key["comm/collectives"].rows:
            for name in ("isolated_ms", "timed_bytes", "transfer_ms"):  # of sequential steps
                row[COLLECTIVE_COLUMNS.index(name)] = None
    if report.power_trace is not None and not report.control:
        by_key["power/trace"] = Table(TRACE_COLUMNS, _trace_rows(report.power_trace))
    return {key: table for key, table in by_key.items() if table.rows}


def _figures(report: OverlapReport, of_run: Mapping[str, Estimate]) -> Table:
    """All figures: of the window, and of the run those that have one."""
    rows: dict[str, dict[str, Any]] = {}
    for value in report.values():
        figure = value.figure
        row = rows.setdefault(value._replace(bound="").key, {"unit": figure.unit})
        row[value.bound or "window"] = value.number if math.isfinite(value.number) else None
        run = of_run.get(figure.name) if figure in FIGURES else None
        if run is not None:
            row |= {"run": run.value, "run_ci_low": run.ci_low, "run_ci_high": run.ci_high}
    cells = [[_cell(key), *[row.get(column) for column in FIGURE_COLUMNS[1:]]] for key, row in rows.items()]
    return Table(FIGURE_COLUMNS, cells)


def _table(columns: tuple[str, ...], items: Sequence[Any]) -> Table:
    return Table(columns, [[_cell(_value(item, column)) for column in columns] for item in items])


# Columns with a different name in the record.
_FIELDS = {"kernel": "name", "kernels": "victim", "equal": "alike"}


def _value(item: Any, column: str) -> Any:
    """A field by its name in the record, or a property."""
    attributes = dict(zip(item.__struct_encode_fields__, item.__struct_fields__, strict=True))
    name = _FIELDS.get(column, column)
    return getattr(item, attributes.get(name, name))


def _pairs(items: Sequence[PairTime]) -> Table:
    return _table(
        PAIR_COLUMNS,
        [msgspec.structs.replace(item, concurrent_with=beside_in_words(item.concurrent_with)) for item in items],
    )


def _cell(value: Any) -> Any:
    return one_line(value, _MAX_CELL_LENGTH) if isinstance(value, str) else value


def _trace_rows(trace: PowerTrace) -> list[list[Any]]:
    clocks: Iterable[float | None] = trace.sm_clock_mhz or (None for _ in trace.time_ms)
    rows = []
    for time, power, clock in zip(trace.time_ms, trace.power_w, clocks, strict=True):
        arms = (segment.mode.value for segment in trace.segments if segment.start_ms <= time <= segment.end_ms)
        in_flight = any(start <= time <= end for start, end in trace.communication) if trace.communication else None
        rows.append([time, power, clock, next(arms, ""), in_flight])
    return rows
