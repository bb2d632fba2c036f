"""The library's own jobs on simulated devices: `overlap study`, `overlap bench` and `overlap demo`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_callbacks.report import record
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog, StepTruth

CAP_W, IDLE_W, COMPUTE_W = 100.0, 70.0, 500.0
# Steps of a window alternate: its overlapped ones lie so near to sequential ones.


NEAR = 12


def _jobs(folder: Path) -> list[list[StepTruth]]:
    """The steps of rank 0 of each job, in the order of the jobs: from one loss to the next."""
    logs = [DeviceLog.read(folder / "log", int(file.name.split(".")[1])) for file in folder.glob("log.*.tsv")]
    found = []
    for log in sorted(logs, key=lambda log: log.tasks[0].enqueued):
        if log.tasks[0].device == 0:
            found.append(log.steps([task.enqueued for task in log.tasks if "nll_loss_forward" in task.name]))
    return found


def _slowdown(steps: list[StepTruth]) -> float:
    """How much longer compute takes in overlapped steps than in sequential ones, of those that alternate."""
    sequential = [number for number, step in enumerate(steps) if step.hidden_ms < 0.01 * step.communication_ms]
    near = {number for one in sequential for number in range(one - NEAR, one + NEAR)} - set(sequential)
    overlapped = [number for number in near if 0 <= number < len(steps)]
    alone, beside = (statistics.median(steps[number].compute_ms for number in own) for own in (sequential, overlapped))
    return beside / alone - 1


def _overlap(told: Parameters, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", "overlap_callbacks", *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, **told.environment()})


@pytest.mark.nightly
def test_under_a_power_cap_the_slowdown_is_that_of_the_power_model(tmp_path: Path) -> None:
    told = Parameters(
        log=tmp_path / "log", tflops=2, link_gbs=2, compute_slowdown=1.2, most_data_bytes=100_000,
        idle_w=IDLE_W, compute_w=COMPUTE_W,
    )  # fmt: skip
    command = ["study", "--model", "gpt3-xl", "--batch", "1"]
    command += ["--strategy", "ddp", "--precision", "bf16", "--scale", "0.25", "--power-cap", f"none,{CAP_W:g}"]
    _overlap(told, *command, "-o", tmp_path / "study")
    windows = [record.read(run).windows[-1] for run in sorted((tmp_path / "study" / "runs").iterdir())]
    jobs = _jobs(tmp_path)
    slowdowns = [_slowdown(steps) for steps in jobs]
    for window, of_log in zip(windows, slowdowns, strict=True):
        assert window.valid, window.problems
        assert window.compute_slowdown is not None
        assert 1 + window.compute_slowdown.value == pytest.approx(1 + of_log, rel=0.01)
    # In sequential steps the device cools down while it communicates, and its clock is higher.
    assert slowdowns[1] > 1.2 * slowdowns[0] > 0
    clocks = [[task.clock for step in steps for task in step.of_class("compute")] for steps in jobs]
    assert min(clocks[0]) == 1
    assert IDLE_W + COMPUTE_W * statistics.median(clocks[1]) ** 3 < 1.5 * CAP_W


@pytest.mark.nightly
def test_a_product_beside_an_all_reduce_takes_as_much_longer_as_the_device_was_told(tmp_path: Path) -> None:
    small = ["--n", "2048", "--message", "16MiB", "--no-page"]
    _overlap(Parameters(compute_slowdown=1.2), "bench", "gemm-allreduce", *small, "-o", tmp_path / "bench")
    lines = [json.loads(line) for line in (tmp_path / "bench" / "bench.jsonl").read_text().splitlines()]
    blocks = [block for line in lines if line["line"] == "gemm" for block in line["blocks"]]
    alone, beside = (
        [block["gemm_ms"] for block in blocks if block["condition"] == condition] for condition in ("compute", "both")
    )
    assert len(alone) == len(beside) > 2
    assert statistics.fmean(beside) / statistics.fmean(alone) == pytest.approx(1.2, rel=0.01)


def test_the_demo_sees_two_gpus_and_measures_what_they_were_told(tmp_path: Path) -> None:
    _overlap(Parameters(compute_slowdown=1.3), "demo", "--steps", "100", "--run-dir", tmp_path / "demo")
    window = record.read(tmp_path / "demo").windows[0]
    assert window.valid, window.problems
    assert (window.world_size, window.backend) == (2, "nccl")
    assert window.residual_overlap is not None
    assert window.residual_overlap.value == pytest.approx(0, abs=1e-3)
    (product,) = [pair for pair in window.pairs if (pair.victim, pair.beside) == ("gemm", "all_reduce")]
    assert product.slowdown_during == pytest.approx(0.3, rel=0.01)
