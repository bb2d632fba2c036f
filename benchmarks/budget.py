"""Whether ``max_overhead`` holds whatever steps and windows do: jobs whose steps swing and whose windows cost much.

    python benchmarks/budget.py [--seconds 60] [--max-overhead 0.01] [--json FILE]

Two Gloo processes train by all-reduces and sleep, with a window every 100 steps, in three jobs:

- steady: all steps are alike;
- swinging: every fourth hundred of steps takes ten times as long as the others, so that a window may be measured on
  slow steps and is paid for by fast ones;
- dear window: in the fourth window that is measured, each step takes a hundred times as long as outside.

The cost is measured from outside: what the windows' steps, and the 20 after each, take more than the mean of the other
steps of their hundred. The share is of the training time since the first window; the promise is that it is no more
than ``max_overhead`` whenever a window begins. Steps are not alike: the share has a one-sided lower bound of 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.about import about
from overlap_callbacks import OverlapMonitor, OverlapReport, Schedule, Sink

EVERY_N_STEPS = 100
STEP_S, SLOW, DEAR = 0.004, 10, 100
# Steps after a window that count with it: those in which it is worked out.
_AFTER = 20
# A window that the budget leaves out ends before it has so many steps.
_MEASURED = 3
# Standard errors by which the share is above its lower bound.
_ONE_SIDED_95 = 1.645
JOBS = ("steady", "swinging", "dear window")


class _Kept(Sink):
    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)


def train(rank: int, job: str, seconds: float, max_overhead: float, folder: str) -> dict[str, Any]:
    """Run one rank; what rank 0 saw of its windows."""
    schedule = Schedule(
        every_n_steps=EVERY_N_STEPS, first_step=20, repeats=1, steps_per_block=1, warmup_steps=0, profiled_steps=0,
        spread=False,  # so that each hundred of steps has some outside windows
    )  # fmt: skip
    kept = _Kept()
    monitor = OverlapMonitor(schedule, [kept], max_overhead=max_overhead, run_dir=folder, power=False)
    tensor, stop = torch.ones(8), torch.zeros(1)
    took_s, inside = [], []
    windows = length = step = 0
    began_s = time.perf_counter()
    while True:
        before_s = time.perf_counter()
        monitor.step_begin(step)
        length = length + 1 if monitor.in_window else 0
        windows += length == _MEASURED
        length_s = STEP_S * (SLOW if job == "swinging" and step // EVERY_N_STEPS % 4 == 0 else 1)
        dear = job == "dear window" and length >= _MEASURED and windows == 4
        time.sleep(length_s * (DEAR if dear else 1))
        dist.all_reduce(tensor)
        inside.append(monitor.in_window)
        monitor.step_end(step)
        took_s.append(time.perf_counter() - before_s)
        step += 1
        if step % EVERY_N_STEPS == 0:  # all ranks end after the same step
            stop[0] = float(time.perf_counter() - began_s > seconds)
            dist.all_reduce(stop)
            if stop[0]:
                break
    monitor.close(10.0)
    return {**_shares(took_s, inside), "told_s": _told_s(kept.reports), "windows": windows}


def _shares(took_s: list[float], inside: list[bool]) -> dict[str, Any]:
    """Cost and training time when each window begins, and at the end."""
    touched, last = [], -math.inf
    for step, is_inside in enumerate(inside):
        last = step if is_inside else last
        touched.append(step - last <= _AFTER)
    usual_s, variance = {}, {}
    for hundred in range(len(took_s) // EVERY_N_STEPS):
        steps = range(hundred * EVERY_N_STEPS, (hundred + 1) * EVERY_N_STEPS)
        others_s = [took_s[step] for step in steps if not touched[step]]
        num_touched = len(steps) - len(others_s)
        usual_s[hundred] = statistics.mean(others_s)
        # Of the touched steps' sum, and of the mean that is taken off each of them; for one of them.
        variance[hundred] = statistics.variance(others_s) * (1 + num_touched / len(others_s))
    lengths = [next((n for n, inner in enumerate(inside[step:]) if not inner), 0) for step in range(len(inside))]
    begun = [length >= _MEASURED and not (step and inside[step - 1]) for step, length in enumerate(lengths)]
    first, lost_s, trained_s, of_lost = begun.index(True), 0.0, 0.0, 0.0
    shares, at_least = [], []
    for step in range(first, len(took_s)):
        if begun[step] and step > first:
            shares.append(lost_s / trained_s)
            at_least.append((lost_s - _ONE_SIDED_95 * math.sqrt(of_lost)) / trained_s)
        usual = usual_s[step // EVERY_N_STEPS]
        if touched[step]:
            lost_s += took_s[step] - usual
            of_lost += variance[step // EVERY_N_STEPS]
        trained_s += usual
    return {
        "share_when_windows_begin": [round(share, 6) for share in shares],
        "at_least_when_windows_begin": [round(share, 6) for share in at_least],
        "share_at_the_end": lost_s / trained_s,
        "lost_s": lost_s,
        "trained_s": trained_s,
    }


def _told_s(reports: list[OverlapReport]) -> float:
    return sum(report.lost_ms or 0.0 for report in reports) / 1e3


def _rank_main(rank: int, store: str, queue: Any, *options: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = train(rank, *options)
    if rank == 0:
        queue.put(found)
    dist.barrier()


def run(job: str, seconds: float, max_overhead: float) -> dict[str, Any]:
    """One job of two processes."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        options = (f"{folder}/store", queue, job, seconds, max_overhead, f"{folder}/run")
        ranks = [context.Process(target=_rank_main, args=(rank, *options)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("a rank failed")
    found: dict[str, Any] = queue.get()
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each job")
    parser.add_argument("--max-overhead", type=float, default=0.01)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for job in JOBS:
        found = results[job] = run(job, options.seconds, options.max_overhead)
        most = max(found["share_when_windows_begin"], default=math.nan)
        surely = max(found["at_least_when_windows_begin"], default=math.nan)
        print(
            f"{job:12} {found['windows']:3} windows, lost {found['lost_s']:.2f} s of {found['trained_s']:.0f} s (told "
            f"{found['told_s']:.2f} s): {found['share_at_the_end']:.2%} at the end, at most {most:.2%} when a window "
            f"began, of which {surely:.2%} is sure; allowed {options.max_overhead:.2%}"
        )
    if options.json:
        command = f"python benchmarks/budget.py --seconds {options.seconds:g} --max-overhead {options.max_overhead:g}"
        environment = about("torch", command=command, every_n_steps=EVERY_N_STEPS, step_s=STEP_S)
        options.json.write_text(json.dumps({"environment": environment, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
