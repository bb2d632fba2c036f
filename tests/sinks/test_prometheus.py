from __future__ import annotations

import os
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from overlap_callbacks.analysis.results.arm import ArmReport, ComparedArm
from overlap_callbacks.analysis.results.window import DimensionTime
from overlap_callbacks.sinks import PrometheusSink
from overlap_callbacks.sinks.prometheus import MAX_LABEL_LENGTH, MAX_LABEL_VALUES, gauge
from tests.report.arm_runs import arm_window
from tests.report.runs import full_report, run_info, window

parser = pytest.importorskip("prometheus_client.parser")


def written(path: Path) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The file as Prometheus's own parser reads it."""
    found = {}
    for family in parser.text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def sink_with(path: Path, *reports: Any, **options: Any) -> PrometheusSink:
    sink = PrometheusSink(path, **options)
    sink.open(run_info())
    for report in reports:
        sink.log(report)
    return sink


@pytest.mark.parametrize(
    ("key", "name", "labels", "scale"),
    [
        ("overlap/e2e_overlapped_ms", "overlap_e2e_overlapped_seconds", ("", ""), 1e-3),
        ("overlap/e2e_overlapped_ms_ci_low", "overlap_e2e_overlapped_ci_low_seconds", ("", ""), 1e-3),
        ("overlap/compute_slowdown", "overlap_compute_slowdown_ratio", ("", ""), 1.0),
        ("overlap/hidden_comm_fraction", "overlap_hidden_comm_ratio", ("", ""), 1.0),
        ("overlap/comm_ratio_ci_low", "overlap_comm_ci_low_ratio", ("", ""), 1.0),
        ("overlap/overlap_ratio", "overlap_overlap_ratio", ("", ""), 1.0),
        ("overlap/valid", "overlap_valid", ("", ""), 1.0),
        ("power/overlapped_avg_w", "overlap_power_avg_watts", ("mode", "overlapped"), 1.0),
        ("power/sequential_energy_per_step_j", "overlap_power_energy_per_step_joules", ("mode", "sequential"), 1.0),
        ("gpu/sequential_sm_clock_mhz", "overlap_gpu_sm_clock_hertz", ("mode", "sequential"), 1e6),
        ("gpu/overlapped_nvlink_rx_gb_s", "overlap_gpu_nvlink_rx_bytes_per_second", ("mode", "overlapped"), 1e9),
        ("comm/allreduce_bytes", "overlap_comm_bytes", ("collective", "allreduce"), 1.0),
        ("comm/allreduce_messages", "overlap_comm_messages", ("collective", "allreduce"), 1.0),
        ("dimension/data_comm_ms", "overlap_dimension_comm_seconds", ("dimension", "data"), 1e-3),
        ("comm/allreduce_busbw_gb_s", "overlap_comm_busbw_bytes_per_second", ("collective", "allreduce"), 1e9),
        ("dimension/data_comm_slowdown", "overlap_dimension_comm_slowdown_ratio", ("dimension", "data"), 1.0),
        ("gpu/overlapped_memory_peak_bytes", "overlap_gpu_memory_peak_bytes", ("mode", "overlapped"), 1.0),
        ("traffic/data_sent_bytes", "overlap_traffic_sent_bytes", ("dimension", "data"), 1.0),
        ("pipeline/stage_1_bubble_fraction", "overlap_pipeline_stage_bubble_ratio", ("stage", "1"), 1.0),
    ],
)
def test_names_have_base_units(key: str, name: str, labels: tuple[str, str], scale: float) -> None:
    (value,) = [value for value in full_report().values() if value.key == key]
    assert gauge(value) == (name, *labels, scale)


def test_every_value_has_a_series_of_its_own_and_every_figure_a_meaning() -> None:
    values = full_report().values()
    assert len({gauge(value)[:3] for value in values}) == len(values)
    assert all(value.figure.meaning for value in values)


@pytest.mark.parametrize(
    ("key", "name", "scale"),
    [
        ("speedup", "overlap_arm_speedup_ratio", 1.0),
        ("speedup_ci_low", "overlap_arm_speedup_ci_low_ratio", 1.0),
        ("configured_step_ms", "overlap_arm_configured_step_seconds", 1e-3),
        ("exposed_comm_change_ms_ci_high", "overlap_arm_exposed_comm_change_ci_high_seconds", 1e-3),
        ("energy_per_step_j", "overlap_arm_energy_per_step_joules", 1.0),
        ("configured_avg_w", "overlap_arm_configured_avg_watts", 1.0),
        ("peak_memory_bytes", "overlap_arm_peak_memory_bytes", 1.0),
        ("equal_results", "overlap_arm_equal_results", 1.0),
    ],
)
def test_an_arm_is_a_label_whatever_its_name_ends_in(key: str, name: str, scale: float) -> None:
    report = arm_window(3, "as_configured", power=True)
    (value,) = [value for value in report.values() if value.key == f"arm/as_configured_{key}"]
    assert gauge(value) == (name, "arm", "as_configured", scale)
    assert value.figure.meaning


