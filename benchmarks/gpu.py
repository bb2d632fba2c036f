"""Everything that one GPU can tell about this library, in one command.

    python benchmarks/gpu.py --list                  what there is to run
    python benchmarks/gpu.py                         run what has no result yet for this device, versions and sources
    python benchmarks/gpu.py --only probe ddp       run some steps; --again repeats those that have a result
    python benchmarks/gpu.py --minutes 9             be done within this time; the same command goes on with the rest
    python benchmarks/gpu.py --cpu                   the steps' CPU forms: that the code runs, and nothing about a GPU

On the simulated GPU (``tests/simulated_gpu``; ``python3 dev.py test --simulated-gpu`` makes it) the steps run before
there is a GPU, but for those that ``tests/gpu/not_simulated.py`` names:

    LD_LIBRARY_PATH=$PWD/build/simulated_gpu/lib .venv-simulated-gpu/bin/python benchmarks/gpu.py

Each step runs in a process of its own, with a time limit under ten minutes: a step that crashes or hangs costs nothing
but itself. The limits of all steps add up to less than two hours; ``--list`` has the sum. Results go to
``benchmarks/results/gpu-STEP-DEVICE.json``, one file a step, or into the folder given with ``--json``. On a CPU and on
the simulated GPU nothing is written without ``--json``, and each step is run anew.

It needs nothing from the network. What a machine without one may lack is brought along:

    python benchmarks/gpu.py --pack FOLDER           where there is a network: wheels for Python 3.12, and kernels
    python benchmarks/gpu.py --unpack FOLDER         there: install what is missing, and this project; torch stays

A result has an ``environment``, the ``status`` of the step (``complete`` or ``failed``, with ``error`` and the last
lines of ``output``), its ``figures``, each with ``value``, ``unit``, what it ``proves``, what is ``expected`` and
whether it ``passed``, and ``raw`` values. Exit code: 0 if all expectations were met, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from gpu_steps import wheels
from gpu_steps.environment import ROOT, environment
from gpu_steps.runner import COMPLETE, Result, Step, earlier_result, run_step, write

from tests.gpu import not_simulated

RESULTS = ROOT / "benchmarks" / "results"
_SIMULATED = "Simulated GPU"  # begins the device's name
# Steps that train on the loopback link, or talk to another rank: on the simulated GPU two ranks run them.
_ON_TWO_RANKS = ("ddp", "fsdp2", "slowdown", "host-bound", "arms", "nccl")
_USUAL = 3  # a step takes less than this part of its time limit, unless something is wrong
STEPS = (
    Step("probe", "gpu_steps.probe", "what torch's profiler records of a device, and at what cost", 300),
    Step("overflow", "gpu_steps.overflow", "a profile that is cut off, and one that CUPTI gives nothing", 300),
    Step("gate-cost", "gpu_steps.gate_cost", "what a serialised collective costs the host and the device", 240),
    Step("ddp", "gpu_steps.loopback:ddp", "DDP with communication of known length: are the figures right", 300),
    Step("fsdp2", "gpu_steps.loopback:fsdp2", "FSDP2 with communication of known length: are the figures right", 300),
    Step("slowdown", "gpu_steps.loopback:slowdown", "slowdown by SMs taken, against one measured by hand", 300),
    Step("negative", "gpu_steps.negative", "jobs that cannot be measured truly: is it said", 540),
    Step("host-bound", "gpu_steps.host_bound", "a job that waits for the host: what sequential steps add", 240),
    Step("arms", "gpu_steps.arms", "arms: what each does to a step, and that the job is as before", 240),
    Step("bench", "gpu_steps.bench", "overlap bench on the loopback link", 420),
    Step("nccl", "gpu_steps.nccl_semantics", "what NCCL's works and waits order, with one rank", 180),
    Step("tests-link", "gpu_steps.gpu_tests:loopback_link", "tests/gpu: the loopback link itself", 120),
    Step("tests-jobs", "gpu_steps.gpu_tests:loopback_jobs", "tests/gpu on the loopback link: training", 240),
    Step(
        "tests-figures",
        "gpu_steps.gpu_tests:loopback_figures",
        "tests/gpu on the loopback link: figures",
        420,
        has_cpu_form=False,
    ),
    Step("tests-refusals", "gpu_steps.gpu_tests:loopback_refusals", "tests/gpu on the loopback link: refusals", 420),
    Step("tests-ddp", "gpu_steps.gpu_tests:ddp", "tests/gpu on two NCCL ranks of one GPU: DDP", 540),
    Step("tests-fsdp2", "gpu_steps.gpu_tests:fsdp2", "tests/gpu on two NCCL ranks of one GPU: FSDP2", 540),
    Step("tests-zero", "gpu_steps.gpu_tests:zero", "tests/gpu on two NCCL ranks of one GPU: ZeRO-2 and ZeRO-3", 540),
    Step(
        "tests-megatron", "gpu_steps.gpu_tests:megatron", "tests/gpu on two NCCL ranks of one GPU: Megatron-core", 540
    ),
    Step("power", "gpu_steps.gpu_tests:power", "tests/gpu/test_power.py: power of a real GPU", 300),
)


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Run the command.

    Args:
        arguments: of the command line.
        steps: that there are.

    Returns:
        The exit code.
    """
    options = _options(arguments, steps)
    if options.list:
        for step in steps:
            print(f"{step.name:15} {step.limit_s / 60:5.1f} min at most   {step.title}")
        print(f"{'all of them':15} {sum(step.limit_s for step in steps) / 60:5.1f} min at most")
        return 0
    if options.pack:
        return wheels.pack(options.pack)
    if options.unpack:
        return wheels.unpack(options.unpack)
    try:
        found = environment()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"no GPU can be used: {error}", file=sys.stderr)
        return 2
    if options.cpu:
        found["device"] = "cpu"
    elif found["device"] is None:
        print("no GPU: torch sees none here. --cpu runs the steps in their CPU form.", file=sys.stderr)
        return 2
    is_gpu = not options.cpu and not found["device"].startswith(_SIMULATED)
    folder = options.json or (RESULTS if is_gpu else None)
    return _run([step for step in steps if step.name in options.only], options, found, folder)


