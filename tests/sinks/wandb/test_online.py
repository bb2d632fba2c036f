"""Against a server on this machine that keeps what it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks import JsonlSink, Sink, WandbSink
from overlap_callbacks.analysis.headline import run_verdict
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.sinks.fan_out import FanOut
from tests.report.runs import run_info, window
from tests.sinks.wandb.server import WandbServer
from tests.wandb_reader import SETTINGS

wandb = pytest.importorskip("wandb")

ONLINE = {**SETTINGS, "mode": "online", "x_file_stream_transmit_interval": 0.1}


@pytest.fixture
def server(apart: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with WandbServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
        wandb.teardown()


def fan_out(*sinks: Sink) -> FanOut:
    def fail(sink: Sink, error: Exception) -> None:
        raise AssertionError(f"{type(sink).__name__} failed") from error

    return FanOut(sinks, fail)


def measured(folder: Path, **options: Any) -> None:
    """Three windows, the second of which is slow, through the record and W&B."""
    info = run_info()
    sinks = fan_out(JsonlSink(folder / "run"), WandbSink(settings=wandb.Settings(**ONLINE), dir=folder, **options))
    sinks.open(info)
    for number, slowdown in enumerate((0.1, 0.3, 0.1)):
        sinks.log(window(number, power=True, slowdown=slowdown))
    sinks.close(30.0)


def test_all_of_a_run_arrives(server: WandbServer, tmp_path: Path) -> None:
    measured(tmp_path, alerts={"compute_slowdown": 0.2}, detail="all")
    run = server.run
    assert not server.unknown
    assert run.exit_code == 0

    expected = [window(number, power=True, slowdown=slowdown) for number, slowdown in enumerate((0.1, 0.3, 0.1))]
    assert run.values("overlap/step") == [20, 520, 1020]
    for key in ("overlap/compute_slowdown", "overlap/e2e_ideal_ms_ci_low", "power/overlapped_avg_w"):
        assert run.values(key) == [pytest.approx(report.metrics()[key]) for report in expected]
    powers = run.values("power/overlapped_avg_w")
    assert run.summary["power/overlapped_avg_w"] == {
        "min": pytest.approx(min(powers)),
        "max": pytest.approx(max(powers)),
        "mean": pytest.approx(sum(powers) / 3),
        "last": pytest.approx(powers[-1]),
    }
    sums = [sum(getattr(report, name).value for report in expected) for name in ("compute_ms", "compute_isolated_ms")]
    assert run.summary["overlap/compute_slowdown"] == pytest.approx(sums[0] / sums[1] - 1)
    assert run.summary["overlap/verdict"].count("Overlap saves ") == 1
    assert run.summary["power/verdict"].startswith("clock throttled by power cap: ")

    assert run.config["overlap_callbacks"]["framework"] == "megatron 0.16.1"
    assert run.config["overlap_callbacks"]["device"] == "NVIDIA H200"
    assert run.config["overlap_callbacks"]["group_sizes"] == {"data": 8, "tensor": 4}

    assert run.table("overlap/kernels")["data"][0][0].startswith("nvjet_hsh_256x128")
    assert run.table("overlap/pairs")["columns"][0] == "kernels"
    assert [row[0] for row in run.table("comm/collectives")["data"]] == [
        row.operator for row in expected[0].collectives
    ]
    assert {row[0] for row in run.table("dimension/dimensions")["data"]} == {"tensor", "data", "pipeline"}
    trace = run.table("power/trace")
    assert 0 < len(trace["data"]) <= 650
    assert {row[3] for row in trace["data"]} >= {"overlapped", "sequential"}
    assert "<svg" in run.text("overlap/answer")
    assert "<svg" in run.text("power/trace_card")


def test_the_record_arrives_as_it_is_on_disk(server: WandbServer, tmp_path: Path) -> None:
    measured(tmp_path)
    (artifact,) = (one for one in server.artifacts.values() if one["artifactTypeName"] == "overlap-record")
    assert artifact["committed"]
    assert artifact["files"]["overlap.jsonl"] == (tmp_path / "run" / "overlap.jsonl").read_bytes()


def test_an_alert_arrives_once_for_each_crossing(server: WandbServer, tmp_path: Path) -> None:
    sink = WandbSink(settings=wandb.Settings(**ONLINE), dir=tmp_path, alerts={"measurement_overhead": 0.02})
    windows = []
    for number, overhead in enumerate((0.01, 0.03, 0.03, 0.01, 0.03)):
        windows.append(msgspec.structs.replace(window(number), measurement_overhead=overhead))
        sink.log(windows[-1])
    sink.close()
    assert len(server.alerts) == 2
    assert server.alerts[0]["severity"] == "WARN"
    assert server.alerts[0]["title"].startswith("Overlap: cost of measuring is 3")
    assert "step 520; the limit is 2.0%" in server.alerts[0]["text"]
    assert "step 2020" in server.alerts[1]["text"]
    for alert, seen in zip(server.alerts, (2, 5), strict=True):
        assert alert["text"].endswith(f" {run_verdict(RunSummary(None, windows[:seen], running=True))}")


def test_a_users_run_gets_the_record_and_goes_on(server: WandbServer, tmp_path: Path) -> None:
    run = wandb.init(project="mine", dir=tmp_path, settings=wandb.Settings(**ONLINE))
    info = run_info()
    sinks = fan_out(JsonlSink(tmp_path / "run"), WandbSink())
    sinks.open(info)
    sinks.log(window())
    sinks.close(30.0)
    run.log({"loss": 1.0})
    run.finish()
    assert server.run.history[0]["loss"] == 1.0
    assert server.run.history[0]["overlap/step"] == 20
    assert any("overlap.jsonl" in one["files"] for one in server.artifacts.values())
