"""Does a job's step take as long as the model of communication predicts? Megatron-core trains GPTs over Gloo.

    python benchmarks/predict.py [--rounds 4] [--json benchmarks/results/predict-cpu.json]

The jobs are data-parallel on two and four ranks, tensor-parallel on two and four, and both on four, each with models of
two sizes. Rates are taken from the windows of one of them, the smaller model on four ranks in both ways: the rate of
compute, and bandwidth and latency of messages, as ``overlap predict --from`` takes them. Of the others nothing is
fitted. Their predicted step times are held against measured ones.

Beside it stand two other predictions: by bandwidths alone, and by the rates of two jobs of two ranks, one data-parallel
and one tensor-parallel. Such rates know nothing of four ranks that wait for each other.

The model of equation 1 is one of FLOP and bytes: a rank computes at one rate, and its messages are long. So the jobs
here are such that this holds, as it does in real training:

- One layer of 768 or 1024, and 768 tokens a rank. Matrix products are large, and the cost of operators on the host, of
  norms and of the optimizer is small beside them. In the earlier run (``results/predict-small-layers-cpu.json``), with
  layers of 256 and 384 and 256 tokens, it was not: TP 4 has half the FLOP of TP 2 on each rank, and computed for 75 ms
  where TP 2 took 86. Four of the eight predictions were within 10 %.
- Messages of tensor parallelism have 2.25 and 3 MiB. Messages that are much smaller are as long as the ranks of a core
  take to wake up. Transfers were up to half of the earlier run's steps; here they are to be some 10 %.

How it is measured:

- What is measured are sequential steps (``e2e_sequential_ms``), for the model knows no overlap.
- Each rank has half a core, on two ranks and on four: rank k is pinned to core k modulo 2, with one thread. So messages
  between neighbours go from core to core in all jobs. Beside a job of two ranks a copy of it runs. So neither compute
  nor Gloo, whose transfers are work of the CPU, is faster in a smaller job.
- The speed of a shared machine changes. So jobs take turns, one window each in a round, and rates and predictions are
  of the same round. Beside the median of the rounds' errors stands the error of the median times. A round with a
  window that does not count is left out.
- It ends within ``--minutes``: a round begins only if it should end in time, and what hangs is stopped. Rounds that
  were measured before are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# Before torch and NumPy are loaded: each rank has one thread.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import msgspec
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.about import about
from overlap_callbacks import OverlapReport, Sink
from overlap_callbacks.analysis.communication.bandwidths import Link, effective_bandwidths, recorded_rates
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.step_time import Hardware, StepTime, exact_step, step_flop
from tests.integrations.megatron_jobs import Setup
from tests.integrations.megatron_recorded import shape_of

GOAL = 0.1
# Model -> its sizes.
SIZES: dict[str, dict[str, int]] = {
    "small": {"layers": 1, "hidden": 768},
    "large": {"layers": 1, "hidden": 1024},
}
# What all jobs have. Buckets have two sizes, which tell latency and bandwidth apart.
COMMON: dict[str, Any] = {"sequence": 128, "vocabulary": 1024, "bucket": 600_000}
BATCH = 6
# Layout -> ranks, and tensor-parallel ranks of them.
LAYOUTS = {"DP 2": (2, 1), "DP 4": (4, 1), "TP 2": (2, 2), "TP 4": (4, 4), "TP 2 x DP 2": (4, 2)}
# Of which job rates are taken.
REFERENCE = ("small", "TP 2 x DP 2")
# Of which two the other prediction takes them, for jobs with and without tensor parallelism.
OF_TWO_RANKS = {"data": ("small", "DP 2"), "tensor": ("small", "TP 2")}

_NUM_CORES, _RANKS_AT_A_TIME = 2, 4
_STEPS_BEFORE = 2
_WINDOW: dict[str, Any] = {
    "repeats": 1, "profiled_steps": 0, "advanced": {"blocks": "OS", "steps_per_block": 2, "warmup_steps": 0},
}  # fmt: skip
_STEPS_A_TURN = 6  # a window, and one more
_TURN_TIMEOUT_S = 90.0
_END_TIMEOUT_S = 10.0
_MINUTES = 6.5
_PR_SET_PDEATHSIG = 1

Key = tuple[str, str]


def _end_with_parent() -> None:
    """Be killed, stopped or not, when the process that began this one ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "benchmarks.predict":  # in the server that forks ranks, which they would keep alive
    _end_with_parent()


