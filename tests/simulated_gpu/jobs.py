"""Small training jobs on simulated devices, and what the tests need to know of them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks import Mode, OverlapMonitor
from tests.distributed import run_ranks
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog, StepTruth

WIDTH, LAYERS, BATCH = 1024, 6, 256
# DDP reads events of the device in its first ten steps, which makes the host wait. Here the window begins later.
FIRST_STEP = 14
NUM_STEPS = FIRST_STEP + 70
# Products are by far most of a step, and a bucket of 4 MiB, a layer, takes about as long as one of them.
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


@dataclass(frozen=True)
class Job:
    """What a rank trains.

    Attributes:
        forward_backward, update: the two parts of a step.
        attach: gives the monitor, for options of the schedule.
    """

    forward_backward: Callable[[], Any]
    update: Callable[[], Any]
    attach: Callable[..., OverlapMonitor]


def model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)


def _torch_job(module: nn.Module, device: torch.device) -> Job:
    from overlap_callbacks.integrations.pytorch import attach

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data = torch.randn(BATCH, WIDTH, device=device)

    return Job(lambda: module(data).sum().backward(), lambda: _update(optimizer), functools.partial(attach, optimizer))


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def ddp(device: torch.device) -> Job:
    return _torch_job(
        nn.parallel.DistributedDataParallel(model(device), device_ids=[device.index], bucket_cap_mb=4), device
    )


def fsdp2(device: torch.device) -> Job:
    from torch.distributed.fsdp import fully_shard

    whole = model(device)
    for layer in whole:
        fully_shard(layer)
    return _torch_job(fully_shard(whole), device)


def zero2(device: torch.device) -> Job:
    import deepspeed

    from overlap_callbacks.integrations.deepspeed import attach

    deepspeed.init_distributed("nccl", verbose=False)
    whole = model(device)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": WIDTH * WIDTH},
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=whole, model_parameters=list(whole.parameters()), config=config)
    data = torch.randn(BATCH, WIDTH, device=device)

    def step() -> None:
        engine.step()  # looked up each time: the monitor puts its own in its place

    return Job(lambda: engine.backward(engine(data).sum()), step, functools.partial(attach, engine))


def pipeline(device: torch.device) -> Job:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from overlap_callbacks.integrations.pytorch import attach

    rank, stages = dist.get_rank(), dist.get_world_size()
    stage = model(device)
    schedule = Schedule1F1B(PipelineStage(stage, rank, stages, device), 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    data = torch.randn(4 * BATCH, WIDTH, device=device)

    def forward_backward() -> None:
        schedule.step(*([data] if rank == 0 else []), **({"target": data} if rank == stages - 1 else {}))

    return Job(forward_backward, lambda: _update(optimizer), functools.partial(attach, optimizer, pipeline=schedule))


def _train(rank: int, parameters: Parameters, make: Callable[[torch.device], Job], run_dir: str) -> Trained:
    with on_device(rank, parameters) as device:
        job = make(device)
        begun, modes = [], []
        options = {"first_step": FIRST_STEP, "every_n_steps": 1000, "spread": False, "max_overhead": None}
        with job.attach(run_dir=run_dir, strict=True, **options) as monitor:
            for _ in range(NUM_STEPS):
                begun.append(time.monotonic_ns())
                job.forward_backward()
                modes.append(monitor.mode)  # some frameworks begin a step with its forward
                job.update()
            torch.cuda.synchronize()
            begun.append(time.monotonic_ns())
        return Trained(os.getpid(), tuple(begun), tuple(modes))


def train(
    make: Callable[[torch.device], Job], folder: Path, ranks: int = 2, **parameters: Any
) -> tuple[Path, list[list[StepTruth]], list[Trained]]:
    """Train with a window on simulated devices.

    Returns:
        The record's folder, the truth of each step of each rank, and what the ranks know.
    """
    told = Parameters(log=folder / "log", stall_s=30, **{**TIMES, **parameters})
    trained = run_ranks(_train, ranks, told, make, str(folder / "run"), backend="", timeout_s=120)
    return folder / "run", [one.steps(folder / "log") for one in trained], trained
