#!/usr/bin/env python3
"""What the race check costs: a DDP job on two processes of this host, with the check in each window.

``python3 benchmarks/race_check.py [--width 1024] [--layers 4]`` prints the model's size, the time of a step, and, of
each check, its time, what it held and what it found.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import OverlapReport, Sink
from overlap_callbacks.integrations.pytorch import attach

_STEPS = 24
_BATCH = 32


class Kept(Sink):
    """Keeps the reports of rank 0."""

    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)


def train(rank: int, store: str, width: int, layers: int) -> None:
    """One rank: train with the check, and print what it cost."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width))])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held = torch.randn(_BATCH, width)

    def repeat_step() -> None:
        model(held).square().mean().backward()

    kept = Kept()
    options: dict[str, Any] = {"every_n_steps": 10, "first_step": 4, "repeats": 1}
    options |= {
        "advanced": {"steps_per_block": 1, "warmup_steps": 0},
        "profiled_steps": 0,
        "power": False,
        "max_overhead": None,
        "sinks": [kept],
    }
    took_ms = []
    with attach(optimizer, model=model, check_gradients=True, repeat_step=repeat_step, **options):
        for _ in range(_STEPS):
            begun = time.perf_counter()
            optimizer.zero_grad()
            model(torch.randn(_BATCH, width)).square().mean().backward()
            optimizer.step()
            took_ms.append((time.perf_counter() - begun) * 1e3)
    if rank == 0:
        parameters = sum([parameter.numel() for parameter in model.parameters()])
        print(f"{parameters:,} parameters; median step {sorted(took_ms)[len(took_ms) // 2]:.1f} ms")
        for report in kept.reports:
            if report.race is not None:
                check = report.race
                held_mb = check.held_bytes / 1e6
                print(f"check: {check.verdict.value}, {check.took_ms:.0f} ms, copies of {held_mb:.0f} MB")
    dist.destroy_process_group()


def main() -> None:
    """Run two ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(  # type: ignore[no-untyped-call]
            train, (f"{folder}/store", given.width, given.layers), nprocs=2, start_method="spawn"
        )


if __name__ == "__main__":
    main()
