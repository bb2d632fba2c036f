"""How interpreters end in which the library measures: always as they do without it."""

from __future__ import annotations

import atexit
import datetime
import os
import signal
import sys
import tempfile
import threading
import time

import pytest
import torch.autograd.profiler
import torch.distributed as dist

from tests.distributed import die
from tests.interpreters import run_interpreters
from tests.monitor.jobs import Training, new_monitor, own_threads, tiny_schedule, wait_until

# The window: one recorded step, then the profiled steps O S; no timed block comes before them.
FIRST_STEP = 2
# A client that connects to a dead server goes on for this long: longer than the library's threads have at the end.
STORE_TIMEOUT_S = 20


def end_within_profiled_steps(how: str) -> None:
    """Measure, and end in the window's profiled steps without ``close()``."""
    dist.init_process_group("gloo")
    if how == "SIGTERM, and a handler that exits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    if "thread" not in how:
        train_and_end(how)
        return
    thread = threading.Thread(target=train_and_end, args=(how,), daemon="daemon" in how)
    thread.start()
    # A daemon goes on within its step until the interpreter ends, others end before.
    assert is_within.wait(60.0)
    if "daemon" not in how:
        thread.join()


def train_and_end(how: str) -> None:
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
    is_within.set()
    if "daemon" in how:
        time.sleep(60.0)
    elif "exit 0" in how:
        sys.exit(0)
    elif "exit 3" in how:
        sys.exit(3)
    elif "exception" in how:
        raise KeyError("of the user")
    elif "SIGTERM" in how:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60.0)


is_within = threading.Event()
kept: list[object] = []  # as the variables of a script's top level are: alive until the interpreter ends


def is_profiling() -> bool:
    return torch.autograd.profiler._is_profiler_enabled


ENDINGS = {
    "exit 0": 0,
    "exit 3": 3,
    "exception": 1,
    "normal": 0,
    "exit 3 in a thread": 0,
    "exception in a thread": 0,
    "normal in a thread": 0,
    "within the step of a daemon thread": 0,
    "SIGTERM": -signal.SIGTERM,
    "SIGTERM, and a handler that exits": 5,
}


@pytest.mark.parametrize(("how", "code"), ENDINGS.items())
def test_a_job_that_ends_within_profiled_steps_ends_as_without_the_library(how: str, code: int) -> None:
    endings = run_interpreters(end_within_profiled_steps, 2, how)
    assert [ending.code for ending in endings] == [code, code], "\n".join(map(str, endings))


def survive_rank_0(folder: str, store_timeout_s: int) -> None:
    """Rank 0 dies in the first window's recorded step. The others end as an uncaught exception ends them."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=store_timeout_s))
    rank = dist.get_rank()
    training = Training(rank)
    monitor = new_monitor(schedule=tiny_schedule(first_step=FIRST_STEP), run_dir=folder)
    atexit.register(lambda: print("alive at the end:", own_threads()))  # runs after the monitor's own
    kept.append(monitor)
    with monitor:
        for step in range(FIRST_STEP + 5):
            with monitor.step(step):
                if step == FIRST_STEP:
                    store = dist.distributed_c10d._get_default_store()
                    if rank == 0:
                        store.wait(["connected"], datetime.timedelta(seconds=80.0))
                        die()
                    session = monitor._driver.slot._session
                    wait_until(lambda session=session: session.channel.connection._store is not None)
                    store.set("connected", b"-")
                training.step()


def test_a_rank_that_outlives_rank_0_waits_for_no_store_when_it_ends() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_interpreters(survive_rank_0, 2, folder, STORE_TIMEOUT_S, timeout_s=90.0)
    assert first.code == -signal.SIGKILL
    assert second.code == 1, second
    assert "alive at the end: []" in second.output, second


@pytest.mark.slow
def test_no_survivor_of_rank_0_ends_by_a_signal_while_its_client_retries() -> None:
    # The store's client gives up while the interpreter ends. That was a SIGABRT in one run of eight.
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            first, second = run_interpreters(survive_rank_0, 2, folder, 8, timeout_s=90.0)
        assert first.code == -signal.SIGKILL
        assert second.code == 1, second
