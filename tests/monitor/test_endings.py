"""How interpreters end in which the library measures: always as they do without it."""

from __future__ import annotations

import sys

import pytest
import torch.autograd.profiler
import torch.distributed as dist

from tests.interpreters import run_interpreters
from tests.monitor.jobs import Training, new_monitor, tiny_schedule

# The window: one recorded step, then the profiled steps O S; no timed block comes before them.
FIRST_STEP = 2


def end_within_profiled_steps(how: str) -> None:
    """Measure, and end in the window's profiled steps without ``close()``."""
    dist.init_process_group("gloo")
    training = Training(dist.get_rank())
    monitor = new_monitor(schedule=tiny_schedule(every_n_steps=40, first_step=FIRST_STEP, profiled_steps=8))
    kept.append(monitor)
    for step in range(FIRST_STEP + 40):
        monitor.step_begin(step)
        if is_profiling():
            break
        training.step()
        monitor.step_end(step)
    assert is_profiling()
    assert monitor.active
    dist.barrier()
    if how == "exit":
        sys.exit(3)
    if how == "exception":
        raise KeyError("of the user")


kept: list[object] = []  # as the variables of a script's top level are: alive until the interpreter ends


def is_profiling() -> bool:
    return torch.autograd.profiler._is_profiler_enabled


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("exception", 1), ("normal", 0)])
def test_a_job_that_ends_within_profiled_steps_ends_as_without_the_library(how: str, code: int) -> None:
    endings = run_interpreters(end_within_profiled_steps, 2, how)
    assert [ending.code for ending in endings] == [code, code], "\n".join(map(str, endings))
