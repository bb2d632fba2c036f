"""Does a job's own rhythm make a false answer? A/A controls of live jobs whose steps are not all alike.

    python benchmarks/aa_jobs.py [--windows 6] [--times 3] [--only gan] [--json benchmarks/results/aa-jobs-cpu.json]

Two Gloo ranks train. Both sides of every window run overlapped, so that every true difference is zero. What the jobs do
is what real ones do: every 4th, 8th, 10th or 50th step takes half as long again (a loader's workers, logging, a save),
micro-batches are uneven, a second network trains in every fourth step, ranks synchronise in every fourth step only.
Each job runs several times. Its intervals of the step's speed-up and of the compute slowdown must hold zero.

Compute is an operator that sleeps to a known length, so that a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import JsonlSink, OverlapMonitor, Schedule
from overlap_callbacks.report import record

FIGURES = ("speedup_vs_sequential", "compute_slowdown")
EVERY_N_STEPS, FIRST_STEP = 200, 20
OPERATOR_MS = 12.0
# A job of a rhythm: every so-manieth step takes half as long again, in Python or in an operator that the profile has.
RHYTHMS = {"every-4th": 4, "every-8th": 8, "every-10th": 10, "every-50th": 50}
IN_COMPUTE = {"heavy-every-4th": 4, "heavy-every-8th": 8}


class Job:
    """A job of one rank; ``step`` is one optimizer step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(_network())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._data = torch.randn(16, 64)

    def step(self, number: int) -> None:
        self.micro_batch(self.model, 1.0)
        self.update(self.optimizer)

    def micro_batch(self, model: torch.nn.Module, factor: float) -> None:
        torch.ops.aa_jobs.work(self._data, OPERATOR_MS * factor)
        model(self._data).square().mean().backward()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()


class Rhythmic(Job):
    def __init__(self, period: int, *, in_compute: bool = False) -> None:
        super().__init__()
        self._period, self._in_compute = period, in_compute

    def step(self, number: int) -> None:
        super().step(number)
        if number % self._period == 0:
            if self._in_compute:
                torch.ops.aa_jobs.work(self._data, 0.5 * OPERATOR_MS)
            else:
                time.sleep(0.5 * OPERATOR_MS / 1e3)


class UnevenMicroBatches(Job):
    """1, 2, 1, 3 micro-batches in turn; gradients are reduced at the last one."""

    def step(self, number: int) -> None:
        count = (1, 2, 1, 3)[number % 4]
        for place in range(count):
            quiet = contextlib.nullcontext() if place == count - 1 else self.model.no_sync()
            with quiet:
                self.micro_batch(self.model, 0.5)
        self.update(self.optimizer)


class Gan(Job):
    """A second network trains in every fourth step."""

    def __init__(self) -> None:
        super().__init__()
        self._other = DistributedDataParallel(_network())
        self._of_other = torch.optim.SGD(self._other.parameters(), lr=1e-3)

    def step(self, number: int) -> None:
        super().step(number)
        if number % 4 == 3:
            self.micro_batch(self._other, 1.0)
            self.update(self._of_other)


class PolicyAndReward(Job):
    """Four updates of one network, then a longer step that evaluates rewards and averages them over the ranks."""

    def step(self, number: int) -> None:
        if number % 5 == 4:
            with torch.no_grad():
                torch.ops.aa_jobs.work(self._data, 2 * OPERATOR_MS)
                rewards = self.model.module(self._data).mean()
            dist.all_reduce(rewards)
        super().step(number)


class LocalSgd(Job):
    """Ranks train on their own and average their weights in every fourth step."""

    def step(self, number: int) -> None:
        self.micro_batch(self.model.module, 1.0)
        self.update(self.optimizer)
        if number % 4 == 3:
            works = [dist.all_reduce(p.data, async_op=True) for p in self.model.parameters()]
            for parameter, work in zip(self.model.parameters(), works, strict=True):
                work.wait()
                parameter.data /= dist.get_world_size()


JOBS: dict[str, Callable[[], Job]] = {
    **{name: (lambda period=period: Rhythmic(period)) for name, period in RHYTHMS.items()},  # type: ignore[misc]
    **{
        name: (lambda period=period: Rhythmic(period, in_compute=True))  # type: ignore[misc]
        for name, period in IN_COMPUTE.items()
    },
    "uneven-micro-batches": UnevenMicroBatches,
    "gan": Gan,
    "policy-and-reward": PolicyAndReward,
    "local-sgd": LocalSgd,
}


def _network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))


def _work(data: torch.Tensor, length_ms: float) -> None:
    end = time.perf_counter() + length_ms / 1e3
    time.sleep(max(end - time.perf_counter() - 0.0005, 0.0))
    while time.perf_counter() < end:
        pass


def train(rank: int, port: int, name: str, windows: int, folder: str) -> None:
    """One rank of a job."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    library = torch.library.Library("aa_jobs", "FRAGMENT")
    library.define("work(Tensor(a!) data, float length_ms) -> ()")
    library.impl("work", _work, "CPU")
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    job = JOBS[name]()
    schedule = Schedule(every_n_steps=EVERY_N_STEPS, first_step=FIRST_STEP, control=True)
    monitor = OverlapMonitor(schedule, [JsonlSink(folder)], max_overhead=None, power=False)
    for number in range(FIRST_STEP + windows * EVERY_N_STEPS):
        with monitor.step(number):
            job.step(number)
    monitor.close()
    dist.destroy_process_group()


def run(name: str, windows: int) -> dict[str, Any]:
    """One job, and what its record says."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=train, args=(rank, port, name, windows, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(900)
        if any(process.exitcode != 0 for process in ranks):
            raise RuntimeError(f"{name}: ranks ended with {[process.exitcode for process in ranks]}")
        summary = record.read(folder).summary
        return {
            "job": name,
            "windows": len(summary.windows),
            "count": len(summary.valid_windows),
            "figures": {
                figure: [estimate.value, estimate.ci_low, estimate.ci_high]
                for figure, estimate in summary.sides().items()
                if figure in FIGURES
            },
            "each_window": [
                {figure: _bounds(getattr(window, figure)) for figure in FIGURES} for window in summary.valid_windows
            ],
            "notes": sorted({problem for window in summary.windows for problem in window.problems}),
        }


def _bounds(estimate: Any) -> list[float | None]:
    return [] if estimate is None else [estimate.value, estimate.ci_low, estimate.ci_high]


def holds_zero(bounds: list[float | None]) -> bool | None:
    """Whether an interval holds zero; None where there is none."""
    if len(bounds) < 3 or bounds[1] is None or bounds[2] is None:
        return None
    return bounds[1] <= 0 <= bounds[2]


def main() -> int:
    """Run all jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=tuple(JOBS), default=tuple(JOBS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    for name in asked.only:
        for number in range(asked.times):
            row = {**run(name, asked.windows), "time": number}
            rows.append(row)
            shown = {
                figure: " ".join(f"{100 * value:+.2f}%" for value in bounds if value is not None)
                for figure, bounds in row["figures"].items()
            }
            print(
                name, number, f"{row['count']} of {row['windows']} windows count", shown, row["notes"][:4], flush=True
            )
    verdicts = [holds_zero(bounds) for row in rows for bounds in row["figures"].values()]
    known = [verdict for verdict in verdicts if verdict is not None]
    print(f"intervals of a run that hold zero: {sum(known)} of {len(known)}")
    if asked.json:
        about = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "command": "python benchmarks/aa_jobs.py " + " ".join(sys.argv[1:]),
        }
        asked.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
