"""The library's own jobs on simulated devices, `overlap study`, `overlap bench` and `overlap demo`, and its arms."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_callbacks import Mode, arms
from overlap_callbacks.gate.arms import BaseArm
from overlap_callbacks.report import record
from tests.simulated_gpu import jobs
from tests.simulated_gpu.figures import Steps
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog, StepTruth

CAP_W, IDLE_W, COMPUTE_W, COMMUNICATION_W = 100.0, 70.0, 500.0, 60.0
SLOWDOWN = 1.2
CLOCK_STEP = 15 / 1980


def _truths(folder: Path) -> list[list[list[StepTruth]]]:
    """Of each job, in the order in which they ran, the steps of its two ranks."""
    logs = [DeviceLog.read(folder / "log", int(file.name.split(".")[1])) for file in folder.glob("log.*.tsv")]
    logs.sort(key=lambda log: log.tasks[0].enqueued)
    pairs = zip(logs[::2], logs[1::2], strict=True)
    return [[_steps(log) for log in sorted(pair, key=lambda log: log.tasks[0].device)] for pair in pairs]


def _steps(log: DeviceLog) -> list[StepTruth]:
    """A step begins after the last update of weights before its loss."""
    begun, updated = [], 0
    for task in log.tasks:
        if "multi_tensor_apply" in task.name:
            updated = task.enqueued + 1
        elif "nll_loss_forward" in task.name:
            begun.append(updated)
    return log.steps([*begun, log.tasks[-1].enqueued + 1])


def _beside(steps: Steps) -> float:
    """How many times longer compute takes for what of it runs beside communication, at the same clock."""
    share = steps.mean("covered_ms") / steps.mean("compute_ms")
    return 1 / (1 - share + share / SLOWDOWN)


def _share(steps: Steps, name: str) -> float:
    """Of the time of timed steps."""
    return statistics.fmean(steps.means(lambda rank, n: getattr(rank[n], name), timed=True)) / steps.step_ms


def _steady_clock(steps: Steps) -> float:
    """At which compute draws what the cap leaves it, for the shares of time in which it and communication run."""
    compute, communication = (_share(steps, name) for name in ("compute_busy_ms", "communication_ms"))
    return float(((CAP_W - IDLE_W - communication * COMMUNICATION_W) / (compute * COMPUTE_W)) ** (1 / 3))


def _mean_clock(steps: Steps) -> float:
    """By the power that it takes: the root of the mean cube."""

    def cube(step: StepTruth) -> float:
        compute = step.of_class("compute")
        return sum(task.clock**3 * task.duration_ns for task in compute) / sum(task.duration_ns for task in compute)

    return float(statistics.fmean(steps.means(lambda rank, n: cube(rank[n]), timed=True)) ** (1 / 3))


def _overlap(told: Parameters, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", "overlap_callbacks", *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, **told.environment()})


@pytest.mark.nightly
def test_under_a_power_cap_the_slowdown_is_that_of_the_power_model(tmp_path: Path) -> None:
    told = Parameters(
        log=tmp_path / "log", tflops=2, link_gbs=2, compute_slowdown=SLOWDOWN, most_data_bytes=100_000,
        idle_w=IDLE_W, compute_w=COMPUTE_W, communication_w=COMMUNICATION_W,
    )  # fmt: skip
    command = ["study", "--model", "gpt3-xl", "--batch", "1"]
    command += ["--strategy", "ddp", "--precision", "bf16", "--scale", "0.25", "--power-cap", f"none,{CAP_W:g}"]
    _overlap(told, *command, "-o", tmp_path / "study")
    windows = [record.read(run).windows[-1] for run in sorted((tmp_path / "study" / "runs").iterdir())]
    modes = []
    for window, truths in zip(windows, _truths(tmp_path), strict=True):
        assert window.valid, window.problems
        overlapped, sequential = (Steps(window, mode, truths) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL))
        of_log = overlapped.mean("compute_ms") / sequential.mean("compute_ms")
        assert window.compute_slowdown is not None
        assert 1 + window.compute_slowdown.value == pytest.approx(of_log, rel=1e-3)
        modes.append((overlapped, sequential, of_log))
    (overlapped, sequential, slower), capped = modes
    assert [_mean_clock(steps) for steps in (overlapped, sequential)] == [1, 1]
    assert slower == pytest.approx(_beside(overlapped), rel=1e-3)
    overlapped, sequential, slower = capped
    for steps in (overlapped, sequential):
        # Each millisecond the clock takes one step, whatever power lacks or exceeds, and power follows it in 20 ms. So
        # both swing, and power's mean is the cap within some 2 W. Communication leaves compute 13 W of the cap. Of
        # these 2 W are 15 %, which is 5 % of a clock, and that is two steps here.
        assert 1e3 * steps.between("joules") / steps.step_ms == pytest.approx(CAP_W, abs=2.5)
        assert _mean_clock(steps) == pytest.approx(_steady_clock(steps), abs=2 * CLOCK_STEP)
    # In sequential steps the device cools down while it communicates, and its clock is higher.
    clocks = _steady_clock(sequential) / _steady_clock(overlapped)
    assert clocks > 1.05
    assert slower == pytest.approx(clocks * _beside(overlapped), rel=0.02)


@pytest.mark.nightly
def test_a_product_during_an_all_reduce_slows_down_as_configured_on_the_device(tmp_path: Path) -> None:
    small = ["--n", "2048", "--message", "16MiB", "--no-page"]
    _overlap(Parameters(compute_slowdown=1.2), "bench", "gemm-allreduce", *small, "-o", tmp_path / "bench")
    lines = [json.loads(line) for line in (tmp_path / "bench" / "bench.jsonl").read_text().splitlines()]
    blocks = [block for line in lines if line["line"] == "gemm" for block in line["blocks"]]
    alone, beside = (
        [block["gemm_ms"] for block in blocks if block["condition"] == condition] for condition in ("compute", "both")
    )
    assert len(alone) == len(beside) > 2
    assert statistics.fmean(beside) / statistics.fmean(alone) == pytest.approx(1.2, rel=0.01)


def test_the_demo_sees_two_gpus_and_measures_what_they_simulate(tmp_path: Path) -> None:
    small = ["--steps", "100", "--layers", "2", "--bucket-mb", "1"]
    _overlap(Parameters(compute_slowdown=1.3), "demo", *small, "--run-dir", tmp_path / "demo")
    window = record.read(tmp_path / "demo").windows[0]
    assert window.valid, window.problems
    assert (window.world_size, window.backend) == (2, "nccl")
    assert window.residual_overlap is not None
    assert window.residual_overlap.value == pytest.approx(0, abs=1e-3)
    (product,) = [pair for pair in window.pairs if (pair.kernel_family, pair.concurrent_with) == ("gemm", "all_reduce")]
    assert product.slowdown_during == pytest.approx(0.3, rel=0.01)


# Products of 32,768 by 1,024 are 2,048 tiles: 16 waves on 128 multiprocessors, 19 on 112. Gradients of weights are 64.
@pytest.mark.parametrize(
    ("arm", "changed", "factor"), [(arms.AllowTF32(), 23, 1 / 2), (arms.SmCarveout(16), 15, 19 / 16)]
)
def test_an_arm_changes_products_as_the_device_does(tmp_path: Path, arm: BaseArm, changed: int, factor: float) -> None:
    run_dir, (steps, _), _ = jobs.train(
        "ddp", tmp_path, window={"arms": [arm]}, rules=None, tflops="f32=20,tf32=40", kernel_us=0,
        multiprocessors=128, most_data_bytes=100_000,
    )  # fmt: skip
    (report,) = record.read(run_dir).arms
    assert report.complete, report.problems
    assert report.compute_ms is not None
    assert report.configured_compute_ms is not None
    assert report.speedup is not None
    times = sorted({round(step.compute_alone_ms, 3) for step in steps[2:]})
    assert len(times) == 2
    reported = (report.configured_compute_ms.value, report.compute_ms.value)
    assert sorted(reported) == pytest.approx(times, rel=0.01)
    product_ms = 2 * 32_768 * 1024**2 / 20e9
    assert reported[1] - reported[0] == pytest.approx(changed * (factor - 1) * product_ms, rel=0.01)
    assert (report.speedup.value > 0) is (factor < 1)
