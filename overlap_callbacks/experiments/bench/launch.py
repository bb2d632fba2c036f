"""Starts the ranks of a benchmark on this host, shows their progress, and ends them at Ctrl-C."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue as queues
import signal
import socket
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.multiprocessing.spawn import start_processes

from overlap_callbacks.analysis.results.bench import LOOPBACK, Plan
from overlap_callbacks.experiments.bench.session import Stop, run_session

# After Ctrl-C: how long the point under way may take before the ranks are ended.
_GRACE_S = 30.0
_POLL_S = 0.1
_HELD_BACK = (signal.SIGINT, signal.SIGTERM)
_Told = tuple[int, int, str]


class RanksFailedError(Exception):
    """A rank of the benchmark failed; the message has its traceback."""


def run_rank(rank: int, plan: Plan, folder: Path, command: str, port: int, queue: Queue[_Told]) -> None:
    """One rank of a benchmark on this host.

    Args:
        rank: its number.
        plan: what is measured.
        folder: of the results.
        command: the command line, for the file.
        port: TCP port of rank 0.
        queue: rank 0 puts its progress on it.
    """
    stop = Stop()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
    os.dup2(2, 1)  # stdout is the result's alone: the Gloo of torch 2.8 writes lines of its own there
    processes = 1 if plan.link == LOOPBACK else plan.ranks
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
    )
    if plan.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    run_session(plan, folder, command, stop, lambda *told: queue.put(told))


def launch(plan: Plan, folder: Path, command: str, console: Console) -> bool:
    """Run a benchmark to its end, or until Ctrl-C or SIGTERM. On the main thread only.

    Args:
        plan: what is measured.
        folder: of the results.
        command: the command line, for the file.
        console: where the progress bar is shown.

    Returns:
        Whether Ctrl-C ended it.

    Raises:
        RanksFailedError: a rank failed.
    """
    queue: Any = multiprocessing.get_context("spawn").Queue()
    processes = 1 if plan.link == LOOPBACK else plan.ranks
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stopped = False
    before = _interrupted_by_both()
    context: Any = None
    try:
        # Ranks are born with Ctrl-C held back, until they can take it in order.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            context = start_processes(
                run_rank, args=(plan, folder, command, _free_port(), queue), nprocs=processes, join=False,
                start_method="spawn",
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task("starting the ranks", total=None)
            while not _joined(context):
                _show(queue, bar, task)
    except KeyboardInterrupt:
        stopped = True
        if context is not None:
            console.print("Stopping after the point under way; Ctrl-C again stops at once.")
            _end(context)
    finally:
        if context is not None:
            _kill(context)
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    return stopped


def _interrupted_by_both() -> dict[signal.Signals, Any]:
    """Let SIGTERM end a benchmark as Ctrl-C does. Returns the handlers that were in place.

    A process that was started to ignore Ctrl-C, as a shell's background job, goes on ignoring it.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    return before


def _joined(context: Any) -> bool:
    try:
        return bool(context.join(timeout=_POLL_S))
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raise RanksFailedError(str(error)) from None


def _show(queue: Any, bar: Progress, task: Any) -> None:
    with contextlib.suppress(queues.Empty):
        while True:
            done, total, what = queue.get_nowait()
            bar.update(task, completed=done, total=total, description=what)


def _end(context: Any) -> None:
    """Let the ranks finish the point under way; a second Ctrl-C, or too long a wait, ends that."""
    with contextlib.suppress(KeyboardInterrupt, RanksFailedError):
        for process in context.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)  # a terminal sends it to all of them, `kill` to one
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and not _joined(context):
            pass


def _kill(context: Any) -> None:
    for process in context.processes:
        if process.is_alive():
            process.kill()
    for process in context.processes:
        process.join(5.0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
