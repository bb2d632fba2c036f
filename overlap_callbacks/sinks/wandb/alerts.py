"""Alerts: one when a run's figure passes a limit of the user's, and no second one before it has been back within it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import msgspec

from overlap_callbacks._log import logger
from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.catalogue import FIGURES, MEASUREMENT_OVERHEAD, compares, figure_named
from overlap_callbacks.analysis.results.environment import Severity
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.report import OverlapReport

_NAMES = frozenset(figure.name for figure in (*FIGURES, MEASUREMENT_OVERHEAD))


class Alert(msgspec.Struct, frozen=True):
    """A passed limit, or a finding: the name of the figure or of the finding's rule, a title, and a text."""

    name: str
    title: str
    text: str


class Limits:
    """Watches figures against limits, by name, e.g. ``{"compute_slowdown": 0.2}``; times are in milliseconds.

    Raises:
        TypeError: ``limits`` is not a mapping, or a limit is not a number.
        ValueError: a name is not a figure's, or a limit cannot be one (``Figure.refusal``).
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

    def passed(self, report: OverlapReport, figures: Mapping[str, Estimate]) -> list[Alert]:
        """The limits that the run passes with this window and did not before.

        A limit is passed if the whole 95% interval of the run so far lies beyond it; otherwise it may be noise. The
        interval is valid at every look: there is one after each window. That of the cost, and those of an invalid
        window, are of the window alone. A limit is no longer passed once the figure itself is back within. A figure
        that was not measured changes nothing.
        """
        if report.control:
            return []  # both arms ran overlapped: every difference is noise
        # An invalid window is not in the run's figures. Figures that need no comparison, such as residual overlap, are
        # used alone.
        own = {name: figure for name, figure in report.figures().items() if not compares(name)}
        known = dict(figures) if report.valid else own
        if report.cost is not None:
            known[MEASUREMENT_OVERHEAD.name] = report.cost
        alerts = []
        for name, limit in self._limits.items():
            figure, estimate = figure_named(name), known.get(name)
            if estimate is None:
                continue
            if not _is_beyond(figure, estimate.value, limit):
                self._passed.discard(name)
            elif name not in self._passed and self._is_sure(figure, limit, estimate):
                self._passed.add(name)
                alerts.append(_alert(figure, estimate, limit, report))
        return alerts

    def _is_sure(self, figure: Figure, limit: float, estimate: Estimate) -> bool:
        """Whether the end of the interval nearest to the limit is beyond it too."""
        if figure is MEASUREMENT_OVERHEAD and estimate.ci_low is None:
            return True  # from an earlier version's record: counted, not estimated
        bound = estimate.ci_high if figure.less_is_worse else estimate.ci_low
        if bound is None:
            if figure.name not in self._without_interval:
                self._without_interval.add(figure.name)
                logger.warning(
                    "overlap-callbacks: alerts[%r] is not watched while blocks and windows are too few for an interval "
                    "[OC611]",
                    figure.name,
                )
            return False
        return _is_beyond(figure, bound, limit)


def finding_alerts(report: OverlapReport, known: set[str]) -> list[Alert]:
    """An alert for each serious finding in the environment whose rule is not in ``known``; adds its rule there."""
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
    refusal = figure_named(name).refusal(float(limit))
    if refusal:
        raise ValueError(f"alerts[{name!r}] {refusal}")
    return float(limit)


def _is_beyond(figure: Figure, value: float, limit: float) -> bool:
    return value < limit if figure.less_is_worse else value > limit


def _alert(figure: Figure, estimate: Estimate, limit: float, report: OverlapReport) -> Alert:
    side = "below" if figure.less_is_worse else "above"
    shown, bound = PLAIN.figure(figure, estimate.value), PLAIN.quantity(limit, figure.unit)
    interval = PLAIN.ends(estimate, figure.unit, signed=figure.signed)  # of use, since all of it is beyond the limit
    alone = figure is MEASUREMENT_OVERHEAD or not report.valid
    looks = "" if alone else ", valid however often you look"
    in_brackets = f" (95% interval {interval}{looks})" if interval else ""
    when = "in" if alone else "up to"
    return Alert(
        figure.name,
        f"Overlap: {figure.short} is {shown}, {side} {bound}",
        f"{figure.short} was {shown}{in_brackets} {when} the window at step {report.first_step}; the limit is {bound}.",
    )
