"""Reports to an OpenTelemetry collector."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator
from typing import Any

from overlap_callbacks import _validation
from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.figure import Value
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.sinks.base import DETAILS, Sink, chosen
from overlap_callbacks.sinks.prometheus import MAX_LABEL_VALUES, label_of, label_value, names

# Figures that OpenTelemetry's conventions for hardware have a name for. They have none for a GPU's clock.
_HARDWARE = {"power/{mode}_avg_w": "hw.power", "gpu/{mode}_sm_busy_fraction": "hw.gpu.utilization"}


class OpenTelemetrySink(Sink):
    """Sends each window's metrics to an OpenTelemetry collector, as gauges, by OTLP over HTTP.

    Names and units are those of ``PrometheusSink`` in OpenTelemetry's form: ``overlap.e2e_overlapped`` in ``s``,
    ``overlap.compute_slowdown_ratio`` in ``1``. Two figures have the names of OpenTelemetry's conventions for hardware:
    ``hw.power`` in ``W`` and ``hw.gpu.utilization``, with ``hw.id`` ``mean``, as they are means over the job's devices.
    ``mode``, ``collective``, ``dimension``, ``stage`` and ``arm`` are attributes. The resource has ``service.name``
    (``overlap-callbacks``), ``service.instance.id`` and ``host.name``; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    override them.

    Args:
        endpoint: where metrics go, e.g. ``http://collector:4318/v1/metrics``. By default what the environment says
            (OTEL_EXPORTER_OTLP_ENDPOINT, and so on), else the collector of this machine.
        detail: ``"short"``, the list that W&B gets by default, or ``"all"``.

    Raises:
        ValueError: ``detail`` is wrong.
        ImportError: (from ``log``) OpenTelemetry's SDK or its exporter is not installed.
        ConnectionError: (from ``log``) the collector did not take a window.
    """

    def __init__(self, endpoint: str | None = None, *, detail: str = "short") -> None:
        self._endpoint = endpoint
        self._detail = _validation.one_of("detail", detail, allowed=DETAILS)
        self._run: RunInfo | None = None
        self._exporter: Any = None
        self._resource: Any = None

    def open(self, run: RunInfo) -> None:
        self._run = run

    def log(self, report: OverlapReport | ArmReport) -> None:
        if self._exporter is None:
            self._start()
        from opentelemetry.sdk.metrics import export
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        now_ns = time.time_ns()
        metrics: dict[str, Any] = {}
        sent: dict[str, set[tuple[str, ...]]] = {}
        for name, meaning, unit, attributes, number in self._points(report):
            series, known = tuple(attributes.values()), sent.setdefault(name, set())
            if series in known or len(known) >= MAX_LABEL_VALUES:
                continue
            known.add(series)
            if name not in metrics:
                metrics[name] = export.Metric(name, meaning, unit, export.Gauge([]))
            metrics[name].data.data_points.append(export.NumberDataPoint(attributes, now_ns, now_ns, number))
        scope = export.ScopeMetrics(InstrumentationScope("overlap_callbacks", __version__), list(metrics.values()), "")
        data = export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not export.MetricExportResult.SUCCESS:
            raise ConnectionError("the OpenTelemetry collector did not take the metrics of a window")

    log_arm = log

    def close(self) -> None:
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.shutdown()

    def _points(self, report: OverlapReport | ArmReport) -> Iterator[tuple[str, str, str, dict[str, str], float]]:
        """Name, meaning, unit, attributes and value of each."""
        for value in chosen(report.values(), self._detail):
            if math.isfinite(value.number):
                yield metric(value, report.device)
        arm = {"arm": label_value(report.arm.name)} if isinstance(report, ArmReport) else {}
        yield "overlap.window_first_step", "training step of the last window", "", arm, float(report.first_step)

    def _start(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        except ImportError:
            raise ImportError(
                "OpenTelemetry is not installed: pip install 'overlap-callbacks[otel]', or leave OpenTelemetrySink out"
            ) from None
        facts = {"service.name": "overlap-callbacks", "service.instance.id": str(uuid.uuid4())}
        if self._run is not None and self._run.hosts_named:
            facts["host.name"] = self._run.hostname
        self._resource = Resource(facts).merge(OTELResourceDetector().detect())
        self._exporter = OTLPMetricExporter(endpoint=self._endpoint)


def metric(value: Value, device: str) -> tuple[str, str, str, dict[str, str], float]:
    """Name, meaning, unit, attributes and value for OpenTelemetry."""
    namespace, name, unit = names(value)
    label, text = label_of(value)
    attributes = {label: text} if label else {}
    # A name without its unit must be unique here.
    ending = unit.suffix if unit.ucum == "1" or not name else ""
    full_name = ".".join([*namespace, f"{name}{ending}".strip("_")])
    if value.figure.key in _HARDWARE and not value.bound:
        full_name = _HARDWARE[value.figure.key]
        kind = "cpu" if device == "cpu" else "gpu"
        attributes |= {"hw.id": "mean", "hw.type": kind, "hw.name": label_value(device)}
        if full_name == "hw.gpu.utilization":
            attributes["hw.gpu.task"] = "general"
    return full_name, value.figure.meaning, unit.ucum, attributes, value.number * unit.scale