def _options(arguments: Sequence[str] | None, steps: Sequence[Step]) -> argparse.Namespace:
    names = [step.name for step in steps]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what there is to run")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=names, default=names, help="run these steps")
    parser.add_argument("--again", action="store_true", help="run steps that have a result too")
    parser.add_argument("--minutes", type=float, help="be done within this time")
    parser.add_argument("--cpu", action="store_true", help="run the steps in their CPU form")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write the results there")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="collect wheels and compiled kernels there")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER", help="install the wheels that are missing here")
    return parser.parse_args(arguments)


def _run(steps: Sequence[Step], options: argparse.Namespace, found: dict[str, Any], folder: Path | None) -> int:
    print(", ".join(f"{key} {value}" for key, value in found.items() if value is not None), flush=True)
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    simulated = found["device"].startswith(_SIMULATED)
    results: list[Result] = []
    left: list[str] = []
    for step in steps:
        if options.cpu and not step.has_cpu_form:
            print(f"\n{step.name}: has no CPU form", flush=True)
            continue
        if simulated and (why := not_simulated.STEPS.get(step.name)):
            print(f"\n{step.name}: not on the simulated GPU: {why}", flush=True)
            continue
        folders = [folder] if folder else []
        result = None if options.again or simulated else earlier_result(step.name, [*folders, RESULTS], found)
        left_s = end - time.monotonic()
        if result is None and left_s < step.limit_s / _USUAL:
            left.append(step.name)
            continue
        if result is None:
            ranks = 2 if step.name in _ON_TWO_RANKS else 1
            limited = replace(step, limit_s=min(step.limit_s, left_s), simulated_ranks=ranks)
            print(f"\n{step.name}: running, {limited.limit_s:.0f} s at most", flush=True)
            result = run_step(limited, on_cpu=options.cpu)
            if folder:
                write(result, folder, found)
        results.append(result)
        print(table(step, result), flush=True)
    if left:
        print(f"\nnot begun, for want of time: {', '.join(left)}. The same command goes on with them.")
    print("\n" + summary(results, device=found["device"]))
    return 0 if all(result.passed for result in results) and not left else 1


def table(step: Step, result: Result) -> str:
    """A step's figures, one a line: pass or fail, the value, what was expected, and what it proves."""
    seconds = f"{result.seconds:.0f} s" + (", of an earlier run" if result.earlier else "")
    lines = [f"\n== {step.name}: {step.title} ({seconds})"]
    for figure in result.figures:
        mark = {True: "pass", False: "FAIL", None: "    "}[figure.passed]
        expected = f"expected {figure.expected}" if figure.expected else ""
        lines.append(f"{mark}  {figure.name:62} {figure.shown():>24}  {expected}")
        if figure.proves:
            lines.append(f"          {figure.proves}")
    if result.status != COMPLETE:
        lines.append(f"FAIL  the step {result.error}; the last of its output:")
        lines += [f"      | {line}" for line in result.output[-15:]]
    return "\n".join(lines)


def summary(results: Sequence[Result], *, device: str) -> str:
    """One line for each step, and the totals."""
    lines = []
    for result in results:
        expected = [figure for figure in result.figures if figure.passed is not None]
        met = sum(figure.passed is True for figure in expected)
        ending = "" if result.status == COMPLETE else f", FAILED: {result.error}"
        lines.append(f"{result.step:15} {met} of {len(expected)} expectations met{ending}")
    if device == "cpu":
        lines.append("device: cpu. This shows that the code runs, and nothing about a GPU.")
    if device.startswith(_SIMULATED):
        lines.append(f"device: {device}. This shows that the library is right there, and nothing about a GPU.")
    return "\n".join(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the step that runs
    sys.exit(main())