# -- in the ranks


class Kept(Sink):
    """Keeps what was measured."""

    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)


def _train(rank: int, world_size: int, core: int, port: int, setup: Setup, pipe: Any) -> None:
    """A rank on a core: at each word from the benchmark's own process one window, and its report, as rank 0 has it."""
    _end_with_parent()
    os.sched_setaffinity(0, {core})  # Gloo's threads inherit it
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=_TURN_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    from overlap_callbacks.integrations.megatron import attach
    from tests.integrations import megatron_shims
    from tests.integrations.megatron_jobs import job

    megatron_shims.install()
    kept = Kept()
    with job(setup) as training:
        options = {"first_step": _STEPS_BEFORE, "every_n_steps": _STEPS_A_TURN, "max_overhead": None, "power": False}
        monitor = attach(
            training.model, training.optimizer, sinks=[kept], strict=True,
            flop_per_step=step_flop(shape_of(setup, world_size)), **options, **_WINDOW,
        )  # fmt: skip
        for _ in range(_STEPS_BEFORE):
            training.step()
        pipe.send(None)
        turns = 0
        while pipe.recv():
            for _ in range(_STEPS_A_TURN):
                training.step()
            turns += 1
            deadline = time.monotonic() + _TURN_TIMEOUT_S / 2
            while rank == 0 and len(kept.reports) < turns and time.monotonic() < deadline:
                time.sleep(0.01)  # so that no other job runs beside the report
            pipe.send(kept.reports[-1] if rank == 0 else None)
        monitor.close()
    dist.barrier()
    dist.destroy_process_group()


# -- in the benchmark's own process


class NotCountedError(RuntimeError):
    """A window's results do not count."""


@dataclass
class Measured:
    """What was measured.

    Attributes:
        shapes: what the jobs are.
        rounds: a window of each job in each round.
        left_out: why rounds were left out.
        stopped: why there are fewer rounds than asked for; empty if there are not.
    """

    shapes: dict[Key, JobShape] = field(default_factory=dict)
    rounds: list[dict[Key, OverlapReport]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    stopped: str = ""


class RunningJob:
    """The ranks of a job, which wait until it is their turn. Beside a job of two ranks runs a copy of it.

    Args:
        size: of the model.
        layout: of the ranks.
        batch: sequences of a micro-batch, on each data-parallel rank.
    """

    def __init__(self, size: str, layout: str, batch: int) -> None:
        self._world_size, _ = LAYOUTS[layout]
        setup = setup_of(size, layout, batch)
        self.shape = shape_of(setup, self._world_size)
        self._name = f"{size}, {layout}"
        context = multiprocessing.get_context("forkserver")
        self._stores, self._ranks = [], []
        for place in range(_RANKS_AT_A_TIME):
            rank = place % self._world_size
            if rank == 0:
                self._stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            own, other = context.Pipe()
            arguments = (rank, self._world_size, place % _NUM_CORES, self._stores[-1].port, setup, other)
            process = context.Process(target=_train, args=arguments, daemon=True)
            process.start()
            other.close()
            self._ranks.append((process, own))

    def begin(self) -> None:
        """Wait until the job has trained its first steps."""
        self._heard()
        self._signal(signal.SIGSTOP)

    def window(self) -> OverlapReport:
        """The next window. Between its windows a job is stopped: even ranks that wait take some of the cores."""
        self._signal(signal.SIGCONT)
        for _, pipe in self._ranks:
            pipe.send(True)
        report = self._heard()[0]
        self._signal(signal.SIGSTOP)
        assert isinstance(report, OverlapReport)
        if not (report.complete and report.valid and report.e2e_sequential_ms is not None):
            raise NotCountedError(f"a window of {self._name} does not count: {'; '.join(report.problems)}")
        return report

    def dismiss(self) -> None:
        """Tell the ranks to end."""
        self._signal(signal.SIGCONT)
        for process, pipe in self._ranks:
            with contextlib.suppress(OSError):  # a rank that has ended
                if process.is_alive():
                    pipe.send(False)

    def end(self, deadline: float) -> None:
        """Wait for the ranks' end, and kill those that are still there at a time of the monotonic clock."""
        for process, _ in self._ranks:
            process.join(max(0.1, deadline - time.monotonic()))
            process.kill()

    def _signal(self, number: signal.Signals) -> None:
        for process, _ in self._ranks:
            if process.is_alive():
                os.kill(process.pid, number)

    def _heard(self) -> list[Any]:
        deadline = time.monotonic() + _TURN_TIMEOUT_S
        found = []
        for process, pipe in self._ranks:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"a rank of {self._name} said nothing for {_TURN_TIMEOUT_S:g} s")
            try:
                found.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"a rank of {self._name} ended with {process.exitcode}") from None
        return found


