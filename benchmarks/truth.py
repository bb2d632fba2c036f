"""Do intervals hold the truth in running jobs? Two processes train, and their compute is slowed by a known amount.

    python benchmarks/truth.py [--windows 100] [--json benchmarks/results/truth-cpu.json]

Each job trains a small network on two Gloo ranks. It reduces each layer's gradients while the next layer computes, and
every layer computes in an operator of a known length. In overlapped steps that operator takes 0, 5 or 20 % longer; the
job takes the mode of a step from ``monitor.mode``. A fourth job is an A/A control, in which all steps run overlapped.

A 95 % interval of one window should hold the truth in about 19 windows of 20. What the truth is can be said in three
ways, and the results have all of them:

- ``put_in``: what the job was made to take longer. In an A/A control all figures are zero; else the slow-down and the
  gap follow from the length of the operators.
- ``median``: measured from outside the library, with ``time.perf_counter`` around the same code, in each window; the
  median over the windows.
- ``mean``: the same, as the mean of logarithms over all steps of the job. Where few steps take several times as long (a
  core that another program takes away), they move this mean, and most windows have none of them.

Two kinds of work differ in what else can slow them down:

- ``clock``: the operator ends when the clock says so. Its length does not depend on who else uses the core.
- ``operations``: it does so many operations, and takes as long as these take beside Gloo's threads and other programs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import pickle
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks import JsonlSink, Mode, OverlapMonitor, Schedule
from overlap_callbacks.monitor.placement import PhaseBalance
from overlap_callbacks.report import record

FIGURES = ("compute_slowdown", "speedup_vs_sequential", "gap_to_ideal")
SLOWDOWNS = (0.05, 0.2, 0.0)
GOAL = 0.94

_WIDTH = 128
_BATCH = 16
_STEPS_BEFORE = 10
_JOB_TIMEOUT_S = 900


@dataclass(frozen=True)
class TruthJob:
    """One job.

    Attributes:
        slowdown: how much longer an operator takes in overlapped steps, as a fraction.
        control: an A/A job.
        work: ``clock``, ``operations`` or ``device``.
        windows: number of windows.
        gap_steps: steps between windows, for the reports of the last one.
        operator_ms: length of an operator in sequential steps; for ``operations`` about so much on an idle core.
        layers: layers of the network; each has one operator.
        repeats, profiled_steps: as in ``Schedule``.
    """

    slowdown: float = 0.0
    control: bool = False
    work: str = "clock"
    windows: int = 100
    gap_steps: int = 5
    operator_ms: float = 8.0
    layers: int = 2
    repeats: int = 4
    profiled_steps: int = 4

    @property
    def name(self) -> str:
        return "A/A" if self.control else f"{self.slowdown:+.0%}"

    def schedule(self) -> Schedule:
        window = Schedule(every_n_steps=10_000, repeats=self.repeats, profiled_steps=self.profiled_steps)
        return Schedule(
            every_n_steps=window.window_steps + self.gap_steps,
            first_step=_STEPS_BEFORE,
            repeats=self.repeats,
            profiled_steps=self.profiled_steps,
            control=self.control,
            spread=False,  # so that the clock outside knows which steps count
        )


def placed(schedule: Schedule) -> Schedule:
    """The plan of every step of a schedule that is not spread."""
    return schedule.placed(PhaseBalance().place(schedule, schedule.first_step, "", schedule.steps_per_block))


# -- in the ranks


class Operator:
    """The operator ``truth::work``, which takes a known time or does a known number of operations."""

    # 40, 42 and 48 pieces are whole numbers. Together 40 take about as long as asked for.
    _PIECES = 40
    _ELEMENTS_PER_MS = 10_000
    # A sleep may end later than asked for: the last part is spent awake.
    _AWAKE_S = 0.0005

    def __init__(self, job: TruthJob) -> None:
        self._job = job
        self._library = torch.library.Library("truth", "FRAGMENT")
        self._library.define("work(Tensor(a!) scratch, float factor) -> ()")
        kinds = {"clock": self._clocked, "operations": self._counted, "device": self._waited}
        self._library.impl("work", kinds[job.work], "CPU")
        counted = job.work == "operations"
        self._scratch = torch.rand(int(job.operator_ms * self._ELEMENTS_PER_MS) if counted else 10_000)

    def __call__(self, factor: float) -> None:
        torch.ops.truth.work(self._scratch, factor)

    def _clocked(self, scratch: torch.Tensor, factor: float) -> None:
        end = time.perf_counter() + factor * self._job.operator_ms / 1e3
        while time.perf_counter() < end:
            scratch.sin_()

    def _waited(self, scratch: torch.Tensor, factor: float) -> None:
        """Ends by the clock too, and leaves the core to others until then, as a device's kernel does."""
        end = time.perf_counter() + factor * self._job.operator_ms / 1e3
        time.sleep(max(end - time.perf_counter() - self._AWAKE_S, 0.0))
        while time.perf_counter() < end:
            pass

    def _counted(self, scratch: torch.Tensor, factor: float) -> None:
        for _ in range(round(self._PIECES * factor)):
            scratch.sin_()


