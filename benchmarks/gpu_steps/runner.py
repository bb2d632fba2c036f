"""Runs steps, each in a process of its own with a time limit, and keeps their results."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_steps.environment import IDENTITY, child_environment
from gpu_steps.figures import Figure, read

COMPLETE, FAILED = "complete", "failed"
_TAIL = 60  # lines of output that the result of a failed step keeps


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: of the step and its result file.
        module: module with ``run(recorder)``; or ``module:function``.
        title: what it measures.
        limit_s: its time limit.
        has_cpu_form: whether it can run on a CPU.
        simulated_ranks: on the simulated GPU; two stand where a GPU has the loopback link.
    """

    name: str
    module: str
    title: str
    limit_s: float
    has_cpu_form: bool = True
    simulated_ranks: int = 1


@dataclass(frozen=True)
class Result:
    """How a step ended, and what it found.

    Attributes:
        step: its name.
        status: ``complete``; or ``failed`` if it crashed, or reached its time limit.
        error: why it failed; empty if it did not.
        seconds: how long it took.
        figures: those that it had by then.
        raw: what it kept beside them.
        output: the last lines of its output, if it failed.
        earlier: whether it is the result of an earlier run.
    """

    step: str
    status: str
    error: str
    seconds: float
    figures: tuple[Figure, ...]
    raw: dict[str, Any] = field(default_factory=dict)
    output: tuple[str, ...] = ()
    earlier: bool = False

    @property
    def passed(self) -> bool:
        """Whether it came to its end, and every expectation was met."""
        return self.status == COMPLETE and all(figure.passed is not False for figure in self.figures)


def run_step(step: Step, *, on_cpu: bool, own_group: bool = True) -> Result:
    """Run a step. A crash or a hang of it costs nothing but itself.

    Args:
        step: to run.
        on_cpu: whether in its CPU form.
        own_group: whether to end all that the step has started too. False for a part of a step: it ends with the step.
    """
    with tempfile.TemporaryDirectory(prefix=f"overlap-{step.name}-") as folder:
        figures_file, output_file = Path(folder, "figures"), Path(folder, "output")
        command = [sys.executable, "-m", "gpu_steps.child", step.module, str(figures_file)]
        command += ["cpu" if on_cpu else "gpu", str(step.simulated_ranks)]
        start = time.monotonic()
        with output_file.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=child_environment(), start_new_session=own_group
            )
            try:
                error = _ending(process.wait(step.limit_s))
            except subprocess.TimeoutExpired:
                error = f"reached its time limit of {step.limit_s:.0f} s"
            finally:
                _end(process, own_group)
        seconds = time.monotonic() - start
        figures, raw = read(figures_file)
        lines = output_file.read_text(errors="replace").splitlines()
    status = FAILED if error else COMPLETE
    return Result(step.name, status, error, seconds, tuple(figures), raw, tuple(lines[-_TAIL:]) if error else ())


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}" if exit_code else ""


def _end(process: subprocess.Popen[bytes], own_group: bool) -> None:
    """End the step's process; where it leads a group of its own, the ranks that it has left behind too."""
    with contextlib.suppress(ProcessLookupError):
        if own_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)  # a process that the device's driver holds does not end: it is left to itself


def result_file(folder: Path, step: str, environment: dict[str, Any]) -> Path:
    """Where a step's result on this device is kept."""
    device = re.sub(r"[^a-z0-9]+", "-", str(environment["device"]).lower()).strip("-")
    return folder / f"gpu-{step}-{device}.json"


def write(result: Result, folder: Path, environment: dict[str, Any]) -> Path:
    """Keep a result; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = result_file(folder, result.step, environment)
    kept = {
        "environment": {**environment, "command": f"python benchmarks/gpu.py --only {result.step}"},
        "step": result.step,
        "status": result.status,
        "error": result.error,
        "seconds": round(result.seconds, 1),
        "figures": {figure.name: {k: v for k, v in asdict(figure).items() if k != "name"} for figure in result.figures},
        "raw": result.raw,
        "output": list(result.output),
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return path


def earlier_result(step: str, folders: Sequence[Path], environment: dict[str, Any]) -> Result | None:
    """The result of a run that came to its end on this device, with these versions and sources; None without one."""
    for folder in folders:
        path = result_file(folder, step, environment)
        try:
            kept = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            continue
        same = all(kept["environment"].get(key) == environment.get(key) for key in IDENTITY)
        if same and kept["status"] == COMPLETE:
            figures = tuple(Figure(name, **values) for name, values in kept["figures"].items())
            return Result(step, COMPLETE, "", kept["seconds"], figures, kept["raw"], earlier=True)
    return None
