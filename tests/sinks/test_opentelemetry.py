"""Reports to a collector: a server of this process that reads OTLP by OpenTelemetry's own definitions."""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.results.catalogue import SHORT_KEYS
from overlap_callbacks.sinks import OpenTelemetrySink
from overlap_callbacks.sinks.opentelemetry import metric
from overlap_callbacks.sinks.prometheus import gauge
from tests.report.arm_runs import arm_window
from tests.report.runs import full_report, run_info, window
from tests.sinks.conftest import Collector

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


def texts(attributes: Any) -> dict[str, str]:
    return {attribute.key: attribute.value.string_value for attribute in attributes}


def sent(collector: Collector, *reports: Any, detail: str = "short", **facts: Any) -> list[Any]:
    """One message for each window, as the collector read it."""
    sink = OpenTelemetrySink(collector.endpoint, detail=detail)
    sink.open(run_info(**facts))
    for report in reports:
        (sink.log_arm if hasattr(report, "arm") else sink.log)(report)
    sink.close()
    sink.close()
    assert len(collector.requests) == len(reports)
    return [request.resource_metrics[0] for request in collector.requests]


def points(resource: Any) -> dict[tuple[str, str], tuple[float, str, dict[str, str]]]:
    """Value, unit and attributes of each, by name and mode."""
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "overlap_callbacks"
    return {
        (one.name, texts(point.attributes).get("mode", "")): (point.as_double, one.unit, texts(point.attributes))
        for one in scope.metrics
        for point in one.gauge.data_points
    }


def test_a_window_is_sent_under_names_of_the_conventions(collector: Collector) -> None:
    report = window(0, power=True)
    (resource,) = sent(collector, report)
    found, metrics = points(resource), report.metrics()
    assert found["overlap.e2e_overlapped", ""][:2] == (pytest.approx(metrics["overlap/e2e_overlapped_ms"] / 1e3), "s")
    assert found["overlap.compute_slowdown_ratio", ""][:2] == (metrics["overlap/compute_slowdown"], "1")
    assert found["overlap.speedup_vs_sequential_ci_low_ratio", ""][1] == "1"
    assert found["overlap.window_first_step", ""][0] == report.first_step
    hardware = {"hw.id": "mean", "hw.type": "gpu", "hw.name": "NVIDIA H200"}
    for mode in ("overlapped", "sequential"):
        assert found["hw.power", mode] == (metrics[f"power/{mode}_avg_w"], "W", {"mode": mode, **hardware})
    assert len(found) == 1 + len([value for value in report.values() if value.key_with({}) in SHORT_KEYS])


def test_the_resource_is_the_job_on_its_host(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    (resource,) = sent(collector, window(0))
    facts = texts(resource.resource.attributes)
    assert facts.pop("service.instance.id")
    assert facts == {"service.name": "overlap-callbacks", "host.name": "node-1"}
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llama")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    collector.requests.clear()
    (resource,) = sent(collector, window(0), hosts_named=False)
    facts = texts(resource.resource.attributes)
    assert (facts["service.name"], facts["deployment.environment.name"]) == ("llama", "lab")
    assert "host.name" not in facts


def test_hardware_names_and_units_are_those_of_the_package_of_the_conventions(collector: Collector) -> None:
    hw = pytest.importorskip("opentelemetry.semconv._incubating.metrics.hw_metrics")
    attributes = pytest.importorskip("opentelemetry.semconv._incubating.attributes.hw_attributes")
    resource = pytest.importorskip("opentelemetry.semconv.resource").ResourceAttributes
    if not hasattr(hw, "HW_GPU_UTILIZATION"):
        pytest.skip("this version of the conventions has no GPUs yet")
    (found,) = sent(collector, full_report(), detail="all")
    hardware = {name: rest for (name, _), rest in points(found).items() if name.startswith("hw.")}
    assert set(hardware) == {hw.HW_POWER, hw.HW_GPU_UTILIZATION}
    assert hardware[hw.HW_POWER][1] == "W"
    assert hardware[hw.HW_GPU_UTILIZATION][1] == "1"
    used = {key for _, _, texts in hardware.values() for key in texts} - {"mode"}
    assert used == {attributes.HW_ID, attributes.HW_TYPE, attributes.HW_NAME, attributes.HW_GPU_TASK}
    types = {value.value for value in attributes.HwTypeValues}
    assert {metric(value, device)[3].get("hw.type", "gpu") for value in full_report().values() for device in
            ("cpu", "NVIDIA H200")} <= types  # fmt: skip
    names = {resource.SERVICE_NAME, resource.SERVICE_INSTANCE_ID, resource.HOST_NAME}
    assert names <= set(texts(found.resource.attributes))


def test_names_are_those_of_prometheus_once_a_collector_passes_them_on() -> None:
    """By OpenTelemetry's rules: dots become underscores, and the unit ends the name."""
    suffixes = {"s": "_seconds", "1": "_ratio", "W": "_watts", "J": "_joules", "Hz": "_hertz", "By": "_bytes",
                "By/s": "_bytes_per_second", "": ""}  # fmt: skip
    taken: dict[str, set[str]] = {}
    for value in [*full_report().values(), *arm_window(0, power=True).values()]:
        name, meaning, unit, _, number = metric(value, "cpu")
        assert meaning
        if not name.startswith("hw."):
            taken[name] = taken.get(name, {unit}) | {unit}
            stem = name.replace(".", "_")
            assert stem.removesuffix(suffixes[unit]) + suffixes[unit] == gauge(value).name
        assert number == value.number * gauge(value).scale
    assert all(len(units) == 1 for units in taken.values())


def test_every_metric_on_request_and_that_of_an_arm_has_its_name(collector: Collector) -> None:
    report, arm = full_report(), arm_window(1)
    everything, of_arm = sent(collector, report, arm, detail="all")
    count = sum(len(one.gauge.data_points) for one in everything.scope_metrics[0].metrics)
    assert count == len(report.values()) + 1
    value, _, attributes = points(of_arm)["overlap.arm.speedup_ratio", ""]
    assert report.valid
    assert arm.speedup is not None
    assert (value, attributes) == (arm.speedup.value, {"arm": "prefetch_2_2"})
    assert points(of_arm)["overlap.window_first_step", ""][2] == {"arm": "prefetch_2_2"}


def test_an_invalid_window_has_no_comparison(collector: Collector) -> None:
    (resource,) = sent(collector, msgspec.structs.replace(window(0), valid=False))
    found = points(resource)
    assert found["overlap.valid", ""][0] == 0
    assert ("overlap.speedup_vs_sequential_ratio", "") not in found


def test_a_number_that_is_none_is_not_sent(collector: Collector) -> None:
    (resource,) = sent(collector, msgspec.structs.replace(window(0), measurement_overhead=math.nan))
    assert all(math.isfinite(value) for value, _, _ in points(resource).values())


def test_the_environment_names_the_collector(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint.removesuffix("/v1/metrics"))
    sink = OpenTelemetrySink()
    sink.log(window(0))
    sink.close()
    assert len(collector.requests) == 1


def test_a_collector_that_refuses_is_an_error(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    collector.status = 400
    sink = OpenTelemetrySink(collector.endpoint)
    with caplog.at_level(logging.CRITICAL), pytest.raises(ConnectionError, match="did not take the metrics"):
        sink.log(window(0))
    sink.close()


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="detail must be one of short, all"):
        OpenTelemetrySink(detail="some")
