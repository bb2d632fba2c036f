"""What a run has measured of each arm: figures over the windows that count."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from overlap_callbacks.analysis.figures import FigureSums, interval_by, samples_of
from overlap_callbacks.analysis.formatting import certainty_in_words, change_in_words, may_be_chance
from overlap_callbacks.analysis.results.arm import ARM_FIGURES, ArmReport, ComparedArm
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.analysis.statistics import (
    CHANGE,
    CONFIDENCE,
    LOG,
    PLAIN,
    Interval,
    Pooling,
    Scale,
    inverted_change,
    pool,
)

SEQUENTIAL = ComparedArm("sequential", equal_results=True, sequential=True)


def arm_scale(figure: Figure) -> Scale:
    """The scale on which the intervals of a figure are symmetric."""
    if figure.unit == "ms":
        return LOG if figure.name.removeprefix("configured_") in ("step_ms", "compute_ms") else PLAIN
    return CHANGE


def arm_intervals(sums: FigureSums) -> dict[str, Interval]:
    """All figures of ``ARM_FIGURES`` over the ranks of these sums; those that were not measured are left out."""
    samples = samples_of(sums)
    found = {}
    for figure in ARM_FIGURES:
        assert figure.formula is not None
        of_figure = [samples[place] for place in figure.formula.samples]
        interval = interval_by(figure.formula.of, *of_figure, scale=arm_scale(figure))
        if interval is not None:
            found[figure.name] = dataclasses.replace(interval, bounds=figure.bounds)
    return found


def arm_report_of(report: OverlapReport, arm: ComparedArm, sums: FigureSums) -> ArmReport:
    """The report of an arm's window.

    Args:
        report: what is made of the same window, with the arm in the place of sequential steps.
        arm: what the steps as configured were compared with.
        sums: of all ranks heard.
    """
    made = ArmReport(
        arm=arm,
        window=report.window,
        first_step=report.first_step,
        num_steps=report.num_steps,
        complete=report.complete,
        control=report.control,
        world_size=report.world_size,
        num_ranks=report.num_reporting,
        backend=report.backend,
        device=report.device,
        valid=report.valid,
        problems=report.problems,
        measurement_overhead=report.measurement_overhead,
        measurement_overhead_ci_low=report.measurement_overhead_ci_low,
        measurement_overhead_ci_high=report.measurement_overhead_ci_high,
        lost_ms=report.lost_ms,
        power=report.power,
        memory=report.memory,
    )
    if not made.complete:
        return made  # its blocks are not balanced
    figures = {name: interval.estimate() for name, interval in arm_intervals(sums).items()}
    return msgspec.structs.replace(made, **figures)


@dataclass(frozen=True)
class ArmSummary:
    """One arm over a run.

    Attributes:
        arm: which.
        num_windows: windows that count.
        figures: those of ``ARM_FIGURES`` that were measured. Their intervals hold at all looks, and for all arms of the
            run together.
        avg_w, configured_avg_w: mean power of a device, in watts; None where not measured.
        energy_per_step_j, configured_energy_per_step_j: of all devices, in joules; None where not measured.
        peak_memory_bytes, configured_peak_memory_bytes: highest of any rank; None where not known.
        problems: of its windows, each once.
    """

    arm: ComparedArm
    num_windows: int
    figures: dict[str, Estimate]
    avg_w: float | None = None
    configured_avg_w: float | None = None
    energy_per_step_j: float | None = None
    configured_energy_per_step_j: float | None = None
    peak_memory_bytes: int | None = None
    configured_peak_memory_bytes: int | None = None
    problems: tuple[str, ...] = ()

    @property
    def speedup(self) -> Estimate | None:
        """Step time as configured over that with the arm, less one."""
        return self.figures.get("speedup")

    def verdict(self) -> str:
        """Is the arm worth it? In a few words."""
        speedup = self.speedup
        if speedup is None:
            return "no window counts" if not self.num_windows else "not measured"
        if speedup.ci_low is None:
            return "too few blocks to tell"
        if may_be_chance(speedup):
            return certainty_in_words(speedup)
        # Of the step as configured: a speed-up of 100 % halves it.
        return f"steps {change_in_words(1 / (1 + speedup.value) - 1, 'longer', 'shorter')}"


def arm_summaries(summary: RunSummary, reports: Sequence[ArmReport]) -> list[ArmSummary]:
    """Each arm of a run, the best first; sequential steps among them, if the run has other arms.

    Args:
        summary: of the run's windows with sequential steps.
        reports: of its windows with other arms.
    """
    if not reports:
        return []
    by_name: dict[str, list[ArmReport]] = {}
    for report in reports:
        by_name.setdefault(report.arm.name, []).append(report)
    # Each further arm is one more that may seem better by chance (Bonferroni).
    has_sequential = not summary.control and bool(summary.valid_windows)
    pooling = Pooling(all_looks=True, confidence=1 - (1 - CONFIDENCE) / (len(by_name) + has_sequential))
    found = [_of(windows, pooling) for windows in by_name.values()]
    sequential = _sequential(summary, pooling) if has_sequential else None
    if sequential is not None:
        found.append(sequential)
    return sorted(found, key=lambda row: -row.speedup.value if row.speedup is not None else float("inf"))


def _of(windows: Sequence[ArmReport], pooling: Pooling) -> ArmSummary:
    # Control windows, in which nothing was turned, and real ones are not mixed: the last window's kind counts.
    counting = [window for window in windows if window.counts and window.control is windows[-1].control]
    figures = {}
    measured = {
        figure.name: [value for window in counting if (value := getattr(window, figure.name)) is not None]
        for figure in ARM_FIGURES
    }
    points = _points({name: [value.value for value in values] for name, values in measured.items()})
    for figure in ARM_FIGURES:
        pooled = pool(
            measured[figure.name], arm_scale(figure), point=points.get(figure.name), bounds=figure.bounds,
            pooling=pooling,
        )  # fmt: skip
        if pooled is not None:
            figures[figure.name] = pooled

    def mean(name: str, *, turned: bool) -> float | None:
        powers = [power for window in counting if (power := window.of(turned=turned)[0]) is not None]
        values = [value for power in powers if (value := getattr(power, name)) is not None]
        return sum(values) / len(values) if values else None

    def peak(*, turned: bool) -> int | None:
        peaks = [found for window in counting if (found := window.of(turned=turned)[1]) is not None]
        return max(peaks, default=None)

    return ArmSummary(
        windows[-1].arm,
        len(counting),
        figures,
        avg_w=mean("mean_avg_w", turned=True),
        configured_avg_w=mean("mean_avg_w", turned=False),
        energy_per_step_j=mean("energy_per_step_j", turned=True),
        configured_energy_per_step_j=mean("energy_per_step_j", turned=False),
        peak_memory_bytes=peak(turned=True),
        configured_peak_memory_bytes=peak(turned=False),
        problems=tuple(dict.fromkeys(problem for window in windows for problem in window.problems)),
    )


def _points(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean times over windows, and the ratios and differences of these: so figures add up."""
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


def _sequential(summary: RunSummary, pooling: Pooling) -> ArmSummary:
    """Sequential steps as an arm: their figures are those of overlap with the sign turned."""
    pooled = summary.pooled(pooling)
    figures: dict[str, Estimate] = {}
    for name, of_overlap in (("speedup", "speedup_vs_sequential"), ("compute_slowdown", "compute_slowdown")):
        if of_overlap in pooled:
            figures[name] = inverted_change(pooled[of_overlap])
    for name, of_overlap in (
        ("step_ms", "e2e_sequential_ms"),
        ("configured_step_ms", "e2e_overlapped_ms"),
        ("compute_ms", "compute_isolated_ms"),
        ("configured_compute_ms", "compute_ms"),
        ("comm_ms", "comm_isolated_ms"),
        ("configured_comm_ms", "comm_ms"),
        ("configured_exposed_comm_ms", "exposed_comm_ms"),
    ):
        if of_overlap in pooled:
            figures[name] = pooled[of_overlap]
    return ArmSummary(SEQUENTIAL, len(summary.valid_windows), figures)
