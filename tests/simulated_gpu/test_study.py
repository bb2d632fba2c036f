"""The study's jobs on simulated devices: `overlap study` measures what the power model makes of a cap."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_callbacks import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog, Task

CAP_W, IDLE_W, COMPUTE_W = 100.0, 70.0, 500.0


def _tasks(folder: Path) -> list[Task]:
    """Of all processes."""
    numbers = [int(file.name.split(".")[1]) for file in folder.glob("log.*.tsv")]
    return [task for number in numbers for task in DeviceLog.read(folder / "log", number).tasks]


def _compute_ms(window: OverlapReport, mode: Mode, tasks: list[Task]) -> float:
    """Summed durations of the compute kernels in the step of a mode of which the record has a picture."""
    (picture,) = [picture for picture in window.pictures if picture.arm is mode]
    assert picture.detail is not None
    assert picture.detail.start_ns is not None
    start, end = picture.detail.start_ns, picture.detail.start_ns + round(1e6 * picture.step_ms)
    inside = [task for task in tasks if task.task_class == "compute" and start <= task.start < end]
    assert len(inside) > 100
    return sum(task.duration_ns for task in inside) / 1e6


@pytest.mark.nightly
def test_under_a_power_cap_the_slowdown_is_that_of_the_power_model(tmp_path: Path) -> None:
    told = Parameters(
        log=tmp_path / "log", tflops=2, link_gbs=2, compute_slowdown=1.2, most_data_bytes=100_000,
        idle_w=IDLE_W, compute_w=COMPUTE_W,
    )  # fmt: skip
    command = [sys.executable, "-m", "overlap_callbacks", "study", "--model", "gpt3-xl", "--batch", "1"]
    command += ["--strategy", "ddp", "--precision", "bf16", "--scale", "0.25", "--power-cap", f"none,{CAP_W:g}"]
    subprocess.run([*command, "-o", tmp_path / "study"], check=True, env={**os.environ, **told.environment()})
    tasks = _tasks(tmp_path)
    free, capped = (record.read(run).windows[-1] for run in sorted((tmp_path / "study" / "runs").iterdir()))
    slowdowns = []
    for window in (free, capped):
        assert window.valid, window.problems
        assert window.compute_slowdown is not None
        of_log = _compute_ms(window, Mode.OVERLAPPED, tasks) / _compute_ms(window, Mode.SEQUENTIAL, tasks)
        # The cap makes steps differ: the figure is of all of them.
        assert 1 + window.compute_slowdown.value == pytest.approx(of_log, rel=0.03)
        slowdowns.append(window.compute_slowdown.value)
    # In sequential steps the device cools down while it communicates, and its clock is higher.
    assert slowdowns[1] > 1.2 * slowdowns[0] > 0
    clocks = [task.clock for task in tasks if task.task_class == "compute" and task.clock < 1]
    # While it computes it draws what the cap allows, on average.
    drawn_w = statistics.fmean(IDLE_W + COMPUTE_W * clock**3 for clock in clocks)
    assert drawn_w < 1.5 * CAP_W
