"""Residual overlap is measured: communication that escapes the gate shows in the profile and spoils the window."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks import OverlapMonitor, OverlapReport, Schedule, record
from tests.distributed import run_ranks

SCHEDULE = Schedule(every_n_steps=100, first_step=4, repeats=2, steps_per_block=1, profiled_steps=4)


def _train(rank: int, folder: str, with_thread: bool) -> None:
    group = dist.new_group([0, 1])
    stop = threading.Event()

    def communicate() -> None:
        tensor = torch.ones(2**20)
        while True:
            # Both ranks must end after the same round: the sum says whether one of them wants to.
            tensor[0] = float(stop.is_set())
            dist.all_reduce(tensor, group=group)
            if tensor[0]:
                return

    thread = threading.Thread(target=communicate)
    if with_thread:
        thread.start()
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = OverlapMonitor(SCHEDULE, run_dir=folder, strict=True, max_overhead=None)
    for step in range(4 + SCHEDULE.window_steps):
        with monitor.step(step):
            optimizer.zero_grad()
            model(torch.randn(512, 512)).square().mean().backward()
            optimizer.step()
    monitor.close()
    stop.set()
    if with_thread:
        thread.join()


def _window(folder: Path, with_thread: bool) -> OverlapReport:
    run_ranks(_train, 2, str(folder), with_thread)
    (window,) = record.read(folder).windows
    assert window.complete
    return window


def test_in_sequential_steps_of_ddp_no_compute_runs_beside_communication(tmp_path: Path) -> None:
    window = _window(tmp_path, with_thread=False)
    assert window.residual_overlap is not None
    assert window.residual_overlap.value < 0.05
    assert window.overlap_ratio is not None
    assert window.overlap_ratio.value > 2 * window.residual_overlap.value
    assert window.valid
    assert "overlap/speedup_vs_sequential" in window.metrics()


def test_communication_of_another_thread_shows_as_residual_overlap_and_makes_the_window_invalid(tmp_path: Path) -> None:
    window = _window(tmp_path, with_thread=True)
    assert window.residual_overlap is not None
    assert window.residual_overlap.value > 0.05
    assert not window.valid
    assert any("residual overlap" in problem for problem in window.problems)
    metrics = window.metrics()
    assert metrics["overlap/valid"] == 0.0
    assert "overlap/residual_overlap" in metrics
    assert not any(name in metrics for name in ("overlap/speedup_vs_sequential", "overlap/compute_slowdown"))