def setup_of(size: str, layout: str, batch: int = BATCH) -> Setup:
    """How Megatron is told of a job."""
    return Setup(tp=LAYOUTS[layout][1], batch=batch, **SIZES[size], **COMMON)


def hardware_of(job: JobShape, data: OverlapReport, tensor: OverlapReport, *, latency: bool = True) -> Hardware:
    """What windows of other jobs tell of the machine on which a job runs.

    Args:
        job: whose step is to be predicted.
        data: tells of messages of data parallelism, and of the compute of jobs without tensor parallelism.
        tensor: tells of messages of tensor parallelism, and of the compute of jobs with it.
        latency: whether messages have one; else all of a transfer's time is that of its bytes.
    """
    windows = {"data": data, "tensor": tensor}
    rates = {name: recorded_rates([window]) for name, window in windows.items()}
    links = {name: of.links[name] for name, of in rates.items()}
    if not latency:
        links = {name: Link(effective_bandwidths(window.collectives)[name]) for name, window in windows.items()}
    rate = rates["tensor" if job.t > 1 else "data"].compute_flop_per_s
    assert rate is not None
    return Hardware(links=links | {"pipeline": Link(links["data"].bytes_per_s)}, peak_flop_per_s=rate, utilisation=1.0)


def job_result(key: Key, job: JobShape, rounds: Sequence[dict[Key, OverlapReport]]) -> dict[str, Any]:
    """Measured and predicted times of a job, round by round.

    Args:
        key: its name.
        job: what it is.
        rounds: a window of each job in each.
    """
    measured = [_sequential_ms(windows[key]) for windows in rounds]

    def steps(data: Key, tensor: Key, **how: bool) -> list[StepTime]:
        return [exact_step(job, hardware_of(job, windows[data], windows[tensor], **how)) for windows in rounds]

    predicted = steps(REFERENCE, REFERENCE)
    variants = {
        "without_latency": steps(REFERENCE, REFERENCE, latency=False),
        "of_two_ranks": steps(OF_TWO_RANKS["data"], OF_TWO_RANKS["tensor"]),
    }
    return {
        "fitted": key == REFERENCE,
        "measured_ms": measured,
        "predicted_ms": [step.iteration_ms for step in predicted],
        "terms_ms": {name: _median_term(predicted, f"{name}_ms") for name in ("compute", "tensor", "data")},
        "transfers_ms": [_transfers_ms(windows[key]) for windows in rounds],
        **errors(measured, [step.iteration_ms for step in predicted]),
        "variants": {
            name: errors(measured, [step.iteration_ms for step in others]) for name, others in variants.items()
        },
    }


def errors(measured: Sequence[float], predicted: Sequence[float]) -> dict[str, Any]:
    """How far predictions are off, as fractions of what was measured: round by round, and of the medians."""
    each = [guess / ms - 1 for ms, guess in zip(measured, predicted, strict=True)]
    return {
        "errors": each,
        "error": statistics.median(each),
        "error_of_medians": statistics.median(predicted) / statistics.median(measured) - 1,
    }


def _sequential_ms(report: OverlapReport) -> float:
    assert report.e2e_sequential_ms is not None
    return report.e2e_sequential_ms.value


def _transfers_ms(report: OverlapReport) -> dict[str, float]:
    """By dimension, per step: what the prediction's terms stand against."""
    found: dict[str, float] = {}
    for row in report.collectives:
        if row.group_size > 1 and row.transfer_ms is not None:
            found[row.dimension] = found.get(row.dimension, 0.0) + row.transfer_ms
    return found


def _median_term(steps: Sequence[StepTime], name: str) -> float:
    return statistics.median([getattr(step, name) for step in steps])


