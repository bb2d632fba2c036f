"""The last window for Prometheus: a text file that the node exporter's textfile collector reads."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.results.catalogue import FIGURES, power_meanings
from overlap_callbacks.analysis.results.experts import expert_meanings
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.results.throughput_metrics import throughput_meanings
from overlap_callbacks.sinks.base import Sink
from overlap_callbacks.sinks.metric_keys import NAMED_SECTIONS, describe, fit_name, split

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
_OWN_LABELS = frozenset({"mode", "collective", "dimension"})


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

    Times are in seconds, clocks in hertz, fractions named ``_ratio``. ``mode``, ``collective`` and ``dimension`` are
    labels: ``overlap_power_avg_watts{mode="overlapped"}``, ``overlap_comm_bytes{collective="allreduce"}``. What the
    last window did not measure is not in the file.

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

    def open(self, run: RunInfo) -> None:
        self._run = run

    def log(self, report: OverlapReport) -> None:
        try:
            from prometheus_client import CollectorRegistry, write_to_textfile
        except ImportError:
            raise ImportError(
                "prometheus_client is not installed: pip install 'overlap-callbacks[prometheus]', or leave "
                "PrometheusSink out"
            ) from None
        registry = CollectorRegistry()
        registry.register(_Families(self._families(report)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(self.path), registry)  # writes another file, then renames it
        self.path.chmod(0o644)  # the node exporter runs as another user

    def _families(self, report: OverlapReport) -> list[Any]:
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        values: dict[tuple[str, str], set[str]] = {}

        def add(gauge: Gauge, meaning: str, value: float) -> None:
            seen = values.setdefault((gauge.name, gauge.label), set())
            # If one series stood in the file twice, the collector would reject the whole file.
            if gauge.label_value in seen or len(seen) >= MAX_LABEL_VALUES:
                return
            seen.add(gauge.label_value)
            own = [gauge.label] if gauge.label else []
            family = families.setdefault(
                gauge.name, GaugeMetricFamily(gauge.name, meaning, labels=[*self._labels, *own])
            )
            family.add_metric([*self._labels.values(), *([gauge.label_value] if own else [])], value * gauge.scale)

        for key, value in report.metrics().items():
            if math.isfinite(value):
                metric = gauge(key)
                add(metric, _meaning(key, metric), value)
        add(Gauge("overlap_window_first_step", "", "", 1.0), "training step of the last window", report.first_step)
        info = {"device": report.device, "backend": report.backend, "world_size": str(report.world_size)}
        if self._run is not None:
            info |= {"framework": self._run.framework, "version": self._run.library_version}
        family = GaugeMetricFamily("overlap_run_info", "what was measured", labels=[*self._labels, *info])
        family.add_metric([*self._labels.values(), *map(_label_value, info.values())], 1.0)
        return [*families.values(), family]


class _Families:
    """What the registry asks for metrics."""

    def __init__(self, families: Iterable[Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        return self._families


def gauge(key: str) -> Gauge:
    """The name, label and scale of a metric for Prometheus."""
    parts_of_key = describe(key)
    section, value, name = split(parts_of_key.figure)  # as a label, a name of the job's may have any character
    label = NAMED_SECTIONS[section] if value else ""
    name = fit_name(name.removeprefix("_") if value else name)
    if section in ("power", "device"):
        for mode in Mode:
            if name.startswith(f"{mode.value}_"):
                label, value, name = "mode", mode.value, name.removeprefix(f"{mode.value}_")
    suffix, unit, scale = _UNITS.get(parts_of_key.unit, ("", "", 1.0))
    stem = name.removesuffix(suffix) if suffix else name
    bound = f"_{parts_of_key.bound}" if parts_of_key.bound else ""
    parts = ["overlap", *([section] if section not in ("", "overlap") else []), *([stem.strip("_")] if stem else [])]
    return Gauge("_".join(parts) + bound + unit, label, _label_value(value), scale)


def _meaning(key: str, metric: Gauge) -> str:
    figure = describe(key).figure
    if metric.label in NAMED_SECTIONS.values():  # one text for all values of the label
        return f"{split(figure)[2].strip('_').replace('_', ' ')} by {metric.label}"
    known = {
        **{one.key: one.meaning for one in FIGURES},
        **power_meanings(),
        **throughput_meanings(),
        **expert_meanings(),
    }
    return known.get(figure, figure.partition("/")[2].replace("_", " "))


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
