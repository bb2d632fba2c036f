"""When a figure passes a limit of the user's: said once, and again only after it has been back within."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import msgspec

from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.report import OverlapReport

# Of these, less is worse: the limit is passed from above.
LESS_IS_WORSE = frozenset({"speedup_vs_sequential", "hidden_comm_fraction"})
_UNITS = {**{figure.name: figure.unit for figure in FIGURES}, "measurement_overhead": "fraction"}


class Alert(msgspec.Struct, frozen=True):
    """A limit that was passed.

    Attributes:
        name: of the figure.
        title: a line.
        text: the figure with its interval, the limit and where it happened.
    """

    name: str
    title: str
    text: str


class Limits:
    """Watches figures.

    Args:
        limits: by the figure's name, e.g. ``{"compute_slowdown": 0.2}``; fractions are fractions, times milliseconds.

    Raises:
        TypeError: ``limits`` is no mapping, or a limit is no number.
        ValueError: a name that is no figure, or a limit that is not finite.
    """

    def __init__(self, limits: Mapping[str, float] | None) -> None:
        if limits is None:
            limits = {}
        if not isinstance(limits, Mapping):
            raise TypeError(
                f"alerts must be a mapping from a figure's name to its limit, got {limits!r} "
                f"(a {type(limits).__name__})"
            )
        unknown = [name for name in limits if name not in _UNITS]
        if unknown:
            raise ValueError(f"alerts has {unknown[0]!r}, which is no figure; allowed are {', '.join(sorted(_UNITS))}")
        self._limits = {name: _finite(name, limit) for name, limit in limits.items()}
        self._passed: set[str] = set()

    def passed(self, report: OverlapReport) -> list[Alert]:
        """The limits that this window passes and the one before did not.

        A figure that was not measured, or that means nothing in an invalid window, changes nothing.
        """
        if report.control:
            return []  # both arms ran overlapped: every difference is chance
        metrics = report.metrics()
        found = []
        for name, limit in self._limits.items():
            value = metrics.get(f"overlap/{name}")
            if value is None:
                continue
            beyond = value < limit if name in LESS_IS_WORSE else value > limit
            if beyond and name not in self._passed:
                found.append(_alert(name, value, limit, metrics, report))
            (self._passed.add if beyond else self._passed.discard)(name)
        return found


def _finite(name: str, limit: Any) -> float:
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real):
        raise TypeError(f"alerts[{name!r}] must be a finite number, got {limit!r} (a {type(limit).__name__})")
    if not math.isfinite(limit):
        raise ValueError(f"alerts[{name!r}] must be a finite number, got {limit!r}")
    return float(limit)


def _alert(name: str, value: float, limit: float, metrics: Mapping[str, float], report: OverlapReport) -> Alert:
    side = "below" if name in LESS_IS_WORSE else "above"
    shown, bound = _show(name, value), _show(name, limit)
    low, high = metrics.get(f"overlap/{name}_ci_low"), metrics.get(f"overlap/{name}_ci_high")
    interval = "" if low is None or high is None else f" (95 % interval {_show(name, low)} to {_show(name, high)})"
    words = name.removesuffix("_ms").replace("_", " ")
    return Alert(
        name,
        f"Overlap: {words} is {shown}, {side} {bound}",
        f"{words} was {shown}{interval} in the window at step {report.first_step}; the limit is {bound}.",
    )


def _show(name: str, value: float) -> str:
    return f"{value:.2f} ms" if _UNITS[name] == "ms" else f"{value:.1%}"
