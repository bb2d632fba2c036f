"""Trains the jobs of ``tests/gpu/jobs.py`` on simulated devices, and tells the tests what they need to know of it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks import Mode, OverlapMonitor
from tests.distributed import run_ranks
from tests.gpu.jobs import MAKERS
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog, StepTruth

# DDP reads events of the device in its first ten steps, which makes the host wait. Here the window begins later.
FIRST_STEP = 14
SCHEDULE: dict[str, Any] = {
    "first_step": FIRST_STEP,
    "every_n_steps": 1000,
    "repeats": 2,
    "profiled_steps": 2,
    "spread": False,
}
# More than the window's own: steps in which rank 0's ruling comes, and some after it.
MORE_STEPS = 12
# Products are by far most of a step, and a bucket of two layers takes about as long as two of them.
TIMES: dict[str, Any] = {"rules": "gemm=4000", "link_gbs": 1.0}


@dataclass(frozen=True)
class Trained:
    """What a rank knows of its training.

    Attributes:
        process: its number, by which its log is found.
        begun: when the host began each step, and the end of the last one; as ``time.monotonic_ns``.
        modes: of each step.
    """

    process: int
    begun: tuple[int, ...]
    modes: tuple[Mode, ...]

    def steps(self, log: Path) -> list[StepTruth]:
        return DeviceLog.read(log, self.process).steps(self.begun)


@contextmanager
def on_device(rank: int, parameters: Parameters) -> Iterator[torch.device]:
    """A rank with a process group over NCCL on its simulated device. Nothing may have used CUDA before."""
    parameters.apply()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _train(rank: int, parameters: Parameters, kind: str, run_dir: str, window: Mapping[str, Any]) -> Trained:
    with on_device(rank, parameters) as device:
        torch.manual_seed(0)
        job = MAKERS[kind](rank, device)
        begun, modes = [], []
        options = {**SCHEDULE, "max_overhead": None, **window}
        with contextlib.closing(job), job.attach(run_dir=run_dir, strict=True, **options) as monitor:
            for _ in range(monitor.schedule.first_step + monitor.schedule.window_steps + MORE_STEPS):
                begun.append(time.monotonic_ns())
                job.forward_backward()
                modes.append(monitor.mode)  # some frameworks begin a step with its forward
                job.update()
            torch.cuda.synchronize()
            begun.append(time.monotonic_ns())
        return Trained(os.getpid(), tuple(begun), tuple(modes))


def train(
    kind: str, folder: Path, ranks: int = 2, window: Mapping[str, Any] | None = None, **parameters: Any
) -> tuple[Path, list[list[StepTruth]], list[Trained]]:
    """Train with a window on simulated devices.

    Args:
        kind: of the job, as ``tests.gpu.jobs`` has it.
        folder: for the record and the log.
        ranks: of the job.
        window: options of ``attach``, of the schedule for instance.
        **parameters: of the device.

    Returns:
        The record's folder, the truth of each step of each rank, and what the ranks know.
    """
    told = Parameters(log=folder / "log", stall_s=30, devices=max(ranks, 2), **{**TIMES, **parameters})
    trained = run_ranks(_train, ranks, told, kind, str(folder / "run"), window or {}, backend="", timeout_s=300)
    return folder / "run", [one.steps(folder / "log") for one in trained], trained


def pinning(monitor: OverlapMonitor, modes: Callable[[int], Mode | None]) -> Callable[[int], Mode]:
    """What pins, in a step of this number, the mode of the next one, and returns that of the open one."""

    def change(number: int) -> Mode:
        monitor.force(modes(number))
        return monitor.mode

    return change
