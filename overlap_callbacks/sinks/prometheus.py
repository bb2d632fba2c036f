"""The latest window, and that of each arm, for Prometheus: a file for the node exporter's textfile collector."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.figure import Value
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.sinks.base import Sink, fit_name

# Prometheus keeps a series for every label value, for ever. So values are short and few.
MAX_LABEL_LENGTH = 100
MAX_LABEL_VALUES = 50

# By convention, Prometheus uses base units, and a metric's name ends in its unit.
_UNITS = {
    "ms": ("_ms", "_seconds", 1e-3),
    "fraction": ("_fraction", "_ratio", 1.0),
    "W": ("_w", "_watts", 1.0),
    "J": ("_j", "_joules", 1.0),
    "MHz": ("_mhz", "_hertz", 1e6),
    "GB/s": ("_gb_s", "_bytes_per_second", 1e9),
    "bytes": ("bytes", "_bytes", 1.0),
}
_LABEL_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
_OWN_LABELS = frozenset({"mode", "collective", "dimension", "stage", "arm", "bound"})


class Gauge(NamedTuple):
    """A metric in Prometheus's form.

    Attributes:
        name: with its unit.
        label, label_value: distinguish it from others of the same name; empty if there are none.
        scale: factor from the record's unit to Prometheus's.
    """

    name: str
    label: str
    label_value: str
    scale: float


class PrometheusSink(Sink):
    """Writes the metrics of the last window, and where they come from, to a file that is never incomplete.

    Times are in seconds, clocks in hertz, fractions named ``_ratio``. ``mode``, ``collective``, ``dimension``,
    ``stage``, ``arm`` and ``bound`` are labels: ``overlap_power_avg_watts{mode="overlapped"}``,
    ``overlap_comm_bytes{collective="allreduce"}``, ``overlap_arm_speedup_ratio{arm="prefetch_2_2"}``. What the last
    window did not measure is not in the file; of arms, the last window of each one counts.

    Args:
        path: in the collector's folder; ends in ``.prom``.
        labels: put on every metric, e.g. ``{"job_name": "llama-70b"}``, to distinguish jobs on one machine.

    Raises:
        TypeError, ValueError: ``path`` or ``labels`` is invalid.
        ImportError: (from ``log``) prometheus_client is not installed.
        OSError: (from ``log``) the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], labels: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        if self.path.suffix != ".prom":
            raise ValueError(f"path must end in .prom, or the node exporter does not read it; got {str(path)!r}")
        self._labels = _checked(labels or {})
        self._run: RunInfo | None = None
        # By arm, newest last; sequential steps have the empty name.
        self._reports: dict[str, OverlapReport | ArmReport] = {}

    def open(self, run: RunInfo) -> None:
        self._run = run

    def log(self, report: OverlapReport) -> None:
        self._write("", report)

    def log_arm(self, report: ArmReport) -> None:
        self._write(report.arm.name, report)

    def _write(self, arm: str, report: OverlapReport | ArmReport) -> None:
        try:
            from prometheus_client import CollectorRegistry, write_to_textfile
        except ImportError:
            raise ImportError(
                "prometheus_client is not installed: pip install 'overlap-callbacks[prometheus]', or leave "
                "PrometheusSink out"
            ) from None
        self._reports.pop(arm, None)
        self._reports[arm] = report
        registry = CollectorRegistry()
        registry.register(self)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(self.path), registry)  # writes another file, then renames it
        self.path.chmod(0o644)  # the node exporter runs as another user

    def collect(self) -> Iterable[Any]:
        """The metrics. Each series comes once, or the registry would reject the whole file; few series per metric."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        taken: dict[str, set[tuple[str, ...]]] = {}
        for name, meaning, labels, value in self._series():
            series, known = tuple(labels.values()), taken.setdefault(name, set())
            if series in known or len(known) >= MAX_LABEL_VALUES:
                continue
            known.add(series)
            if name not in families:
                families[name] = GaugeMetricFamily(name, meaning, labels=[*self._labels, *labels])
            families[name].add_metric([*self._labels.values(), *series], value)
        return families.values()

    def _series(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        """Name, meaning, labels and value of each; the newest window first, since only a series' first value counts."""
        newest_first = list(self._reports.items())[::-1]
        for arm, report in newest_first:
            for value in report.values():
                found = gauge(value)
                if math.isfinite(value.number):
                    labels = {found.label: found.label_value} if found.label else {}
                    yield found.name, value.figure.meaning, labels, value.number * found.scale
            if arm:
                labels = {"arm": _label_value(arm)}
                yield (
                    "overlap_arm_window_first_step",
                    "training step of the arm's last window",
                    labels,
                    report.first_step,
                )
            else:
                yield "overlap_window_first_step", "training step of the last window", {}, report.first_step
            if isinstance(report, OverlapReport) and report.bound:
                yield "overlap_bound_info", "what bounds an overlapped step", {"bound": report.bound}, 1.0
        newest = newest_first[0][1]
        info = {"device": newest.device, "backend": newest.backend, "world_size": str(newest.world_size)}
        if self._run is not None:
            info |= {"framework": self._run.framework, "version": self._run.library_version}
        yield "overlap_run_info", "what was measured", {name: _label_value(text) for name, text in info.items()}, 1.0


def gauge(value: Value) -> Gauge:
    """The name, label and scale of a value for Prometheus."""
    figure = value.figure
    suffix, base_unit, scale = _UNITS.get(figure.unit, ("", "", 1.0))
    stem = fit_name(figure.name).removesuffix(suffix).strip("_")
    section = "" if figure.section == "overlap" else figure.section
    name = "_".join([part for part in ("overlap", section, stem, value.bound) if part]) + base_unit
    label, text = next(iter(value.labels.items()), ("", ""))
    return Gauge(name, label, _label_value(text), scale)


def _label_value(value: str) -> str:
    return safe_text.clean(value, MAX_LABEL_LENGTH)


def _checked(labels: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels must be a mapping of names to values, got {labels!r} (a {type(labels).__name__})")
    for name, value in labels.items():
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name) or name in _OWN_LABELS:
            raise ValueError(
                f"labels: a name must be of letters, digits and underscores, and none of "
                f"{', '.join(sorted(_OWN_LABELS))}; got {name!r}"
            )
        if not isinstance(value, str):
            raise TypeError(f"labels[{name!r}] must be text, got {value!r} (a {type(value).__name__})")
    return {name: _label_value(value) for name, value in labels.items()}