def test_every_metric_of_an_arm_has_a_name() -> None:
    values = arm_window(3, power=True).values()
    assert len({gauge(value).name for value in values}) == len(values)


def test_the_last_window_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "overlap.prom"
    report = window(3, power=True)
    sink_with(path, window(1), report).close()
    found = written(path)
    assert found["overlap_e2e_overlapped_seconds", ()] == pytest.approx(report.e2e_overlapped_ms.value / 1e3)  # type: ignore[union-attr]
    assert found["overlap_power_avg_watts", (("mode", "overlapped"),)] == report.metrics()["power/overlapped_avg_w"]
    assert found["overlap_window_first_step", ()] == report.first_step
    assert found["overlap_bound_info", (("bound", report.bound),)] == 1
    assert len(found) == len(report.metrics()) + 3
    (info,) = (dict(labels) for name, labels in found if name == "overlap_run_info")
    assert info["device"] == "NVIDIA H200"
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_the_last_window_did_not_measure_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "overlap.prom"
    sink_with(path, window(1, power=True), window(2))
    assert not [name for name, _ in written(path) if name.startswith("overlap_power")]


def labelled(path: Path, name: str, label: str) -> dict[str, float]:
    return {dict(labels)[label]: value for (found, labels), value in written(path).items() if found == name}


def costing(report: ArmReport, overhead: float) -> ArmReport:
    return msgspec.structs.replace(report, measurement_overhead=overhead)


def test_the_last_window_of_each_arm_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "overlap.prom"
    sink = sink_with(path, window(0))
    first, other, last = arm_window(1), costing(arm_window(2, "no_reshard"), 0.5), arm_window(4)
    for report in (first, other, last):
        sink.log_arm(report)
    sink.log(window(5))
    steps = {"prefetch_2_2": last.first_step, "no_reshard": other.first_step}
    assert labelled(path, "overlap_arm_window_first_step", "arm") == steps
    speedups = {report.arm.name: report.speedup.value for report in (last, other)}  # type: ignore[union-attr]
    assert labelled(path, "overlap_arm_speedup_ratio", "arm") == pytest.approx(speedups)
    assert written(path)["overlap_window_first_step", ()] == window(5).first_step
    sink.log_arm(costing(arm_window(6), 0.25))
    assert written(path)["overlap_measurement_overhead_ratio", ()] == 0.25  # of the newest window, whatever its arm


def test_a_job_with_other_arms_alone_has_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "overlap.prom"
    sink_with(path).log_arm(arm_window(0))
    assert labelled(path, "overlap_arm_step_seconds", "arm")["prefetch_2_2"] > 0
    assert "overlap_run_info" in {name for name, _ in written(path)}


def test_arms_are_bounded(tmp_path: Path) -> None:
    sink = sink_with(tmp_path / "overlap.prom", window(0))
    report, last = arm_window(1), MAX_LABEL_VALUES + 29
    with mock.patch.object(sink, "_collected", return_value=()):  # each makes the file anew
        for number in range(last):
            sink.log_arm(msgspec.structs.replace(report, arm=ComparedArm(f"switch_{number}", True)))
    sink.log_arm(msgspec.structs.replace(report, arm=ComparedArm(f"switch_{last}", True)))
    assert len(labelled(tmp_path / "overlap.prom", "overlap_arm_valid", "arm")) == MAX_LABEL_VALUES


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "overlap.prom"
    sink = sink_with(path, window(0))
    size, done, torn = len(written(path)), threading.Event(), []

    def look() -> None:
        while not done.is_set():
            if len(written(path)) != size:
                torn.append(path.read_text())

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(30):
        sink.log(window(number % 3))
    done.set()
    reader.join()
    assert not torn
    assert [file.name for file in tmp_path.iterdir()] == ["overlap.prom"]


