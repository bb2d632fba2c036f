"""Residual overlap is measured: communication that escapes the gate shows in the profile and spoils the window."""

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks import OverlapMonitor, OverlapReport, Schedule
from overlap_callbacks.report import record
from tests.distributed import run_ranks

SCHEDULE = Schedule(spread=False, every_n_steps=100, first_step=4, repeats=2, steps_per_block=1, profiled_steps=4)
# Without warm-up a sequential step follows upon an overlapped one.
ABRUPT = Schedule(
    spread=False, every_n_steps=100, first_step=4, repeats=1, steps_per_block=1, warmup_steps=0, profiled_steps=4
)


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
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = OverlapMonitor(SCHEDULE, run_dir=folder, strict=True, max_overhead=None)
    for step in range(4 + SCHEDULE.window_steps):
        with monitor.step(step):
            optimizer.zero_grad()
            model(torch.randn(256, 256)).square().mean().backward()
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


def test_compute_never_overlaps_communication_in_sequential_steps_of_ddp(tmp_path: Path) -> None:
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
    assert any("of compute ran during communication" in problem for problem in window.problems)
    assert any(
        "passed the gate unseen during measured steps (another thread's" in problem for problem in window.problems
    )
    metrics = window.metrics()
    assert metrics["overlap/valid"] == 0.0
    assert "overlap/residual_overlap" in metrics
    assert not any(name in metrics for name in ("overlap/speedup_vs_sequential", "overlap/compute_slowdown"))


def _train_with_ranges_that_outlive_their_collectives(rank: int, folder: str) -> None:
    training_thread = threading.get_ident()

    def dawdle(_: Any) -> None:
        # Gloo's thread runs this after waking the collective's waiters, and before ending the range: there a thread may
        # lose its core as well.
        if threading.get_ident() != training_thread:
            time.sleep(0.02)

    def all_reduce(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        reduced = future.then(lambda done: done.value()[0])
        future.add_done_callback(dawdle)
        return reduced

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]))
    model.register_comm_hook(None, all_reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = OverlapMonitor(ABRUPT, run_dir=folder, strict=True, max_overhead=None)
    for step in range(4 + ABRUPT.window_steps):
        with monitor.step(step):
            optimizer.zero_grad()
            model(torch.randn(32, 32)).square().mean().backward()
            optimizer.step()
    monitor.close()


def test_a_range_that_outlives_its_collective_leaves_no_residual_overlap(tmp_path: Path) -> None:
    run_ranks(_train_with_ranges_that_outlive_their_collectives, 2, str(tmp_path))
    (window,) = record.read(tmp_path).windows
    assert window.residual_overlap is not None
    assert window.residual_overlap.value < 0.05
    assert window.valid, window.problems