class Network:
    """A network of tanh layers, whose backward pass is written by hand: every moment of compute can be timed outside.

    Args:
        rank: seeds the data.
        layers: number of them.
        operator: the compute of known length.
    """

    def __init__(self, rank: int, layers: int, operator: Operator) -> None:
        weights = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(_WIDTH, _WIDTH, generator=weights) / _WIDTH**0.5 for _ in range(layers)]
        self._data = torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(1 + rank))
        self._operator = operator

    def step(self, factor: float) -> float:
        """Train one step.

        Args:
            factor: length of the operators, over their length in sequential steps.

        Returns:
            The time spent in compute, in seconds, as seen from outside.
        """
        now = time.perf_counter
        begin = now()
        outputs = [self._data]
        for weight in self.weights:
            outputs.append(torch.mm(outputs[-1], weight).tanh_())
        gradient = outputs[-1] - 0.5
        compute_s = now() - begin
        reductions = []
        for layer in reversed(range(len(self.weights))):
            begin = now()
            self._operator(factor)
            gradient = gradient * (1 - outputs[layer + 1].square())
            of_weight = torch.mm(outputs[layer].t(), gradient)
            gradient = torch.mm(gradient, self.weights[layer].t())
            compute_s += now() - begin
            reductions.append((layer, of_weight, dist.all_reduce(of_weight, async_op=True)))
        for layer, of_weight, work in reductions:
            work.wait()
            begin = now()
            self.weights[layer].sub_(of_weight, alpha=1e-4)
            compute_s += now() - begin
        return compute_s


