"""The whole cost of a window, measured from outside, against what the library tells (``lost_ms`` of its reports).

    python benchmarks/cost.py [--step-ms 16 40] [--rounds 24] [--seconds 300] [--json FILE]

Two processes train over Gloo. Each round has two halves of as many steps: one with the library, in which one window
opens, and one without it, in turns (ABBA). Their difference is what a window took from training, whatever it was spent
on. The told time of a round's window should be that, within the interval of the difference. The largest parts of the
library's own work are timed by themselves, on rank 0.

Where the file has jobs of the same step and versions already, the new rounds are added to them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import math
import os
import platform
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scipy import special
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overlap_callbacks import OverlapMonitor, OverlapReport, Schedule, Sink, __version__
from overlap_callbacks.sinks import JsonlSink

# Steps of the job before the first round: allocators and buckets settle.
WARM_UP = 40
# Steps of a half after the window: those that are slower because of it, and some more.
STEPS_AFTER = 100

# What is timed by itself, and where it is called.
PARTS = {
    "profiler's start": ("instruments.profiler", "Profile.start"),
    "profiler's stop": ("instruments.profiler", "Profile.stop"),
    "order check": ("monitor.background.order_check", "check_order"),
    "reading of events": ("instruments.profiler", "Profile.kernels"),
    "measurement, with the reading": ("monitor.background.reporter", "measure"),
    "report": ("monitor.background.reporter", "report_of"),
    "record": ("sinks.jsonl", "JsonlSink.log"),
}


@contextlib.contextmanager
def timed_parts() -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Wall time and CPU time of the calling thread of each call of ``PARTS``, in ms."""
    taken: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def around(part: str, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken[part].append(((time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3))

        return timed

    with contextlib.ExitStack() as stack:
        for part, (module, path) in PARTS.items():
            owner: Any = importlib.import_module("overlap_callbacks." + module)
            *owners, name = path.split(".")
            for each in owners:
                owner = getattr(owner, each)
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, around(part, getattr(owner, name)))
        yield taken


class Job:
    """A model of many small operators, whose steps take about as long as wanted.

    Args:
        step_ms: time of a step that is wanted.
    """

    def __init__(self, step_ms: float) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64) for _ in range(24)]
        self._model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.05)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), foreach=False)
        self._data = torch.randn(32, 64)
        # Only the last pass of a step communicates. So a further pass is cheaper than the first.
        one_ms, five_ms = self._mean_ms(1), self._mean_ms(5)
        self._passes = max(1, round(1 + (step_ms - one_ms) / max(1e-3, (five_ms - one_ms) / 4)))

    def _mean_ms(self, passes: int) -> float:
        """Time of a step of so many passes, the same on all ranks."""
        self._passes = passes
        for _ in range(5):
            self.step()
        start = time.perf_counter()
        for _ in range(20):
            self.step()
        took_ms = torch.tensor((time.perf_counter() - start) / 20 * 1e3)
        dist.all_reduce(took_ms)
        return float(took_ms) / dist.get_world_size()

    def step(self) -> None:
        for micro_batch in range(self._passes):
            self._model.require_backward_grad_sync = micro_batch == self._passes - 1
            self._model(self._data).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class Told(Sink):
    """Keeps what windows are said to cost."""

    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)