def test_label_values_are_escaped_short_and_few(tmp_path: Path) -> None:
    path = tmp_path / "overlap.prom"
    nasty = 'a"b\\c\n{x="y"} 1\n' + "z" * 500
    report = msgspec.structs.replace(
        window(), dimensions=tuple(DimensionTime(f"d{i}", 1, 1, 1.0, 1.0, 1.0, 1.0) for i in range(200)), device=nasty
    )
    sink_with(path, report, labels={"job_name": nasty})
    found = written(path)
    values = {dict(labels).get("dimension", "") for name, labels in found if name == "overlap_dimension_comm_seconds"}
    assert len(values) == MAX_LABEL_VALUES
    assert all(len(value) <= MAX_LABEL_LENGTH for _, labels in found for _, value in labels)
    (job_name,) = {dict(labels)["job_name"] for _, labels in found}
    assert job_name.startswith(nasty.replace("\n", "\ufffd")[: MAX_LABEL_LENGTH - 13])


def test_dimensions_with_similar_names_are_distinguished(tmp_path: Path) -> None:
    alike = ["dp-cp", "dp.cp", "x" * 150 + "1", "x" * 150 + "2", "a\tb", "a\nb"]
    dimensions = tuple(DimensionTime(name, 1, 1, 1.0, 1.0, 1.0, 1.0) for name in alike)
    sink_with(tmp_path / "overlap.prom", msgspec.structs.replace(window(), dimensions=dimensions))
    values = [dict(labels) for name, labels in written(tmp_path / "overlap.prom") if name.endswith("_comm_seconds")]
    found = {labels["dimension"] for labels in values if "dimension" in labels}
    assert {"dp-cp", "dp.cp", "a\ufffdb"} <= found  # the last twice: a series comes once, or the collector takes none
    assert len(found) == 5


def scraped(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def test_a_port_has_what_the_file_has_and_is_closed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "overlap.prom"
    sink = sink_with(path, labels={"job_name": "llama"}, port=0)
    assert scraped(sink.port) == ""
    for report in (window(0, power=True), window(1)):
        sink.log(report)
        assert scraped(sink.port) == path.read_text()
    sink.close()
    sink.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        scraped(sink.port)


def test_there_is_no_port_by_default_and_a_file_is_not_needed(tmp_path: Path) -> None:
    without = sink_with(tmp_path / "overlap.prom", window(0))
    assert without.port is None
    assert without._server is None
    sink = PrometheusSink(port=0)
    sink.open(run_info())
    sink.log(window(0))
    assert "overlap_e2e_overlapped_seconds" in scraped(sink.port)
    assert sink._server.server_address[0] == "127.0.0.1"
    sink.close()


def test_a_port_is_closed_for_processes_that_have_the_socket_too() -> None:
    sink = PrometheusSink(port=0)
    sink.open(run_info())
    copy = os.dup(sink._server.fileno())  # as in a data loader's worker, forked while the port is open
    try:
        sink.close()
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", sink.port), timeout=30):
            pass
        again = PrometheusSink(port=sink.port)
        again.open(run_info())
        again.close()
    finally:
        os.close(copy)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sink = PrometheusSink(port=port)
        with pytest.raises(OSError, match=rf"port {port} of 127\.0\.0\.1 cannot be used: .*in use"):
            sink.open(run_info())
    sink.close()


def test_a_sink_whose_file_fails_leaves_no_port_behind(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sink = PrometheusSink(tmp_path / "file" / "overlap.prom", port=0)
    sink.open(run_info())
    with pytest.raises(FileExistsError):
        sink.log(window(0))
    with pytest.raises(urllib.error.URLError, match="refused"):
        scraped(sink.port)


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="PrometheusSink needs a path, a port, or both"):
        PrometheusSink()
    with pytest.raises(ValueError, match="port must be"):
        PrometheusSink(port=70_000)
    with pytest.raises(ValueError, match=r"path must end in \.prom.*'x\.txt'"):
        PrometheusSink("x.txt")
    with pytest.raises(ValueError, match="labels: a name must be of letters"):
        PrometheusSink("x.prom", {"a-b": "c"})
    with pytest.raises(ValueError, match=r"labels: a name .* got 'mode'"):
        PrometheusSink("x.prom", {"mode": "c"})
    with pytest.raises(ValueError, match=r"labels: a name .* got 'arm'"):
        PrometheusSink("x.prom", {"arm": "c"})
    with pytest.raises(TypeError, match=r"labels\['a'\] must be text, got 1"):
        PrometheusSink("x.prom", {"a": 1})  # type: ignore[dict-item]