def _train(rank: int, job: TruthJob, port: int, folder: str) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120))
    network = Network(rank, job.layers, Operator(job))
    schedule = job.schedule()
    monitor = OverlapMonitor(
        schedule, [JsonlSink(folder)], run_dir=folder, max_overhead=None, strict=True, power=False
    )  # fmt: skip
    seen = []  # (window, part, arm, seconds of the step, seconds of its compute) of counted steps
    plans = placed(schedule)
    for step in range(_STEPS_BEFORE + job.windows * schedule.every_n_steps):
        plan = plans.plan(step)
        with monitor.step():
            factor = 1 + job.slowdown if monitor.mode is Mode.OVERLAPPED else 1.0
            begin = time.perf_counter()
            compute_s = network.step(factor)
            step_s = time.perf_counter() - begin
        if plan is not None and plan.counted:
            seen.append((plan.window, plan.part.value, plan.arm.value, step_s, compute_s))
    monitor.close()
    Path(folder, f"outside-{rank}.pickle").write_bytes(pickle.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


# -- in the benchmark's own process


def run_ranks(train: Callable[[int, Any, int, str], None], job: TruthJob) -> tuple[record.Record, list[Any]]:
    """Run the two ranks of a job.

    Args:
        train: what a rank does, with its number, the job, the port of the store and the folder of the record. It leaves
            what it has measured outside the library in the folder's ``outside-RANK.pickle``.
        job: passed on.

    Returns:
        The record, and what the ranks have measured outside.

    Raises:
        RuntimeError: a rank failed or did not end in time.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=train, args=(rank, job, store.port, folder), daemon=True) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(1.0, began + _JOB_TIMEOUT_S - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        if codes != [0, 0]:
            raise RuntimeError(f"the ranks of the job {job.name} ended with {codes}")
        outside = [row for rank in (0, 1) for row in pickle.loads(Path(folder, f"outside-{rank}.pickle").read_bytes())]
        return record.read(Path(folder)), outside


def run_job(job: TruthJob) -> dict[str, Any]:
    """Run a job; what its windows say, the truth, and how many of them hold it.

    Raises:
        RuntimeError: a rank failed or did not end in time.
    """
    began = time.monotonic()
    found, outside = run_ranks(_train, job)
    reports = found.windows
    counted = [report for report in reports if report.complete and report.valid]
    truth = truth_of(outside)
    by_window = _by_window(outside)
    truths = {"put_in": put_in(job, outside), "median": _medians(by_window), "mean": truth}
    windows: list[dict[str, list[float]]] = []
    for report in counted:
        figures = {name: getattr(report, name) for name in FIGURES}
        windows.append(
            {name: [e.value, e.ci_low, e.ci_high] for name, e in figures.items() if e and e.ci_low is not None}
        )
    return {
        "job": asdict(job),
        "seconds": round(time.monotonic() - began, 1),
        "reported": len(reports),
        "counted": len(counted),
        "not_counted": sorted({problem for r in reports if r not in counted for problem in r.problems}),
        "notes": sorted({problem for r in reports for problem in r.problems}),
        "truth": truth,
        "figures": {name: _judged([w[name] for w in windows if name in w], truth[name]) for name in FIGURES},
        "truths": truths,
        "held": {
            kind: {name: _judged([w[name] for w in windows if name in w], of_kind[name]) for name in of_kind}
            for kind, of_kind in truths.items()
        },
        "outside": by_window,
        "windows": windows,
    }


def truth_of(outside: list[tuple[int, str, str, float, float]]) -> dict[str, float]:
    """The figures from what was measured outside the library, by the same equations.

    Args:
        outside: window, part, arm, seconds of the step and of its compute, of each counted step of each rank.
    """
    logs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for _, part, arm, step_s, compute_s in outside:
        logs[part, arm].append((math.log(step_s), math.log(compute_s)))

    def mean(part: str, mode: Mode, column: int) -> float:
        return statistics.fmean(row[column] for row in logs[part, mode.value])

    step, sequential = (mean("timed", mode, 0) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL))
    compute, isolated = (mean("profiled", mode, 1) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL))
    ideal_s = math.exp(step) - (math.exp(compute) - math.exp(isolated))
    return {
        "compute_slowdown": math.expm1(compute - isolated),
        "speedup_vs_sequential": math.expm1(sequential - step),
        "gap_to_ideal": math.exp(step) / ideal_s - 1,
    }


def put_in(job: TruthJob, outside: list[tuple[int, str, str, float, float]]) -> dict[str, float]:
    """The figures that follow from what the job was made to take longer; none if operators have no known length."""
    if job.control:
        return dict.fromkeys(FIGURES, 0.0)
    if job.work != "clock":
        return {}
    longer_ms = job.slowdown * job.layers * job.operator_ms
    alone_ms = 1e3 * statistics.median(row[4] for row in outside if row[1:3] == ("profiled", Mode.SEQUENTIAL.value))
    step_ms = 1e3 * statistics.median(row[3] for row in outside if row[1:3] == ("timed", Mode.OVERLAPPED.value))
    return {"compute_slowdown": longer_ms / alone_ms, "gap_to_ideal": step_ms / (step_ms - longer_ms) - 1}


def _medians(by_window: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(window[name] for window in by_window) for name in FIGURES}


def _by_window(outside: list[tuple[int, str, str, float, float]]) -> list[dict[str, float]]:
    rows: dict[int, list[Any]] = defaultdict(list)
    for row in outside:
        rows[row[0]].append(row)
    return [truth_of(rows[window]) for window in sorted(rows)]


def _judged(intervals: list[list[float]], truth: float) -> dict[str, float]:
    """How many intervals hold the truth, and how wide and how far off they are."""
    held = sum(low <= truth <= high for _, low, high in intervals)
    values = [value for value, _, _ in intervals]
    halves = [(high - low) / 2 for _, low, high in intervals]
    return {
        "held": held,
        "of": len(intervals),
        "share": held / len(intervals) if intervals else math.nan,
        "too_low": sum(high < truth for _, _, high in intervals),
        "too_high": sum(low > truth for _, low, _ in intervals),
        "mean": statistics.fmean(values) if values else math.nan,
        "median_half_width": statistics.median(halves) if halves else math.nan,
    }


def _show(result: dict[str, Any]) -> None:
    job = TruthJob(**result["job"])
    head = f"{job.name:>5} {job.work:<10} {result['counted']:>3} of {result['reported']:>3} windows"
    for name in FIGURES:
        for kind, truths in result["truths"].items():
            if name in truths:
                found = result["held"][kind][name]
                print(
                    f"{head}  {name:<22} {kind:<7} {truths[name]:+8.3%}  mean {found['mean']:+8.3%}  "
                    f"+- {found['median_half_width']:.2%}  holds it {found['held']} of {found['of']} "
                    f"({found['too_low']} below, {found['too_high']} above)",
                    flush=True,
                )
                head = " " * len(head)


def main() -> None:
    """Run the jobs, print a line for each figure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--work", choices=["clock", "operations"], nargs="+", default=["clock", "operations"])
    parser.add_argument("--operator-ms", type=float, default=8.0, help="length of an operator in sequential steps")
    parser.add_argument("--layers", type=int, default=2, help="layers of the network; each has one operator")
    parser.add_argument("--profiled-steps", type=int, default=4, help="as in the schedule")
    parser.add_argument("--only", nargs="+", help="names of jobs, e.g. A/A +5%%")
    parser.add_argument("--json", type=Path, help="add the figures to this file too")
    arguments = parser.parse_args()
    for work in arguments.work:
        job = TruthJob(
            work=work,
            windows=arguments.windows,
            operator_ms=arguments.operator_ms,
            layers=arguments.layers,
            profiled_steps=arguments.profiled_steps,
        )
        jobs = [replace(job, control=True), *[replace(job, slowdown=slowdown) for slowdown in SLOWDOWNS]]
        for job in jobs:
            if arguments.only and job.name not in arguments.only:
                continue
            result = run_job(job)
            _show(result)
            if arguments.json:
                _add(arguments.json, result)


def _add(path: Path, result: dict[str, Any]) -> None:
    """Add a run to the file. No run is ever taken out: the file has all that were made."""
    environment = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": "cpu",
        "command": " ".join(["python", *sys.argv]),
    }
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    runs.append({"environment": environment, **result})
    path.write_text(json.dumps({"goal": GOAL, "runs": runs}, default=float) + "\n")


if __name__ == "__main__":
    main()
