"""Do the intervals of arms hold the truth in running jobs? Two processes train, and an arm makes steps longer.

    python benchmarks/arms.py [--windows 200] [--json benchmarks/results/arms-cpu.json]
    python benchmarks/arms.py --read benchmarks/results/arms-cpu.json

Each job trains the network of ``truth.py`` on two Gloo ranks: each layer's gradients are reduced while the next layer
computes, and each layer computes in an operator that ends when the clock says so and leaves its core to others until
then, as a device's kernels do. The arm makes this operator 0, 1, 5 or 20 % longer; with 0 it does nothing.

A 95 % interval of one window should hold the truth in about 19 windows of 20. Of the arm that does nothing the truth is
zero. Of the others it is measured from outside the library, with ``time.perf_counter`` around the same steps: the
median over the windows. ``found`` counts the windows whose interval lies below zero altogether. ``run`` is what the
library says of the whole run: the mean over its windows, with its interval.

``--read`` cuts the windows of a result into runs of fewer windows, and says how often these hold the truth, and which
differences they find.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import pickle
import platform
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from truth import Network, Operator, TruthJob, placed, run_ranks

from overlap_callbacks import JsonlSink, Mode, OverlapMonitor, Schedule
from overlap_callbacks.analysis.arms import arm_summaries
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import pool_changes
from overlap_callbacks.gate.arms import Arm

LONGER = (0.0, 0.01, 0.05, 0.2)
GOAL = 0.94

_STEPS_BEFORE = 10
_GAP_STEPS = 5


def schedule_of() -> Schedule:
    """Windows without a profile: speed-ups rest on timed steps alone."""
    window = Schedule(every_n_steps=10_000, profiled_steps=0)
    return Schedule(
        every_n_steps=window.window_steps + _GAP_STEPS, first_step=_STEPS_BEFORE, profiled_steps=0, spread=False
    )


def _train(rank: int, job: TruthJob, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120))
    network = Network(rank, job.layers, Operator(job))
    factors = [1.0]

    def turn(factor: float) -> None:
        factors[0] = factor

    arm = Arm("longer", lambda: turn(1 + job.slowdown), lambda: turn(1.0), equal_results=True)
    schedule = schedule_of()
    monitor = OverlapMonitor(
        schedule, [JsonlSink(folder)], run_dir=folder, arms=[arm], max_overhead=None, strict=True, power=False
    )
    seen = []  # (window, whether the arm was turned, seconds) of counted steps
    plans = placed(schedule)
    for step in range(_STEPS_BEFORE + job.windows * schedule.every_n_steps):
        plan = plans.plan(step)
        with monitor.step():
            begin = time.perf_counter()
            network.step(factors[0])
            step_s = time.perf_counter() - begin
        if plan is not None and plan.counted:
            seen.append((plan.window, plan.arm is Mode.SEQUENTIAL, step_s))
    monitor.close()
    Path(folder, f"outside-{rank}.pickle").write_bytes(pickle.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def run_job(job: TruthJob) -> dict[str, Any]:
    """Run a job: what its windows say, the truth, and how many of them hold it.

    Raises:
        RuntimeError: a rank failed or did not end in time.
    """
    began = time.monotonic()
    kept, outside = run_ranks(_train, job)
    reports = kept.arms
    counted = [report for report in reports if report.counts]
    run = arm_summaries(kept.summary, reports)[0].speedup
    measured = speedups_of(outside)
    truth = statistics.median(measured) if job.slowdown else 0.0
    intervals = [
        (found.ci_low, found.value, found.ci_high)
        for report in counted
        if (found := report.speedup) is not None and found.ci_low is not None and found.ci_high is not None
    ]
    return {
        "longer": job.slowdown,
        "seconds": round(time.monotonic() - began, 1),
        "reported": len(reports),
        **judged(intervals, truth),
        "run": None if run is None else (run.ci_low, run.value, run.ci_high),
        "not_counted": sorted({problem for r in reports if r not in counted for problem in r.problems}),
        "windows": intervals,
        "outside": measured,
    }


def speedups_of(outside: list[tuple[int, bool, float]]) -> list[float]:
    """The speed-up of each window as measured outside: by the mean logarithm of its steps, over the ranks."""
    logs: dict[int, dict[bool, list[float]]] = defaultdict(lambda: {False: [], True: []})
    for window, turned, step_s in outside:
        logs[window][turned].append(math.log(step_s))
    return [math.expm1(statistics.fmean(of[False]) - statistics.fmean(of[True])) for _, of in sorted(logs.items())]


def judged(intervals: list[tuple[float, float, float]], truth: float) -> dict[str, Any]:
    """How many intervals hold the truth, and how many show that the arm makes steps longer."""
    held = sum(low <= truth <= high for low, _, high in intervals)
    return {
        "truth": truth,
        "counted": len(intervals),
        "held": held,
        "share": held / len(intervals) if intervals else math.nan,
        "found": sum(high < 0 for _, _, high in intervals),
        "mean": statistics.fmean(value for _, value, _ in intervals) if intervals else math.nan,
        "median_half_width": statistics.median((high - low) / 2 for low, _, high in intervals) if intervals else None,
    }


def by_windows(run: dict[str, Any], number: int) -> dict[str, Any]:
    """``judged`` of runs of so many windows each, one after the other, in place of single windows."""
    windows = [Estimate(value, low, high, 0, 0) for low, value, high in run["windows"]]
    parts = [windows[first : first + number] for first in range(0, len(windows) - number + 1, number)]
    pooled = [found for part in parts if (found := pool_changes(part)) is not None]
    intervals = [
        (found.ci_low, found.value, found.ci_high)
        for found in pooled
        if found.ci_low is not None and found.ci_high is not None
    ]
    return judged(intervals, run["truth"])


def _read(file: Path) -> None:
    for run in json.loads(file.read_text())["runs"]:
        for number in (1, 4, 10, 20, 50):
            found = by_windows(run, number)
            print(
                f"{run['longer']:+.0%} longer, runs of {number:2} windows: +- {found['median_half_width']:.1%}, holds "
                f"the truth {found['held']} of {found['counted']}, found to be slower in {found['found']}"
            )


def main() -> None:
    """Run the jobs, print a line for each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--operator-ms", type=float, default=8.0, help="length of an operator as configured")
    parser.add_argument("--work", choices=["device", "clock"], default="device", help="see truth.py's operators")
    parser.add_argument("--longer", type=float, nargs="+", default=list(LONGER), help="fractions")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--read", type=Path, help="a result: what runs of fewer windows find; nothing is run")
    arguments = parser.parse_args()
    if arguments.read:
        _read(arguments.read)
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    runs = []
    for longer in arguments.longer:
        found = run_job(
            TruthJob(slowdown=longer, windows=arguments.windows, operator_ms=arguments.operator_ms, work=arguments.work)
        )
        runs.append(found)
        print(
            f"{longer:+.0%} longer: truth {found['truth']:+.3%}, mean {found['mean']:+.3%} "
            f"+- {found['median_half_width']:.2%}, holds it {found['held']} of {found['counted']} "
            f"({found['share']:.1%}), found to be slower in {found['found']}; "
            f"the run: {' to '.join(f'{bound:+.2%}' for bound in found['run'][::2]) if found['run'] else 'nothing'}",
            flush=True,
        )
    if arguments.json:
        environment = {
            "date": time.strftime("%Y-%m-%d"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "device": "cpu",
            "command": " ".join(["python", *sys.argv]),
        }
        arguments.json.write_text(json.dumps({"goal": GOAL, "environment": environment, "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
