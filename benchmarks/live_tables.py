"""What it takes to turn a live profile into the report's tables: on the training thread, and on the reporting thread.

    python benchmarks/live_tables.py [--kernels 5000] [--steps 8] [--record-warm-up] [--no-loop] [--json FILE]

Profiles steps of so many operators on the CPU, as a window does (half of them overlapped, half sequential, each after a
warm-up step), and times what the training thread does at the window's end, and what the reporting thread does after it.
CPU time of each thread, median of some rounds. The wall time that a loop of small operators loses meanwhile is told by
what the reporting thread did.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.about import about
from overlap_callbacks.analysis.kernels.attribution import pair_times_of
from overlap_callbacks.analysis.kernels.table import KernelTable
from overlap_callbacks.analysis.kernels.timeline import step_timeline
from overlap_callbacks.analysis.kernels.times import KernelSums, kernel_times, profiled_block
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.monitor.background.profile_figures import MAX_KERNELS

MODES = (Mode.OVERLAPPED, Mode.SEQUENTIAL)


# What the reporting thread does, in order.
LIST, READ, TABLES = "events made a list", "events read", "figures and tables"


def profiled(kernels: int, steps: int, record_warm_up: bool) -> tuple[Profile, dict[str, float]]:
    """The profiled part of a window, stopped; and what its start and stop took of the training thread, CPU time in ms.

    A window's first profiled step is a warm-up step that is recorded always.

    Args:
        kernels: operators of a step.
        steps: that count.
        record_warm_up: whether the warm-up steps before them are recorded too, as they were before 2026-11-22.
    """
    tensor = torch.zeros(4)
    profile = Profile(on_cuda=False)
    start = time.thread_time()
    profile.start()
    took = {"start": (time.thread_time() - start) * 1e3}
    for number in range(2 * steps):
        if number % 2 or record_warm_up or number == 0:
            profile.begin_step()
        else:
            profile.begin_step(record=False)
        for _ in range(kernels):
            tensor.neg_()  # an operator of one event
        profile.end_step(quiet=True)
    start = time.thread_time()
    profile.stop()
    took["stop"] = (time.thread_time() - start) * 1e3
    return profile, took


def make_tables(profile: Profile, steps: int, begin: Callable[[str], None]) -> None:
    """What the reporting thread does with a profile.

    Args:
        profile: stopped.
        steps: that count.
        begin: told what is done next.
    """
    results = profile.session.profiler.kineto_results  # type: ignore[union-attr]

    class Results:
        """Tells when the list of events is made, and when it has been."""

        def events(self) -> Any:
            begin(LIST)
            events = results.events()
            begin(READ)
            return events

    profile.session.profiler.kineto_results = Results()  # type: ignore[union-attr, assignment]
    kernels_of_run: KernelTable = profile.kernels()
    begin(TABLES)
    steps_of = np.arange(1, steps + 1) if len(profile.bounds) == steps + 1 else np.arange(1, 2 * steps, 2)
    arms = [steps_of[arm::2] for arm in range(2)]
    sums = KernelSums(kernels_of_run)
    for mode, arm in zip(MODES, arms, strict=True):
        for step in arm:
            profiled_block(mode, int(step), sums, [int(step)])
    kernel_times(kernels_of_run, arms[0], arms[1], MAX_KERNELS)
    pair_times_of(kernels_of_run, arms[0], arms[1])
    for mode, arm in zip(MODES, arms, strict=True):
        step_timeline(kernels_of_run, int(arm[0]), mode)


def run_window(kernels: int, steps: int, record_warm_up: bool) -> dict[str, float]:
    """One profiled part of a window with nothing beside it: ms of CPU time of each thread, by part."""
    profile, took = profiled(kernels, steps, record_warm_up)
    times: list[tuple[str, float]] = []
    make_tables(profile, steps, lambda part: times.append((part, time.thread_time())))
    times.append(("", time.thread_time()))
    parts = {part: (end - begin) * 1e3 for (part, begin), (_, end) in itertools.pairwise(times)}
    return {"training thread: " + name: value for name, value in took.items()} | parts


def lost_by_training(kernels: int, steps: int, record_warm_up: bool) -> dict[str, float]:
    """Wall time that a loop of small operators on the training thread loses while the tables are made, ms, by part.

    An upper bound: the loop needs the interpreter for every operator, as no training on an accelerator does.
    """
    tensor, done = torch.zeros(4), threading.Event()

    def train(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            tensor.neg_()
        return time.perf_counter() - start

    profile, _ = profiled(kernels, steps, record_warm_up)
    now = ["before"]
    lost = {part: 0.0 for part in ("before", LIST, READ, TABLES)}
    counts = dict.fromkeys(lost, 0)

    def work() -> None:
        make_tables(profile, steps, lambda part: now.__setitem__(0, part))
        done.set()

    thread = threading.Thread(target=work)
    last = time.perf_counter()
    thread.start()
    while not done.is_set():
        train(20)
        part, end = now[0], time.perf_counter()
        lost[part] += end - last
        counts[part] += 20
        last = end
    thread.join()
    usual_s = train(20_000) / 20_000
    return {part: (lost[part] - counts[part] * usual_s) * 1e3 for part in lost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=5000, help="of a step")
    parser.add_argument("--steps", type=int, default=8, help="profiled steps of a window that count")
    parser.add_argument("--record-warm-up", action="store_true", help="record warm-up steps too, as it was")
    parser.add_argument("--no-loop", action="store_true", help="CPU times alone, on a machine with other work")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run = (options.kernels, options.steps, options.record_warm_up)
    rounds = [run_window(*run) for _ in range(options.rounds)]
    alone = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    results = {"CPU time, ms": alone}
    if not options.no_loop:
        beside = [lost_by_training(*run) for _ in range(options.rounds)]
        lost = {key: statistics.median(each[key] for each in beside) for key in beside[0]}
        lost["all"] = statistics.median(sum(each.values()) for each in beside)
        results["wall time that a loop of small operators loses, ms"] = lost
    print(f"{options.steps} counted steps of {options.kernels} operators, ms:")
    for title, values in results.items():
        print(title)
        for key, value in values.items():
            print(f"  {key:32} {value:8.1f}")
    if options.json:
        made = {"kernels": options.kernels, "steps": options.steps, "record_warm_up": options.record_warm_up}
        options.json.write_text(
            json.dumps({"environment": about("torch", **made), "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
