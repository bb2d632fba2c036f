"""The latest window, and that of each arm, for Prometheus: a file for the node exporter, or a port to scrape."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from overlap_callbacks import _validation
from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.figure import Value
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.sinks.base import Sink, fit_name

# Prometheus keeps a series for every label value, for ever. So values are short and few.
MAX_LABEL_LENGTH = 100
MAX_LABEL_VALUES = 50


class BaseUnit(NamedTuple):
    """The unit of a figure for Prometheus and OpenTelemetry: both ask for base units, and name them differently.

    Attributes:
        ending: the unit at the end of a figure's name.
        suffix: the unit at the end of a metric's name for Prometheus.
        ucum: its code for OpenTelemetry.
        scale: factor from the record's unit.
    """

    ending: str
    suffix: str
    ucum: str
    scale: float


_UNITS = {
    "ms": BaseUnit("_ms", "_seconds", "s", 1e-3),
    "fraction": BaseUnit("_fraction", "_ratio", "1", 1.0),
    "W": BaseUnit("_w", "_watts", "W", 1.0),
    "J": BaseUnit("_j", "_joules", "J", 1.0),
    "MHz": BaseUnit("_mhz", "_hertz", "Hz", 1e6),
    "GB/s": BaseUnit("_gb_s", "_bytes_per_second", "By/s", 1e9),
    "bytes": BaseUnit("bytes", "_bytes", "By", 1.0),
}
_NO_UNIT = BaseUnit("", "", "", 1.0)
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
    """The metrics of the last window, in a file that is never incomplete, at a port while the job runs, or both.

    Times are in seconds, clocks in hertz, fractions named ``_ratio``. ``mode``, ``collective``, ``dimension``,
    ``stage``, ``arm`` and ``bound`` are labels: ``overlap_power_avg_watts{mode="overlapped"}``,
    ``overlap_comm_bytes{collective="allreduce"}``, ``overlap_arm_speedup_ratio{arm="prefetch_2_2"}``. What the last
    window did not measure is not there; of arms, the last window of each one counts.

    Args:
        path: of the file, in the folder of the node exporter's textfile collector; ends in ``.prom``.
        labels: put on every metric, e.g. ``{"job_name": "llama-70b"}``, to distinguish jobs on one machine.
        port: of rank 0's machine, for Prometheus to scrape; 0 for any free one. None for no port.
        host: address of the port. The default is reached from the same machine only.

    Attributes:
        port: while it is open, the port in use.

    Raises:
        TypeError, ValueError: a parameter is invalid, or neither ``path`` nor ``port`` is given.
        ImportError: (from ``open`` or ``log``) prometheus_client is not installed.
        OSError: (from ``open`` or ``log``) the port is taken, or the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        if path is None and port is None:
            raise ValueError("PrometheusSink needs a path, a port, or both")
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.suffix != ".prom":
            raise ValueError(f"path must end in .prom, or the node exporter does not read it; got {str(path)!r}")
        self.port = None if port is None else _validation.count("port", port, minimum=0, maximum=65535)
        self._host = host
        self._labels = _checked(labels or {})
        self._run: RunInfo | None = None
        # By arm, newest last; sequential steps have the empty name.
        self._reports: dict[str, OverlapReport | ArmReport] = {}
        self._families: Sequence[Any] = ()
        self._server: Any = None

    def open(self, run: RunInfo) -> None:
        self._run = run
        if self.port is not None and self._server is None:
            client = _client()
            registry = client.CollectorRegistry()
            registry.register(self)
            try:
                self._server, _ = client.start_http_server(self.port, self._host, registry)
            except OSError as error:
                raise OSError(f"port {self.port} of {self._host} cannot be used: {error}") from None
            self.port = self._server.server_port

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            with contextlib.suppress(OSError):
                # Processes forked meanwhile, such as a data loader's, have the socket too.
                server.socket.shutdown(socket.SHUT_RDWR)
            server.server_close()

    def log(self, report: OverlapReport) -> None:
        self._write("", report)

    def log_arm(self, report: ArmReport) -> None:
        self._write(report.arm.name, report)

    def _write(self, arm: str, report: OverlapReport | ArmReport) -> None:
        client = _client()
        self._reports.pop(arm, None)
        self._reports[arm] = report
        self._families = self._collected()
        if self.path is not None:
            registry = client.CollectorRegistry()
            registry.register(self)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                client.write_to_textfile(str(self.path), registry)  # writes another file, then renames it
                self.path.chmod(0o644)  # the node exporter runs as another user
            except OSError:
                self.close()  # a sink that fails is not called again, and the port would stay at this window
                raise

    def collect(self) -> Sequence[Any]:
        """The metrics of the last window; the port's own threads call it too."""
        return self._families

    def _collected(self) -> Sequence[Any]:
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
        return tuple(families.values())

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
                labels = {"arm": label_value(arm)}
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
        yield "overlap_run_info", "what was measured", {name: label_value(text) for name, text in info.items()}, 1.0


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise ImportError(
            "prometheus_client is not installed: pip install 'overlap-callbacks[prometheus]', or leave "
            "PrometheusSink out"
        ) from None
    return prometheus_client


def gauge(value: Value) -> Gauge:
    """The name, label and scale of a value for Prometheus."""
    namespace, name, unit = names(value)
    return Gauge("_".join(filter(None, (*namespace, name))) + unit.suffix, *label_of(value), unit.scale)


def names(value: Value) -> tuple[list[str], str, BaseUnit]:
    """The namespace of a value, its name without unit and labels (which may be empty), and its unit."""
    figure = value.figure
    unit = _UNITS.get(figure.unit, _NO_UNIT)
    stem = fit_name(figure.name).removesuffix(unit.ending).removesuffix(unit.suffix).strip("_")
    namespace = ["overlap"] if figure.section == "overlap" else ["overlap", figure.section]
    return namespace, "_".join(filter(None, (stem, value.bound))), unit


def label_of(value: Value) -> tuple[str, str]:
    """Its label: name and value, empty if it has none."""
    name, text = next(iter(value.labels.items()), ("", ""))
    return name, label_value(text)


def label_value(value: str) -> str:
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
    return {name: label_value(value) for name, value in labels.items()}