def measure(rounds: int, batch: int, deadline: float) -> Measured:
    """Run all jobs, in turns.

    Args:
        rounds: windows of each job, at most.
        batch: sequences of a micro-batch, on each data-parallel rank.
        deadline: time of the monotonic clock by which the last round should end.

    Raises:
        RuntimeError: a job failed, or all was stopped, before a round was whole.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["benchmarks.predict", "torch._dynamo", "scipy.special", "megatron.core", "tests.integrations.megatron_jobs"]
    )
    jobs: dict[Key, RunningJob] = {}
    found = Measured()
    try:
        for key in [(size, layout) for size in SIZES for layout in LAYOUTS]:
            jobs[key] = RunningJob(*key, batch)
            jobs[key].begin()
        found.shapes = {key: job.shape for key, job in jobs.items()}
        _measure_rounds(jobs, rounds, deadline, found)
    except (RuntimeError, OSError, KeyboardInterrupt) as error:
        if not found.rounds:
            raise
        found.stopped = str(error) or "interrupted"
    finally:
        signal.alarm(0)
        _end(list(jobs.values()))
    return found


def _measure_rounds(jobs: dict[Key, RunningJob], rounds: int, deadline: float, found: Measured) -> None:
    longest_s = 0.0
    for number in range(rounds):
        begun = time.monotonic()
        if begun + longest_s > deadline:
            found.stopped = f"no time for round {number + 1}"
            return
        try:
            found.rounds.append({key: job.window() for key, job in jobs.items()})
        except NotCountedError as error:
            found.left_out.append(str(error))
        longest_s = max(longest_s, time.monotonic() - begun)
    if not found.rounds:
        raise RuntimeError("; ".join(found.left_out))


def _end(jobs: Sequence[RunningJob]) -> None:
    for job in jobs:
        job.dismiss()
    deadline = time.monotonic() + _END_TIMEOUT_S
    for job in jobs:
        job.end(deadline)


def _stop_at(seconds: float) -> None:
    """Raise from now on when the benchmark is told to end, and after so many seconds."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.alarm(0)
        raise RuntimeError("out of time" if number == signal.SIGALRM else "told to end")

    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    signal.alarm(max(1, int(seconds)))


def results_of(found: Measured) -> dict[str, Any]:
    """The results of each job, and the rates of each round."""
    return {
        "left_out": found.left_out,
        "stopped": found.stopped,
        "jobs": {", ".join(key): job_result(key, shape, found.rounds) for key, shape in found.shapes.items()},
        "rates": {
            ", ".join(key): [msgspec.to_builtins(recorded_rates([windows[key]])) for windows in found.rounds]
            for key in (REFERENCE, *OF_TWO_RANKS.values())
        },
    }


def _show(results: dict[str, Any]) -> None:
    print("step times in ms; errors: median of the rounds, least and most, and of two other predictions")
    print(
        f"{'job':<20} {'measured':>8} {'predicted':>9} = {'compute':>7} + {'tensor':>6} + {'data':>6}"
        f" {'error':>7}  {'of rounds':<17} {'bandwidth only':>14} {'of two ranks':>12}"
    )
    for name, job in results["jobs"].items():
        measured, predicted = statistics.median(job["measured_ms"]), statistics.median(job["predicted_ms"])
        compute, tensor, data = job["terms_ms"].values()
        plain, of_two = [variant["error"] for variant in job["variants"].values()]
        rounds = f"{min(job['errors']):+.1%} to {max(job['errors']):+.1%}"
        print(
            f"{name:<20} {measured:>8.1f} {predicted:>9.1f} = {compute:>7.1f} + {tensor:>6.1f} + {data:>6.1f}"
            f" {job['error']:>+7.1%}  {rounds:<17} {plain:>+14.1%} {of_two:>+12.1%}{'  fitted' * job['fitted']}"
        )
    predicted = [job for job in results["jobs"].values() if not job["fitted"]]
    within = sum(abs(job["error"]) <= GOAL for job in predicted)
    print(f"{within} of {len(predicted)} predicted jobs are within {GOAL:.0%}")
    for reason in results["left_out"]:
        print(f"a round is left out: {reason}")
    if results["stopped"]:
        print(f"stopped before the last round: {results['stopped']}")


def main() -> None:
    """Run the jobs, print a line for each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="windows of each job")
    parser.add_argument(
        "--batch", type=int, default=BATCH, help="sequences of a micro-batch on each data-parallel rank"
    )
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="after which it ends, with the whole rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds = options.minutes * 60
    _stop_at(seconds)
    results = results_of(measure(options.rounds, options.batch, time.monotonic() + seconds))
    _show(results)
    if options.json:
        found = {
            "environment": about("torch"),
            "goal": GOAL,
            "models": SIZES,
            "common": {**COMMON, "batch": options.batch},
            **results,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
