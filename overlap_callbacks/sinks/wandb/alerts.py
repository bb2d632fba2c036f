"""An alert when a figure's interval passes a limit of the user's, and no second one before it was back within it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import msgspec

from overlap_callbacks._log import logger
from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.catalogue import FIGURES, MEASUREMENT_OVERHEAD, Figure, figure_named
from overlap_callbacks.analysis.results.environment import Severity
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport

_NAMES = frozenset(figure.name for figure in (*FIGURES, MEASUREMENT_OVERHEAD))


class Alert(msgspec.Struct, frozen=True):
    """A limit that was passed, or a finding.

    Attributes:
        name: of the figure, or of the finding's rule.
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
        unknown = [name for name in limits if name not in _NAMES]
        if unknown:
            raise ValueError(f"alerts has {unknown[0]!r}, which is no figure; allowed are {', '.join(sorted(_NAMES))}")
        self._limits = {name: _finite(name, limit) for name, limit in limits.items()}
        self._passed: set[str] = set()
        self._without_interval: set[str] = set()

    def passed(self, report: OverlapReport) -> list[Alert]:
        """The limits that this window passes and the one before did not.

        A limit is passed where the whole 95% interval lies beyond it; else it may be chance. It is passed no more once
        the figure itself is back within. A figure that was not measured, or that means nothing in an invalid window,
        changes nothing.
        """
        if report.control:
            return []  # both arms ran overlapped: every difference is chance
        metrics = report.metrics()
        alerts = []
        for name, limit in self._limits.items():
            figure = figure_named(name)
            value = metrics.get(figure.key)
            if value is None:
                continue
            if not _is_beyond(figure, value, limit):
                self._passed.discard(name)
            elif name not in self._passed and self._is_sure(figure, limit, metrics):
                self._passed.add(name)
                alerts.append(_alert(figure, value, limit, metrics, report))
        return alerts

    def _is_sure(self, figure: Figure, limit: float, metrics: Mapping[str, float]) -> bool:
        """Whether the end of the interval that is nearest to the limit is beyond it too."""
        if figure is MEASUREMENT_OVERHEAD:
            return True  # it is counted, not estimated
        bound = metrics.get(f"{figure.key}_ci_{'high' if figure.less_is_worse else 'low'}")
        if bound is None:
            if figure.name not in self._without_interval:
                self._without_interval.add(figure.name)
                logger.warning(
                    "overlap-callbacks: alerts[%r] is not watched in windows whose blocks are too few for an interval",
                    figure.name,
                )
            return False
        return _is_beyond(figure, bound, limit)


def finding_alerts(report: OverlapReport, known: set[str]) -> list[Alert]:
    """An alert for each serious finding in the environment whose rule is not in ``known``, to which it is added."""
    alerts = []
    for finding in report.findings:
        if finding.severity is Severity.SERIOUS and finding.rule not in known:
            known.add(finding.rule)
            text = f"{finding.message} {finding.action} {finding.source}"
            alerts.append(Alert(finding.rule, f"Overlap: {finding.rule.replace('-', ' ')}", text))
    return alerts


def _finite(name: str, limit: Any) -> float:
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real):
        raise TypeError(f"alerts[{name!r}] must be a finite number, got {limit!r} (a {type(limit).__name__})")
    if not math.isfinite(limit):
        raise ValueError(f"alerts[{name!r}] must be a finite number, got {limit!r}")
    return float(limit)


def _is_beyond(figure: Figure, value: float, limit: float) -> bool:
    return value < limit if figure.less_is_worse else value > limit


def _alert(figure: Figure, value: float, limit: float, metrics: Mapping[str, float], report: OverlapReport) -> Alert:
    side = "below" if figure.less_is_worse else "above"
    shown, bound = PLAIN.figure(figure, value), PLAIN.quantity(limit, figure.unit)
    low, high = metrics.get(f"{figure.key}_ci_low"), metrics.get(f"{figure.key}_ci_high")
    interval = PLAIN.figure_interval(figure, Estimate(value, low, high, 0, 0))
    in_brackets = f" (95% interval {interval})" if interval else ""
    return Alert(
        figure.name,
        f"Overlap: {figure.short} is {shown}, {side} {bound}",
        f"{figure.short} was {shown}{in_brackets} in the window at step {report.first_step}; the limit is {bound}.",
    )
