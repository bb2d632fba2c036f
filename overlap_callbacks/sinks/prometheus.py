"""The last window, and that of each arm, for Prometheus: a file that the node exporter's textfile collector reads."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.figure import Value
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.sinks.base import Sink, fit_name

# Prometheus keeps a series for each value of a label, for ever. So values are short, and few.
MAX_LABEL_LENGTH = 100
MAX_LABEL_VALUES = 50

# By convention, Prometheus has base units, and a metric's name ends in its unit.
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
_OWN_LABELS = frozenset({"mode", "collective", "dimension", "stage", "arm"})


class Gauge(NamedTuple):
    """A metric as Prometheus has it.

    Attributes:
        name: with its unit.
        label, label_value: tell it from others of the same name; empty where there is one alone.
        scale: factor from our unit to Prometheus's.
    """

    name: str
    label: str
    label_value: str
    scale: float


class PrometheusSink(Sink):
    """Writes the metrics of the last window, and where they come from, to a file that is always whole.

    Times are in seconds, clocks in hertz, fractions named ``_ratio``. ``mode``, ``collective``, ``dimension``,
    ``stage`` and ``arm`` are labels: ``overlap_power_avg_watts{mode="overlapped"}``,
    ``overlap_comm_bytes{collective="allreduce"}``, ``overlap_arm_speedup_ratio{arm="prefetch_2_2"}``. What the last
    window did not measure is not in the file; of arms, the last window of each one counts.

    Args:
        path: in the collector's folder; ends in ``.prom``.
        labels: put on every metric, e.g. ``{"job_name": "llama-70b"}``, to tell jobs of a machine apart.

    Raises:
        TypeError, ValueError: ``path`` or ``labels`` is not as said here.
        ImportError: (from ``log``) prometheus_client is not installed.
        OSError: (from ``log``) the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], labels: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        if self.path.suffix != ".prom":
            raise ValueError(f"path must end in .prom, or the node exporter does not read it; got {str(path)!r}")
        self._labels = _checked(labels or {})
        self._run: RunInfo | None = None
        # By arm, the newest last; that of sequential steps under the empty name.
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
        registry.register(_Families(self._labels, self._reports, self._run))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(self.path), registry)  # writes another file, then renames it
        self.path.chmod(0o644)  # the node exporter runs as another user


class _Families:
    """What the registry asks for metrics.

    Args:
        labels: of every metric.
        reports: the last one of each arm, by its name, the newest last; one at least.
        run: what was measured; None if that is not known.
    """

    def __init__(
        self, labels: Mapping[str, str], reports: Mapping[str, OverlapReport | ArmReport], run: RunInfo | None
    ) -> None:
        self._labels = labels
        self._families: dict[str, Any] = {}
        self._seen: dict[tuple[str, str], set[str]] = {}
        # What a window cost is in every report. That of the newest window counts: a series is taken once.
        newest_first = list(reports.items())[::-1]
        for arm, report in newest_first:
            self._take(arm, report)
        self._take_run(newest_first[0][1], run)

    def collect(self) -> Iterable[Any]:
        return self._families.values()

    def _take(self, arm: str, report: OverlapReport | ArmReport) -> None:
        for value in report.values():
            if math.isfinite(value.number):
                self._add(gauge(value), value.figure.meaning, value.number)
        if arm:
            first = Gauge("overlap_arm_window_first_step", "arm", _label_value(arm), 1.0)
            self._add(first, "training step of the arm's last window", report.first_step)
        else:
            first = Gauge("overlap_window_first_step", "", "", 1.0)
            self._add(first, "training step of the last window", report.first_step)

    def _take_run(self, report: OverlapReport | ArmReport, run: RunInfo | None) -> None:
        from prometheus_client.core import GaugeMetricFamily

        info = {"device": report.device, "backend": report.backend, "world_size": str(report.world_size)}
        if run is not None:
            info |= {"framework": run.framework, "version": run.library_version}
        family = GaugeMetricFamily("overlap_run_info", "what was measured", labels=[*self._labels, *info])
        family.add_metric([*self._labels.values(), *map(_label_value, info.values())], 1.0)
        self._families[family.name] = family

    def _add(self, gauge: Gauge, meaning: str, value: float) -> None:
        from prometheus_client.core import GaugeMetricFamily

        seen = self._seen.setdefault((gauge.name, gauge.label), set())
        # If one series stood in the file twice, the collector would reject the whole file.
        if gauge.label_value in seen or len(seen) >= MAX_LABEL_VALUES:
            return
        seen.add(gauge.label_value)
        own = [gauge.label] if gauge.label else []
        if gauge.name not in self._families:
            self._families[gauge.name] = GaugeMetricFamily(gauge.name, meaning, labels=[*self._labels, *own])
        values = [*self._labels.values(), *([gauge.label_value] if own else [])]
        self._families[gauge.name].add_metric(values, value * gauge.scale)


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
