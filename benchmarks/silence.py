"""What a silent rank takes from training: the share of rank 0's time that its windows wait in vain.

    python benchmarks/silence.py [--steps 15000] [--step-ms 8] [--json FILE]

Two Gloo processes train by all-reduces and sleep; rank 1 has no monitor, and so never answers rank 0's windows. Steps
are short and windows come often, and ``max_overhead`` is the default. The share is that of the time that rank 0 spends
within ``step_begin`` and ``step_end``, of the time of all its steps; it is given along the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.about import about
from overlap_callbacks import OverlapMonitor, Schedule
from overlap_callbacks.monitor.config import MonitorConfig

EVERY_N_STEPS = 200
NUM_POINTS = 6


def train(rank: int, port: int, folder: str, num_steps: int, step_ms: float) -> list[dict[str, float]]:
    """Run one rank; the points of rank 0."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    schedule = Schedule(
        every_n_steps=EVERY_N_STEPS, first_step=20, repeats=1, steps_per_block=1, warmup_steps=0, profiled_steps=0
    )
    monitor = OverlapMonitor(schedule, run_dir=folder, power=False) if rank == 0 else None
    tensor, inside_s, points = torch.ones(8), 0.0, []
    began_s = time.perf_counter()
    for step in range(num_steps):
        before_s = time.perf_counter()
        if monitor is not None:
            monitor.step_begin(step)
        inside_s += time.perf_counter() - before_s
        time.sleep(step_ms / 1e3)
        dist.all_reduce(tensor)
        before_s = time.perf_counter()
        if monitor is not None:
            monitor.step_end(step)
        inside_s += time.perf_counter() - before_s
        if (step + 1) % (num_steps // NUM_POINTS) == 0:
            took_s = time.perf_counter() - began_s
            points.append({"step": step + 1, "training_s": took_s, "lost_s": inside_s, "share": inside_s / took_s})
    if monitor is not None:
        monitor.close(1.0)
    dist.barrier()
    return points


def _rank_main(rank: int, port: int, folder: str, num_steps: int, step_ms: float, queue: Any) -> None:
    points = train(rank, port, folder, num_steps, step_ms)
    if rank == 0:
        queue.put(points)


def run(num_steps: int, step_ms: float) -> list[dict[str, float]]:
    """The points of a run of two processes."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port
    del free
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank_main, args=(rank, port, folder, num_steps, step_ms, queue)) for rank in (0, 1)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("a rank failed")
    points: list[dict[str, float]] = queue.get()
    return points


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    points = run(options.steps, options.step_ms)
    for point in points:
        print(f"step {point['step']:6}: {point['lost_s']:.2f} s of {point['training_s']:.0f} s, {point['share']:.2%}")
    if options.json:
        environment = about("torch", every_n_steps=EVERY_N_STEPS, max_overhead=MonitorConfig().max_overhead)
        options.json.write_text(json.dumps({"environment": environment, "results": points}, indent=2) + "\n")


if __name__ == "__main__":
    main()
