"""Jobs of which a rank, or the store, falls silent.

``test_silence.py`` starts one once for each rank, in a process that ends as an interpreter ends. It prints how long its
steps and its ``close()`` took.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from overlap_callbacks import OverlapMonitor, Schedule
from overlap_callbacks.monitor.background import parts
from overlap_callbacks.report.record import read
from tests.margins import PATIENCE_S

EVERY_N_STEPS = 10
# Windows of 5 steps at 2, 12, ...; what falls silent does so when the first of them is reported.
SILENT_FROM = 10
# At least this many; see ``_may_end``.
NUM_STEPS = 200
# The store goes on, if it does, when all ranks have given up a window. Training goes on until a window was measured
# again, however long a new connection takes.
THAW_AT = 60
_MAX_THAWED_S = 0.75 * PATIENCE_S
# Of the job that loses a rank, in the third stretch of 128 steps: as in other jobs, a stretch takes longer than the
# wait for a rank that is silent.
STEP_S, KILLED_AT, PATIENT_S = 0.012, 300, 1.2


def serve(port_file: Path) -> None:
    """Serve the store of the job, until killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    whole = port_file.with_suffix(".part")
    whole.write_text(str(store.port))
    whole.rename(port_file)
    time.sleep(10 * PATIENCE_S)


def main(folder: Path, what: str, store_pid: int, close_timeout_s: float | None = None) -> None:
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    schedule = Schedule(
        every_n_steps=EVERY_N_STEPS, first_step=2, repeats=1, steps_per_block=1, warmup_steps=0, profiled_steps=0
    )
    monitor = OverlapMonitor(schedule, run_dir=folder, max_overhead=None, power=False)
    record, longest_s = folder / "overlap.jsonl", 0.0
    last = 6 if what == "rank" else NUM_STEPS - 1
    deadline_s, step, ends = 0.0, 0, torch.zeros(1)
    while not ends:
        if what != "rank" and step == SILENT_FROM:
            while rank == 0 and not (record.exists() and record.read_text().count('"record":"window"')):
                time.sleep(0.01)
            dist.barrier()
            if rank == 0:
                os.kill(store_pid, signal.SIGSTOP)
            dist.barrier()
        if what == "store that goes on" and step == THAW_AT:
            deadline_s = time.monotonic() + _MAX_THAWED_S
            if rank == 0:
                os.kill(store_pid, signal.SIGCONT)
        began_s = time.monotonic()
        monitor.step_begin(step)
        ends = torch.full((1,), float(rank == 0 and step >= last and _may_end(what, record, deadline_s)))
        dist.all_reduce(ends)
        if what == "rank" and step == last and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # the job's communication is done, the last window is not reported
        monitor.step_end(step)
        longest_s = max(longest_s, time.monotonic() - began_s)
        step += 1
    active = monitor.active
    began_s = time.monotonic()
    monitor.close(close_timeout_s)
    close_s = time.monotonic() - began_s
    print(json.dumps({"longest_s": longest_s, "close_s": close_s, "active": active}), flush=True)


def _may_end(what: str, record: Path, deadline_s: float) -> bool:
    """Whether training may end: at once, or when a window was measured after the store went on."""
    if what != "store that goes on" or time.monotonic() > deadline_s:
        return True
    return any(window.complete and window.first_step > THAW_AT for window in read(record.parent).windows)


def lose_a_rank(folder: Path) -> None:
    """Rank 2 is killed between windows, while parts of steps are added up. It does not communicate with the others."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    others = dist.new_group([0, 1])
    parts._TIMEOUT_S = PATIENT_S
    monitor = OverlapMonitor(Schedule(every_n_steps=10**6, first_step=10**6), run_dir=folder, power=False)
    longest_s, step, end_s, is_told, ends = 0.0, 0, time.monotonic() + PATIENCE_S, False, torch.zeros(1)
    while not ends:
        began_s = time.monotonic()
        with monitor.step(step):
            time.sleep(STEP_S)
            if rank < 2:
                ends.fill_(float(is_told))
                dist.all_reduce(ends, group=others)
        longest_s = max(longest_s, time.monotonic() - began_s)
        if rank == 2 and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step > KILLED_AT and step % 50 == 0:
            is_told = sum([bool(stretch.silent) for stretch in read(folder).frontier]) > 1 or time.monotonic() > end_s
        step += 1
    began_s = time.monotonic()
    monitor.close()
    print(json.dumps({"longest_s": longest_s, "close_s": time.monotonic() - began_s}), flush=True)
