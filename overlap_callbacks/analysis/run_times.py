"""The times of a run's windows, from which the figures of the run come as those of a window come from its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from overlap_callbacks.analysis.figures import ProfiledMeans, picked
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Formula
from overlap_callbacks.analysis.statistics import Floats, Scale, gradient


def run_times(windows: Sequence[Mapping[str, Estimate]]) -> Floats:
    """The mean times of each window, from the values of its figures; NaN for what is not known. A row a window.

    Args:
        windows: the figures of each window, by name.
    """

    def column(time: str, change: str = "", *, share_of: str = "", beside: str = "", earlier: str = "") -> list[float]:
        """Of a time, of one that is longer than it by a change, or of a share of it; where another figure is known.

        Windows of earlier versions have another time in its place.
        """
        if earlier:
            return [then if math.isnan(now) else now for now, then in zip(column(time), column(earlier), strict=True)]
        names = [name for name in (time, change, share_of, beside) if name]
        return [
            window[time].value * (1 + window[change].value if change else window[share_of].value if share_of else 1)
            if all(name in window for name in names)
            else math.nan
            for window in windows
        ]

    unknown = [math.nan] * len(windows)
    overlapped = {
        "compute_ms": column("compute_ms"),
        # Of the sums of these kernels' times the ratio alone is a figure: it weighs by the time in flight.
        "comm_ms": column("comm_isolated_ms", "comm_slowdown"),
        "step_ms": column("e2e_overlapped_ms", "profiler_slowdown"),
        "compute_busy_ms": column("compute_busy_ms"),
        "comm_busy_ms": column("comm_ms"),
        "hidden_comm_ms": column("hidden_comm_ms"),
        "covered_compute_ms": column("compute_ms", share_of="overlap_ratio"),
        "p2p_ms": column("p2p_ms"),
        "idle_ms": column("idle_ms"),
        "bubble_ms": column("bubble_ms"),
        "waiting_ms": column("waiting_ms"),
        "slowest_compute_ms": unknown,
    }
    isolated = {
        "compute_ms": column("compute_isolated_ms"),
        "comm_ms": column("comm_isolated_ms", beside="comm_slowdown"),
        "step_ms": column("e2e_sequential_ms", "profiler_slowdown_isolated"),
        "compute_busy_ms": column("compute_busy_isolated_ms"),
        "comm_busy_ms": column("comm_isolated_ms"),
        "hidden_comm_ms": column("comm_isolated_ms", share_of="residual_comm_overlap"),
        "covered_compute_ms": column("compute_isolated_ms", share_of="residual_overlap"),
        "p2p_ms": unknown,
        "idle_ms": column("idle_isolated_ms"),
        "bubble_ms": unknown,
        "waiting_ms": column("waiting_isolated_ms"),
        "slowest_compute_ms": column("slowest_compute_ms", earlier="compute_busy_isolated_ms"),
    }
    profiled = [times[name] for times in (overlapped, isolated) for name in ProfiledMeans._fields]
    columns = [column("e2e_overlapped_ms"), column("e2e_sequential_ms"), *profiled]
    return np.array(columns, dtype=np.float64).T


def run_means(times: Floats) -> Floats:
    """The mean of each time over the windows that know it; NaN where none does."""
    known = np.isfinite(times)
    with np.errstate(all="ignore"):
        return np.asarray(np.where(known, times, 0.0).sum(axis=0) / known.sum(axis=0))


def run_deviations(formula: Formula, scale: Scale, times: Floats) -> Floats | None:
    """What each window adds to a run's figure, on its scale: their spread is that of the figure of the mean times.

    To first order. The figures of the windows themselves spread less where long steps are rare: their mean is another.

    Args:
        formula: of the figure.
        scale: of its interval.
        times: of ``run_times``, of the windows that have the figure.
    """
    means = run_means(times)
    slopes = gradient(lambda moved: scale.to(formula.of(*picked(formula, moved))), [means], 0)
    if slopes is None:
        return None
    used = slopes != 0
    deviations = (times[:, used] - means[used]) @ slopes[used]
    return deviations if np.isfinite(deviations).all() else None
