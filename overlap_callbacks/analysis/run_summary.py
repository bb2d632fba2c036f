"""Which windows of a run count, and their joint results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from overlap_callbacks.analysis.design import MIN_BLOCKS_OF_TREND
from overlap_callbacks.analysis.figures import ProfiledMeans, picked, scale_of, value_by
from overlap_callbacks.analysis.formatting import CLEAR, INCONCLUSIVE, certainty
from overlap_callbacks.analysis.outliers import stalls_of_a_run
from overlap_callbacks.analysis.results.catalogue import FIGURES, figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import OV, SEQ, STEP, Figure
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.results.settled import Settled, Verdict
from overlap_callbacks.analysis.results.step_parts import StepParts, measured_parts
from overlap_callbacks.analysis.results.window import ProfiledBlock, TimedBlock
from overlap_callbacks.analysis.statistics import (
    CONFIDENCE,
    Floats,
    Pooling,
    gradient,
    inverted_change,
    pool,
    relative_change,
    t_quantile,
    windows_differ,
)

COUNTS = "counts"
NOT_VALID = "not valid"
CUT_SHORT = "cut short"
CONTROL = "control"
NO_CONTROL = "no control"

# Why the interval of a figure decides nothing.
NOT_SETTLED, NOT_VERIFIED = "not settled", "not verified"
# Figures that rest on the time of sequential steps without the profiler.
_OF_SEQUENTIAL = tuple(
    [figure.name for figure in FIGURES if SEQ in figure.defined.samples and figure.name != "profiler_slowdown_isolated"]
)
# Of a settled difference, for intervals with another confidence.
_DEGREES = 3.0


class RunSummary:
    """The results of a run so far.

    A record may hold control (A/A) runs and real ones, which must not be mixed: only windows of the last run's kind
    count.

    Args:
        run: the last start of the job; None if unknown.
        windows: the reports, in the order of measurement. The list may grow.
        unfinished: rank 0's data of a window that was cut off before its report.
        running: whether the job still runs: its intervals then hold however often somebody looks.
        left_out: why windows have no report, in words. The list may grow.
    """

    def __init__(
        self,
        run: RunInfo | None,
        windows: Sequence[OverlapReport],
        unfinished: OverlapReport | None = None,
        *,
        running: bool = False,
        left_out: Sequence[str] = (),
    ) -> None:
        self.run = run
        self.left_out = left_out
        self.windows = windows
        self.unfinished = unfinished
        self.running = running
        self._valid: tuple[tuple[int, bool], list[OverlapReport]] | None = None  # and the number of windows
        self._pooled: dict[Pooling, tuple[int, dict[str, Estimate]]] = {}  # and the number of windows

    @property
    def control(self) -> bool:
        """Whether this is a control run, by its last window if the run is unknown."""
        if self.run is None:
            return bool(self.windows) and self.windows[-1].control
        return bool(self.run.schedule.get("control"))

    @property
    def measured(self) -> bool:
        return bool(self.windows) or self.unfinished is not None

    def state_of(self, window: OverlapReport) -> str:
        """``COUNTS``, or why the window does not: ``NOT_VALID``, ``CUT_SHORT``, ``CONTROL`` or ``NO_CONTROL``.

        A window counts if it is complete, its sequential steps were sequential, and it is of the last run's kind.
        """
        if not window.valid:
            return NOT_VALID
        if not window.complete:
            return CUT_SHORT
        if window.control is self.control:
            return COUNTS
        return CONTROL if window.control else NO_CONTROL

    @property
    def valid_windows(self) -> list[OverlapReport]:
        known = len(self.windows), self.control
        if self._valid is None or self._valid[0] != known:
            control = known[1]
            self._valid = known, [w for w in self.windows if w.valid and w.complete and w.control is control]
        return list(self._valid[1])

    def states(self) -> Counter[str]:
        return Counter(self.state_of(window) for window in self.windows)

    @property
    def partial(self) -> OverlapReport | None:
        """The best there is if no window counts: the window that was cut off, or the last one cut short.

        The latter only with at least one balanced group of timed blocks.
        """
        if self.unfinished is not None or self.run is None:
            return self.unfinished
        for window in reversed(self.windows):
            if self.state_of(window) == CUT_SHORT and window.control is self.control and window.samples:
                comparable = drop_incomparable_figures(window)
                return comparable if comparable.speedup_vs_sequential is not None else None
        return None

    def pooled(self, pooling: Pooling | None = None) -> dict[str, Estimate]:
        """The figures of the headline: each over the windows that count, what overlap saves as settled if it has.

        By default, intervals hold at all looks while the job runs.
        """
        pooling = pooling or Pooling(all_looks=self.running)
        # Cached: it is read repeatedly, and takes half a second for ten thousand windows.
        if pooling not in self._pooled or self._pooled[pooling][0] != len(self.windows):
            self._pooled[pooling] = len(self.windows), self._pool(pooling)
        found = self._pooled[pooling][1]
        if self.control:
            return without_sequential(found)
        return with_settled(found, self.settled(), pooling.confidence)

    def sides(self) -> dict[str, Estimate]:
        """Of a control run, the figures that compare its sides, both of which ran overlapped: errors of measurement."""
        found = self._of_short_blocks() if self.control else {}
        return {name: figure for name, figure in found.items() if figure_named(name).of_sequential}

    def _of_short_blocks(self) -> dict[str, Estimate]:
        self.pooled()
        return self._pooled[Pooling(all_looks=self.running)][1]

    def _pool(self, pooling: Pooling) -> dict[str, Estimate]:
        windows = _with_zeros([window.figures() for window in self.valid_windows])
        # All figures come from the same mean times, by a window's formulas, so they add up.
        times = run_times(windows)
        means = run_means(times)
        pooled = {}
        for figure in FIGURES:
            having = [place for place, window in enumerate(windows) if figure.name in window]
            if not having:
                continue
            estimate = pool(
                [windows[place][figure.name] for place in having],
                scale_of(figure),
                point=value_by(figure, means),
                deviations=run_deviations(figure, times[having]) if len(having) > 1 else None,
                bounds=figure.bounds,
                pooling=pooling,
            )
            if estimate is not None:
                pooled[figure.name] = estimate
        return pooled

    @property
    def windows_differ(self) -> bool:
        """Whether what overlap saves varies between windows by more than their errors explain."""
        figure = figure_named("speedup_vs_sequential")
        found = [window.speedup_vs_sequential for window in self.valid_windows]
        return windows_differ([each for each in found if each is not None], scale_of(figure))

    @property
    def stalls(self) -> str:
        """A sentence if nearly all steps left out are of one mode; else empty."""
        return stalls_of_a_run([window.left_out for window in self.valid_windows])

    def figures(self) -> dict[str, Estimate]:
        """Those of ``pooled``, or of ``partial`` if no window counts."""
        pooled = self.pooled()
        partial = None if pooled else self.partial
        if partial is None:
            return pooled
        return without_sequential(partial.figures()) if self.control else partial.figures()

    @property
    def not_settled(self) -> bool:
        """Whether what overlap saves may still change along a block, so that its interval is of short blocks alone."""
        settled = None if self.control else self.settled()
        if settled is None or settled.verdict is not Verdict.SETTLED:
            return settled is not None and settled.verdict is Verdict.NOT_SETTLED
        return hides_short_blocks(settled, self._of_short_blocks().get("speedup_vs_sequential"))

    def undecided(self) -> dict[str, str]:
        """The figures whose intervals decide nothing, and why: ``NOT_SETTLED`` or ``NOT_VERIFIED``."""
        found = dict.fromkeys(_OF_SEQUENTIAL if self.not_settled else (), NOT_SETTLED)
        for window in self.unverified:
            found |= {
                figure.name: NOT_VERIFIED
                for figure in FIGURES
                if figure.compares or (window.lower_bound and OV in figure.defined.samples)
            }
        return found

    @property
    def unverified(self) -> list[OverlapReport]:
        """The windows that count and compare the modes without proof that sequential steps were sequential."""
        return [w for w in self.valid_windows if w.speedup_vs_sequential is not None and not w.verified]

    def settled(self) -> Settled | None:
        """The settled difference of the start that knows it from the most windows; None if none does."""
        found = [window.settled for window in self.valid_windows if window.settled is not None]
        return max(reversed(found), key=lambda settled: settled.num_windows, default=None)

    def step_parts(self) -> StepParts | None:
        """Where the time of an overlapped step goes; None without a profile.

        Compute's loss is a separate part only if sequential steps clearly show it.
        """
        figures = self.figures()
        slowdown = figures.get("compute_slowdown")
        compared = bool(self.valid_windows) and not self.control
        clear = slowdown is not None and certainty(slowdown) in ("", CLEAR)
        found = measured_parts(figures, {}, compared=compared and clear)
        return None if found is None else found[0]

    def latest_valid(self, part: str) -> OverlapReport | None:
        """The last window that counts and has a part, such as ``kernels``."""
        return next((window for window in reversed(self.valid_windows) if getattr(window, part)), None)

    def latest(self, part: str) -> OverlapReport | None:
        """The last window that has a part, preferably one that counts."""
        valid = self.latest_valid(part)
        return valid or next((window for window in reversed(self.windows) if getattr(window, part)), None)


def without_sequential(figures: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """The figures that need no sequential steps."""
    return {name: figure for name, figure in figures.items() if not figure_named(name).of_sequential}


def hides_short_blocks(settled: Settled, short: Estimate | None) -> bool:
    """Whether a settled difference is inconclusive where that of the short blocks is clear: it is not headlined."""
    clear = short is not None and certainty(short) == CLEAR
    return clear and certainty(settled.estimate) == INCONCLUSIVE


def with_settled(
    figures: Mapping[str, Estimate], settled: Settled | None, confidence: float = CONFIDENCE
) -> dict[str, Estimate]:
    """The figures with what overlap saves as settled, if that applies; others of sequential steps are dropped.

    They are of short blocks.
    """
    step = figures.get("e2e_overlapped_ms")
    if settled is None or settled.verdict is not Verdict.SETTLED or step is None:
        return dict(figures)
    if hides_short_blocks(settled, figures.get("speedup_vs_sequential")):
        return dict(figures)
    change = settled.estimate
    if confidence != CONFIDENCE:
        wider, center = t_quantile(_DEGREES, confidence) / t_quantile(_DEGREES), math.log1p(change.value)
        low, high = (
            None if end is None else math.expm1(center + wider * (math.log1p(end) - center))
            for end in (change.ci_low, change.ci_high)
        )
        change = msgspec.structs.replace(change, ci_low=low, ci_high=high)
    known = {"speedup_vs_sequential": change, "e2e_sequential_ms": _longer_by(step, change)}
    found = {
        name: known.get(name, figure) for name, figure in figures.items() if name in known or name not in _OF_SEQUENTIAL
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _longer_by(time: Estimate, change: Estimate) -> Estimate | None:
    """A time that is longer by a relative change, measured independently; None unless both times are positive."""
    found = relative_change(_plus(1.0, inverted_change(change)), time)
    return None if found is None else _plus(1.0, found)


def _plus(number: float, one: Estimate) -> Estimate:
    low, high = (None if bound is None else number + bound for bound in (one.ci_low, one.ci_high))
    return Estimate(number + one.value, low, high, one.num_steps, one.num_blocks)


def without_details(report: OverlapReport) -> OverlapReport:
    """A report with only its figures: enough for a summary, and small enough to keep for the whole run.

    A window that was cut short keeps rank 0's blocks too: they decide what it can compare.
    """
    tables: dict[str, Any] = dict.fromkeys(
        ("kernels", "pairs", "dimensions", "dimension_pairs", "pictures", "collectives"), ()
    )
    kept = () if report.complete else report.samples[:1]
    blocks = [msgspec.structs.replace(sample, **tables, power=(), power_trace=None) for sample in kept]
    return msgspec.structs.replace(
        report,
        **tables,
        transfers=(),
        sized_transfers=(),
        samples=tuple(blocks),
        power_trace=None,
        messages=None,
        expert_details=None,
        exposure=None,
    )


def drop_incomparable_figures(window: OverlapReport) -> OverlapReport:
    """The report of a window that was cut short, without figures that too few blocks support.

    If drift may distort the difference between the modes, figures that compare them are dropped; if it may between
    profiled blocks, so are all figures of the profile.
    """
    sample = window.samples[0]
    dropped = []
    if not are_comparable(sample.timed):
        dropped += [figure.name for figure in FIGURES if figure.unit != "ms"]
    if not are_comparable(sample.profiled):
        dropped += [figure.name for figure in FIGURES if not {STEP, SEQ}.issuperset(figure.defined.samples)]
    return msgspec.structs.replace(window, **dict.fromkeys(dropped))


def are_comparable(blocks: Iterable[TimedBlock | ProfiledBlock]) -> bool:
    """Whether drift does not distort the difference between the modes of these blocks.

    So if both modes' blocks are centred on the same place, as in ``OSSO``, or are enough to estimate it.
    """
    places: dict[Mode, list[int]] = {mode: [] for mode in Mode}
    for block in blocks:
        places[block.mode].append(block.block)
    overlapped, sequential = places.values()
    if min(len(overlapped), len(sequential)) < 2:
        return False
    balanced = fmean(overlapped) == fmean(sequential)
    return balanced or len(overlapped) + len(sequential) >= MIN_BLOCKS_OF_TREND


def _with_zeros(windows: list[dict[str, Estimate]]) -> list[dict[str, Estimate]]:
    """The windows, with 0 where no device waits for communication on the host: the mean of idle time has them too."""
    name = "exposed_on_host_ms"
    if any([name in window for window in windows]):
        for window in windows:
            if "idle_ms" in window and name not in window:
                idle = window["idle_ms"]
                window[name] = Estimate(0.0, 0.0, 0.0, idle.num_steps, idle.num_blocks)
    return windows


def run_times(windows: Sequence[Mapping[str, Estimate]]) -> Floats:
    """The mean times of each window as a row, from its figures' values by name; NaN for unknown ones."""
    times = np.array([_window_times(window) for window in windows], dtype=np.float64)
    return times.reshape(len(windows), 2 + 2 * len(ProfiledMeans._fields))