def run(
    rank: int, step_ms: float, rounds: int, profiled_steps: int = 4, seconds: float = math.inf, folder: str = ""
) -> dict[str, Any]:
    """A job of so many rounds; what windows took and what was told, one number a round, in ms; rank 0's.

    Needs a process group.

    Args:
        rank: of this process.
        step_ms: time of a step that is wanted.
        rounds: how many, at most.
        profiled_steps: of the schedule.
        seconds: after which no further round begins.
        folder: of a record; none is written without it.
    """
    began = time.perf_counter()
    job = Job(step_ms)
    schedule = Schedule(profiled_steps=profiled_steps)
    half = schedule.window_steps + STEPS_AFTER + 80
    first = WARM_UP + 80  # the steps before a window tell what is usual
    schedule = Schedule(every_n_steps=half, first_step=first, profiled_steps=profiled_steps, spread=False)
    told = Told()
    sinks: list[Sink] = [told, JsonlSink(folder)] if folder else [told]
    monitor = OverlapMonitor(schedule, sinks, max_overhead=None, power=False)
    for _ in range(WARM_UP):
        with monitor.step():
            job.step()

    def train(measured: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(half):
            if measured:
                with monitor.step():
                    job.step()
            else:
                job.step()
        dist.barrier()
        return (time.perf_counter() - start) * 1e3

    halves: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            without, measured = train(False), train(True)
        else:
            measured, without = train(True), train(False)
        halves.append((measured, without))
        late = torch.tensor(float(time.perf_counter() - began > seconds))
        dist.all_reduce(late)  # all ranks do as many rounds
        if late:
            break
    monitor.close()
    return {
        "step_ms": float(np.median([without for _, without in halves])) / half,
        "took_ms": [measured - without for measured, without in halves],
        "told_ms": [report.lost_ms for report in told.reports],
        # What was told before the steps after a window were counted.
        "told_of_window_ms": [window_alone_ms(report) for report in told.reports],
        "overhead": [report.measurement_overhead for report in told.reports],
    }


def window_alone_ms(report: OverlapReport) -> float:
    """The window's time beyond what its steps take overlapped, and the CPU time of the reporting thread."""
    step = report.e2e_overlapped_ms
    assert step is not None
    return max(
        max(0.0, sample.wall_ms - sample.num_steps * step.value) + sample.report_cpu_ms for sample in report.samples
    )


def interval(values: Any, confidence: float = 0.95) -> list[float]:
    """Mean of some values, and the bounds of its interval by Student's t."""
    mean, count = float(np.mean(values)), len(values)
    half = float(special.stdtrit(count - 1, (1 + confidence) / 2) * np.std(values, ddof=1) / np.sqrt(count))
    return [mean, mean - half, mean + half]


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Means with 95 % intervals, over rounds; of parts the mean wall time and CPU time of a window, in ms."""
    took, told = np.array(found["took_ms"]), np.array(found["told_ms"])
    before = np.array(found["told_of_window_ms"])
    rows = {"took_ms": took, "told_ms": told, "took_but_not_told_ms": took - told, "not_told_before_ms": took - before}
    result: dict[str, Any] = {"step_ms": found["step_ms"], "windows": len(took)}
    for name, values in rows.items():
        result[name] = interval(values)
    parts = {part: np.array(calls).sum(axis=0) / len(took) for part, calls in found.get("parts", {}).items()}
    result["parts"] = {part: {"wall_ms": wall, "cpu_ms": cpu} for part, (wall, cpu) in parts.items()}
    return result


def added(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The rounds of two runs of one job."""
    parts = {part: earlier["parts"].get(part, []) + later["parts"].get(part, []) for part in PARTS}
    lists = {key: earlier[key] + value for key, value in later.items() if isinstance(value, list)}
    weight = len(earlier["took_ms"]) / len(lists["took_ms"])
    step_ms = weight * earlier["step_ms"] + (1 - weight) * later["step_ms"]
    return {**lists, "step_ms": step_ms, "parts": parts}


def _rank(rank: int, port: int, step_ms: float, rounds: int, seconds: float, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    with timed_parts() as taken:
        found = run(rank, step_ms, rounds, seconds=seconds, folder=path + ".record")
    found["parts"] = taken
    if rank == 0:
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[16.0, 40.0])
    parser.add_argument("--rounds", type=int, default=24, help="windows of each job")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which a job begins no further round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = {"torch": torch.__version__, "device": "cpu", "python": platform.python_version(),
                   "cores": os.cpu_count(), "library": __version__}  # fmt: skip
    jobs: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text())
        jobs = known["jobs"] if {key: known["environment"].get(key) for key in environment} == environment else []
    for step_ms in options.step_ms:
        with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            path = os.path.join(folder, "found.json")
            mp.spawn(_rank, (port, step_ms, options.rounds, options.seconds, path), nprocs=2)
            found = json.loads(Path(path).read_text())
        for job in [job for job in jobs if job["wanted_step_ms"] == step_ms]:
            found = added(job["rounds"], found)
            jobs.remove(job)
        summary = summarise(found)
        jobs.append({"wanted_step_ms": step_ms, **summary, "rounds": found})
        print(f"a step of {summary['step_ms']:.1f} ms, {summary['windows']} windows:")
        for name in ("took_ms", "told_ms", "took_but_not_told_ms", "not_told_before_ms"):
            value, low, high = summary[name]
            print(f"  {name:22} {value:8.1f} [{low:.1f}, {high:.1f}]")
        for part, taken in summary["parts"].items():
            print(f"  {part:30} {taken['wall_ms']:8.1f} ms, of which CPU {taken['cpu_ms']:.1f}")
        if options.json:
            content = {"environment": {"date": time.strftime("%Y-%m-%d"), **environment}, "jobs": jobs}
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
