"""Two NCCL ranks, on one GPU where there is only one: each rank then passes for a host of its own."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overlap_callbacks import Mode, OverlapMonitor, Schedule, record
from tests.distributed import run_ranks

STEPS = 60
SCHEDULE = Schedule(every_n_steps=30, first_step=5, repeats=2, steps_per_block=1, profiled_steps=2)


def _device(rank: int) -> torch.device:
    if torch.cuda.device_count() == 1:
        os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _train(rank: int, way: str, folder: str) -> dict[str, Any]:
    device = _device(rank)
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(4096, 2048, device=device, generator=torch.Generator(device).manual_seed(rank))
    monitor = None
    if way != "absent":
        monitor = OverlapMonitor(SCHEDULE, run_dir=Path(folder, "run"), strict=True, max_overhead=None)
        if way == "forced":
            monitor.force(Mode.SEQUENTIAL)
    enqueue_s = 0.0
    torch.cuda.synchronize()
    start = time.perf_counter()
    for step in range(STEPS):
        begin = time.perf_counter()
        if monitor is not None:
            monitor.step_begin(step)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if monitor is not None:
            monitor.step_end(step)
        enqueue_s += time.perf_counter() - begin
    torch.cuda.synchronize()
    total_s = time.perf_counter() - start
    if monitor is not None:
        monitor.close()
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return {"weights": hashlib.sha256(weights).hexdigest(), "enqueue_s": enqueue_s, "total_s": total_s}


def test_weights_are_bit_identical_absent_attached_and_forced(tmp_path: Path) -> None:
    found = {
        way: run_ranks(_train, 2, way, str(tmp_path / way), backend="nccl", timeout_s=180)
        for way in ("absent", "attached", "forced")
    }
    digests = {rank["weights"] for ranks in found.values() for rank in ranks}
    assert len(digests) == 1
    # The host runs ahead of the device in sequential mode too: the gate's waits are the streams' own.
    assert all(rank["enqueue_s"] < 0.9 * rank["total_s"] for rank in found["forced"])


def test_sequential_steps_have_no_overlap_and_overlapped_ones_have_some(tmp_path: Path) -> None:
    run_ranks(_train, 2, "attached", str(tmp_path), backend="nccl", timeout_s=180)
    window = record.read(tmp_path / "run").windows[0]
    assert window.valid, window.problems
    assert window.residual_overlap is not None
    assert window.residual_overlap.value <= 0.02
    assert window.overlap_ratio is not None
    assert window.overlap_ratio.value > 0.02
    assert window.e2e_sequential_ms is not None
    assert window.collectives[0].isolated_ms is not None