def _window_times(window: Mapping[str, Estimate]) -> list[float]:
    value = {name: figure.value for name, figure in window.items()}

    def known(name: str) -> float:
        return value.get(name, math.nan)

    comm_ms = known("comm_isolated_ms") if "comm_slowdown" in value else math.nan
    overlapped = ProfiledMeans(
        compute_ms=known("compute_ms"),
        # Of the sums of these kernels' times, only the ratio is a figure; it weights by the time in flight.
        comm_ms=comm_ms * (1 + known("comm_slowdown")),
        step_ms=known("e2e_overlapped_ms") * (1 + known("profiler_slowdown")),
        compute_busy_ms=known("compute_busy_ms"),
        comm_busy_ms=known("comm_ms"),
        hidden_comm_ms=known("hidden_comm_ms"),
        covered_compute_ms=known("compute_ms") * known("overlap_ratio"),
        p2p_ms=known("p2p_ms"),
        idle_ms=known("idle_ms"),
        exposed_on_host_ms=known("exposed_on_host_ms"),
        bubble_ms=known("bubble_ms"),
        waiting_ms=known("waiting_ms"),
        slowest_compute_ms=math.nan,
    )
    isolated = ProfiledMeans(
        compute_ms=known("compute_isolated_ms"),
        comm_ms=comm_ms,
        step_ms=known("e2e_sequential_ms") * (1 + known("profiler_slowdown_isolated")),
        compute_busy_ms=known("compute_busy_isolated_ms"),
        comm_busy_ms=known("comm_isolated_ms"),
        hidden_comm_ms=known("comm_isolated_ms") * known("residual_comm_overlap"),
        covered_compute_ms=known("compute_isolated_ms") * known("residual_overlap"),
        p2p_ms=math.nan,
        idle_ms=known("idle_isolated_ms"),
        exposed_on_host_ms=math.nan,
        bubble_ms=math.nan,
        waiting_ms=known("waiting_isolated_ms"),
        # Windows of earlier versions have the mean over the ranks instead.
        slowest_compute_ms=value.get("slowest_compute_ms", known("compute_busy_isolated_ms")),
    )
    return [known("e2e_overlapped_ms"), known("e2e_sequential_ms"), *overlapped, *isolated]


def run_means(times: Floats) -> Floats:
    """The mean of each time over the windows that know it; NaN if none does."""
    known = np.isfinite(times)
    with np.errstate(all="ignore"):
        return np.asarray(np.where(known, times, 0.0).sum(axis=0) / known.sum(axis=0))


def run_deviations(figure: Figure, times: Floats) -> Floats | None:
    """Each window's contribution to a run's figure, on its scale; their spread is that of the figure of the mean times.

    To first order. The windows' own figures spread less if long steps are rare, but they have another mean. ``times``
    are those of the windows that have the figure.
    """
    means, formula, scale = run_means(times), figure.defined, scale_of(figure)
    slopes = gradient(lambda moved: scale.to(formula.of(*picked(formula, moved))), [means], 0)
    if slopes is None:
        return None
    used = slopes != 0
    deviations = (times[:, used] - means[used]) @ slopes[used]
    return deviations if np.isfinite(deviations).all() else None
