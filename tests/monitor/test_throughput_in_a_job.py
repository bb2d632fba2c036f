"""Throughput of a job of two ranks on the CPU, which has no peak in the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks import JsonlSink, OverlapMonitor
from overlap_callbacks.report.record import read
from tests.commands import invoke
from tests.distributed import run_ranks
from tests.monitor.jobs import Training, tiny_schedule


def train(rank: int, folder: str, options: dict[str, Any]) -> None:
    monitor = OverlapMonitor(
        tiny_schedule(), [JsonlSink(folder)], run_dir=folder, max_overhead=None, power=False, **options
    )
    training = Training(rank)
    for step in range(8):
        with monitor.step(step):
            training.step()
    monitor.close()


def test_a_job_has_the_throughput_of_what_its_user_tells(tmp_path: Path) -> None:
    options = {"tokens_per_step": 1000, "samples_per_step": 10, "flop_per_step": 1e6, "precision": "fp32"}
    run_ranks(train, 2, str(tmp_path), {**options, "settings": {"bucket_mb": 25}})
    record = read(tmp_path)
    assert record.runs[-1].workload is not None
    assert record.runs[-1].workload.settings == {"bucket_mb": 25}
    window = record.windows[0]
    assert window.throughput is not None
    assert window.e2e_overlapped_ms is not None
    step_s = window.e2e_overlapped_ms.value / 1e3
    assert window.throughput.tokens_per_s == pytest.approx(1000 / step_s)
    assert window.throughput.samples_per_s == pytest.approx(10 / step_s)
    assert window.throughput.flop_per_s_per_device == pytest.approx(1e6 / step_s / 2)
    assert window.throughput.mfu is None, "nobody knows the peak of this CPU"
    shown = invoke("show", str(tmp_path), "--all", env={"COLUMNS": "300"}).output
    assert "Tokens a second" in shown
    assert "MFU" not in shown


def test_a_peak_that_is_given_gives_the_utilisation(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path), {"flop_per_step": 1e6, "peak_flop_per_s": 1e12})
    window = read(tmp_path).windows[0]
    assert window.throughput is not None
    assert window.throughput.flop_per_s_per_device is not None
    assert window.throughput.mfu == pytest.approx(window.throughput.flop_per_s_per_device / 1e12)
    assert "overlap/mfu" in window.metrics()
