"""Parts of steps on the device: by events, at most six in a step, a delay appears in the part that it was put into."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overlap_callbacks.analysis.step_vectors import FIRST_STEP, PARTS
from overlap_callbacks.instruments import device as devices
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.monitor.step_ring import MAX_EVENTS
from tests.distributed import run_ranks
from tests.simulated_gpu.jobs import on_device
from tests.simulated_gpu.parameters import Parameters

DELAY_MS = 40.0
# Of the rank that others wait for: far longer than one host comes later than another.
LATE_MS = 200.0
STEPS = 50
DELAYED = ("input", "forward", "backward", "optimizer", "collective")


def _train(rank: int, micro_batches: int) -> tuple[dict[str, int], Any, list[int], int]:
    with on_device(rank, Parameters(rules="gemm=1000", kernel_us=10)) as device:
        step = 0
        given = dict.fromkeys((*DELAYED[:4], "waiting"), 0)
        stream = torch.cuda.current_stream()

        def delay(part: str) -> None:
            late = DELAYED[step % 6] if step % 6 < len(DELAYED) else ""
            if late == part:
                given[part] += 1
                time.sleep(DELAY_MS / 1e3) if part == "input" else devices.sleep(stream, DELAY_MS)
            if part == "backward" and late == "collective":
                given["waiting"] += rank == 0
                if rank:
                    devices.sleep(stream, LATE_MS)

        class Late(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                delay("forward")
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                delay("backward")
                return grad

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.last(Late.apply(self.first(x)))

        model = nn.parallel.DistributedDataParallel(Model().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monitor = attach(optimizer, model=model, sinks=[], first_step=100_000, every_n_steps=500, power=False)
        optimizer.register_step_pre_hook(lambda *_: delay("optimizer"))
        ring = monitor._driver.ring
        for step in range(STEPS):
            torch.cuda.synchronize()  # or the host would be ahead: its delay would not hold the device up
            delay("input")
            for _ in range(micro_batches):
                model(torch.ones(32, 64, device=device)).sum().backward()
            optimizer.step()
            if step == 1:
                ring.vectors()  # read before the device has passed the first beginning: nothing is lost
        marks = list(ring._items)[::2]
        begins = [place for place, mark in enumerate(marks) if mark >= FIRST_STEP]
        torch.cuda.synchronize()
        vectors = ring.vectors()
        unread = len(ring._items)
        monitor.close()
        return given, vectors, np.diff(begins).tolist(), unread


@pytest.mark.alone
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_delay_on_the_device_appears_in_its_part_with_six_events_a_step(micro_batches: int) -> None:
    for given, vectors, events, unread in run_ranks(_train, 2, micro_batches, backend="", timeout_s=120):
        # Of several micro-batches one is marked: its mark of the rest shares the event of the beginning.
        assert max(events) <= MAX_EVENTS + (micro_batches > 1)
        assert unread == 0
        assert len(vectors) == STEPS - 2
        assert (vectors.parts_ns >= 0).all()
        for part, number in given.items():
            if not number or (micro_batches > 1 and part not in ("optimizer", "waiting")):
                continue
            of_part = vectors.parts_ns[:, PARTS.index(part)]
            delay_ms = LATE_MS if part == "waiting" else DELAY_MS
            least_ns = max(0.95e6 * DELAY_MS, np.quantile(of_part, 0.1) + 0.5e6 * delay_ms)
            late = int((of_part >= least_ns).sum())
            steps = number if part == "optimizer" else number // micro_batches
            assert late >= steps - 1 >= 4, (part, vectors.parts_ns // 1_000_000)
