"""A run's results for each arm: figures over the windows that count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from overlap_callbacks.analysis.figures import FigureSums, figures_from, scale_of
from overlap_callbacks.analysis.formatting import certainty_in_words, change_in_words, includes_zero
from overlap_callbacks.analysis.results.arm import ARM_DEVICE_FIGURES, ARM_FIGURES, ArmReport, ComparedArm
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import HIGHEST, Figure
from overlap_callbacks.analysis.results.report import OverlapReport, WindowReport
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.analysis.statistics import CONFIDENCE, Pooling, inverted_change, pool
from overlap_callbacks.analysis.sums import grouped
from overlap_callbacks.analysis.trade_off import TradeOffPoint, TradeOffRow, trade_off

_DEVICE = {figure.name: figure for figure in ARM_DEVICE_FIGURES}
SEQUENTIAL = ComparedArm("sequential", equal_results=True, sequential=True)


def arm_report_of(
    report: OverlapReport, arm: ComparedArm, sums: FigureSums, same_order: bool | None = None
) -> ArmReport:
    """The report of an arm's window, from a report of the same window that has the arm in place of sequential steps.

    ``same_order`` as in ``ArmReport``.
    """
    fields: dict[str, Any] = {name: getattr(report, name) for name in WindowReport.__struct_fields__}
    if report.complete:  # otherwise its blocks are not balanced
        fields |= figures_from(sums, ARM_FIGURES)
    return ArmReport(arm=arm, num_ranks=report.num_reporting, same_order=same_order, **fields)


@dataclass(frozen=True)
class ArmSummary:
    """One arm over a run.

    Attributes:
        num_windows: windows that count.
        figures: those of ``ARM_FIGURES`` that were measured. Their intervals hold at all looks, and for all arms of the
            run together.
        device: those of ``ARM_DEVICE_FIGURES``: means or highest values over the windows; None where not measured.
        problems: of its windows, each once.
    """

    arm: ComparedArm
    num_windows: int
    figures: dict[str, Estimate]
    device: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(_DEVICE))
    problems: tuple[str, ...] = ()
    control: bool = False

    @property
    def speedup(self) -> Estimate | None:
        return self.figures.get("speedup")

    def value(self, name: str) -> float | None:
        figure = self.figures.get(name)
        return self.device.get(name) if figure is None else figure.value

    def verdict(self) -> str:
        """Is the arm worth it? In a few words."""
        if self.control:
            return "A/A control: nothing was turned, so every difference is chance"
        speedup = self.speedup
        if speedup is None:
            return "no window counts" if not self.num_windows else "not measured"
        if speedup.ci_low is None:
            return "too few blocks to tell"
        if includes_zero(speedup):
            return certainty_in_words(speedup)
        # Of the step as configured: a speed-up of 100 % halves it.
        return f"steps {change_in_words(1 / (1 + speedup.value) - 1, 'longer', 'shorter')}"


def arm_summaries(summary: RunSummary, reports: Sequence[ArmReport]) -> list[ArmSummary]:
    """Each arm of a run, best first; sequential steps are among them if the run has other arms.

    ``reports``: those of its windows with other arms.
    """
    if not reports:
        return []
    by_name = grouped(reports, lambda report: report.arm.name)
    # Each further arm may look better by chance (Bonferroni).
    has_sequential = not summary.control and bool(summary.valid_windows)
    pooling = Pooling(all_looks=True, confidence=1 - (1 - CONFIDENCE) / (len(by_name) + has_sequential))
    found = [_of(windows, pooling) for windows in by_name.values()]
    if has_sequential:
        found.append(_sequential(summary, pooling))
    return sorted(found, key=lambda row: -row.speedup.value if row.speedup is not None else float("inf"))


def trade_offs(rows: Sequence[ArmSummary]) -> list[TradeOffRow]:
    """Time and energy of a step with each arm of which both are known, relative to the job as configured.

    Each arm is compared with the configured steps of its own windows, so drift along the run is no effect of the arm.
    """
    names = ("step_ms", "configured_step_ms", "energy_per_step_j", "configured_energy_per_step_j")
    values_of = {row.arm.name: [row.value(name) or 0.0 for name in names] for row in rows if not row.control}
    measured = {name: values for name, values in values_of.items() if min(values) > 0}
    if not measured:
        return []
    _, step_ms, _, energy_j = [fmean(column) for column in zip(*measured.values(), strict=True)]
    configured = TradeOffPoint("as configured", step_ms, energy_j)
    points = [
        TradeOffPoint(name, step_ms * arm_ms / own_ms, energy_j * arm_j / own_j)
        for name, (arm_ms, own_ms, arm_j, own_j) in measured.items()
    ]
    return trade_off([configured, *points], configured)


def _of(windows: Sequence[ArmReport], pooling: Pooling) -> ArmSummary:
    # Do not mix control windows, in which nothing was turned, with real ones: the last window's kind counts.
    counting = [window for window in windows if window.counts and window.control is windows[-1].control]
    measured: dict[str, list[Estimate]] = {figure.name: [] for figure in ARM_FIGURES}
    device: dict[str, list[float]] = {name: [] for name in _DEVICE}
    for window in counting:
        for name, estimate in window.figures().items():
            measured[name].append(estimate)
        for value in window.values():
            if value.figure.name in device:
                device[value.figure.name].append(value.number)
    points = _points({name: [value.value for value in values] for name, values in measured.items()})
    figures = {}
    for figure in ARM_FIGURES:
        pooled = pool(
            measured[figure.name], scale_of(figure), point=points.get(figure.name), bounds=figure.bounds,
            pooling=pooling,
        )  # fmt: skip
        if pooled is not None:
            figures[figure.name] = pooled
    return ArmSummary(
        windows[-1].arm,
        len(counting),
        figures,
        {name: _over_windows(_DEVICE[name], values) for name, values in device.items()},
        tuple(dict.fromkeys(problem for window in windows for problem in window.problems)),
        windows[-1].control,
    )


def _over_windows(figure: Figure, values: Sequence[float]) -> float | None:
    if not values:
        return None
    found = max(values) if figure.aggregate == HIGHEST else fmean(values)
    return round(found) if figure.unit == "bytes" else found


def _points(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean times over windows, and ratios and differences of these, so that figures add up."""
    points = {
        figure.name: fmean(values[figure.name]) for figure in ARM_FIGURES if figure.unit == "ms" and values[figure.name]
    }
    for name, above, below in (
        ("speedup", "configured_step_ms", "step_ms"),
        ("compute_slowdown", "compute_ms", "configured_compute_ms"),
    ):
        if points.get(above, 0.0) > 0 and points.get(below, 0.0) > 0:
            points[name] = points[above] / points[below] - 1
    return points


# Figures of sequential steps as an arm, from those of overlap.
_OF_OVERLAP = {
    "speedup": "speedup_vs_sequential",
    "compute_slowdown": "compute_slowdown",
    "step_ms": "e2e_sequential_ms",
    "configured_step_ms": "e2e_overlapped_ms",
    "compute_ms": "compute_isolated_ms",
    "configured_compute_ms": "compute_ms",
    "comm_ms": "comm_isolated_ms",
    "configured_comm_ms": "comm_ms",
    "configured_exposed_comm_ms": "exposed_comm_ms",
}


def _sequential(summary: RunSummary, pooling: Pooling) -> ArmSummary:
    """Sequential steps as an arm: the figures of overlap with the opposite sign."""
    pooled = summary.pooled(pooling)
    figures = {name: pooled[of_overlap] for name, of_overlap in _OF_OVERLAP.items() if of_overlap in pooled}
    changes = {name: inverted_change(figures[name]) for name in ("speedup", "compute_slowdown") if name in figures}
    return ArmSummary(SEQUENTIAL, len(summary.valid_windows), figures | changes)
