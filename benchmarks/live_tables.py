"""What it takes to turn a live profile into the report's tables: on the training thread, and on the reporting thread.

    python benchmarks/live_tables.py [--kernels 5000] [--steps 8] [--json FILE]

Profiles steps of so many operators on the CPU, as a window does (half of them overlapped, half sequential), and times
what the training thread does at the window's end, and what the reporting thread does after it. CPU time of each thread,
median of some rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overlap_callbacks.analysis.aggregate import MAX_KERNELS
from overlap_callbacks.analysis.kernels.attribution import pair_times_of
from overlap_callbacks.analysis.kernels.table import KernelTable
from overlap_callbacks.analysis.kernels.timeline import step_timeline
from overlap_callbacks.analysis.kernels.times import KernelSums, kernel_times, profiled_block
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.instruments.profiler import Profile

MODES = (Mode.OVERLAPPED, Mode.SEQUENTIAL)


def profiled(kernels: int, steps: int) -> Profile:
    """The profiled part of a window, stopped."""
    tensor = torch.zeros(4)
    profile = Profile(on_cuda=False)
    profile.start()
    for _ in range(steps):
        profile.begin_step()
        for _ in range(kernels):
            tensor.neg_()  # an operator of one event
        profile.end_step(quiet=True)
    profile.stop()
    return profile


def make_tables(profile: Profile, kernels: int, steps: int) -> tuple[float, float]:
    """What the reporting thread does with a profile; ms of CPU time to read it, and for the figures and tables."""
    begin = time.thread_time()
    kernels_of_run: KernelTable = profile.kernels()
    read = time.thread_time()
    assert len(kernels_of_run) == kernels * steps, len(kernels_of_run)
    arms = [np.arange(arm, steps, 2) for arm in range(2)]
    sums = KernelSums(kernels_of_run)
    for mode, arm in zip(MODES, arms, strict=True):
        for step in arm:
            profiled_block(mode, int(step), sums, [int(step)])
    kernel_times(kernels_of_run, arms[0], arms[1], MAX_KERNELS)
    pair_times_of(kernels_of_run, arms[0], arms[1])
    for mode, arm in zip(MODES, arms, strict=True):
        step_timeline(kernels_of_run, int(arm[0]), mode)
    return (read - begin) * 1e3, (time.thread_time() - read) * 1e3


def run_window(kernels: int, steps: int) -> dict[str, float]:
    """One profiled part of a window; ms of CPU time."""
    stop = Profile.stop
    taken: list[float] = []

    def timed(profile: Profile) -> bool:
        start = time.thread_time()
        result = stop(profile)
        taken.append((time.thread_time() - start) * 1e3)
        return result

    Profile.stop = timed  # type: ignore[method-assign]
    try:
        profile = profiled(kernels, steps)
    finally:
        Profile.stop = stop  # type: ignore[method-assign]
    read, tables = make_tables(profile, kernels, steps)
    return {"training": taken[0], "read": read, "tables": tables}


def lost_by_training(kernels: int, steps: int) -> float:
    """Wall time that a loop of small operators on the training thread loses while the tables are made, ms.

    An upper bound: the loop needs the interpreter for every operator, as no training on an accelerator does.
    """
    tensor, done, operators = torch.zeros(4), threading.Event(), 0

    def train(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            tensor.neg_()
        return time.perf_counter() - start

    profile = profiled(kernels, steps)
    thread = threading.Thread(target=lambda: (make_tables(profile, kernels, steps), done.set()))
    start = time.perf_counter()
    thread.start()
    while not done.is_set():
        train(100)
        operators += 100
    elapsed = time.perf_counter() - start
    thread.join()
    return (elapsed - operators * train(20_000) / 20_000) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=5000, help="of a step")
    parser.add_argument("--steps", type=int, default=8, help="profiled steps of a window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, object] = {}
    for steps in (2, options.steps):
        runs = [run_window(options.kernels, steps) for _ in range(options.rounds)]
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        results[f"{steps} steps"] = medians
        print(
            f"{steps} steps of {options.kernels} kernels: training thread {medians['training']:.1f} ms "
            f"({medians['training'] / steps:.1f} a step; goal: under 100 a step), reporting thread "
            f"{medians['read']:.0f} ms to read, {medians['tables']:.0f} ms to figures and tables"
        )
    lost = statistics.median(lost_by_training(options.kernels, options.steps) for _ in range(options.rounds))
    results["wall time that a loop of small operators loses meanwhile, ms"] = lost
    print(f"a loop of small operators on the training thread loses {lost:.0f} ms of wall time meanwhile")
    if options.json:
        environment = {
            "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "python": platform.python_version(),
            "cores": os.cpu_count(), "kernels": options.kernels,
        }  # fmt: skip
        options.json.write_text(json.dumps({"environment": environment, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
