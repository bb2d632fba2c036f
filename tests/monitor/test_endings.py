"""How interpreters end in which the library measures: always as they do without it."""

from __future__ import annotations

import atexit
import datetime
import signal
import sys
import tempfile
import time

import pytest
import torch.autograd.profiler
import torch.distributed as dist

from tests.distributed import die
from tests.interpreters import run_interpreters
from tests.monitor.jobs import Training, new_monitor, own_threads, tiny_schedule

# The window: one recorded step, then the profiled steps O S; no timed block comes before them.
FIRST_STEP = 2
# A client that connects to a dead server goes on for this long: longer than the library's threads have at the end.
STORE_TIMEOUT_S = 20


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


def survive_rank_0(folder: str) -> None:
    """Rank 0 dies in the first window's recorded step. The others end as an uncaught exception ends them."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S))
    rank = dist.get_rank()
    training = Training(rank)
    monitor = new_monitor(schedule=tiny_schedule(first_step=FIRST_STEP), run_dir=folder)
    atexit.register(lambda: print("alive at the end:", own_threads()))  # runs after the monitor's own
    kept.append(monitor)
    with monitor:
        for step in range(FIRST_STEP + 5):
            with monitor.step(step):
                if step == FIRST_STEP:
                    # As long as it takes to read a batch: our threads connect to the store meanwhile.
                    time.sleep(1.0)
                    if rank == 0:
                        die()
                training.step()


def test_a_rank_that_outlives_rank_0_waits_for_no_store_when_it_ends() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_interpreters(survive_rank_0, 2, folder, timeout_s=90.0)
    assert first.code == -signal.SIGKILL
    assert second.code == 1, second
    assert "alive at the end: []" in second.output, second
