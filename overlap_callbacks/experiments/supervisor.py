"""Runs commands until they end, have done enough or take too long, and leaves none of their processes behind.

A run may have a folder for its output and its record. A failure is explained in one line.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from overlap_callbacks.analysis.formatting import shortened
from overlap_callbacks.analysis.results.env_overrides import COMMAND_MARK, RUN_DIR, SWITCH, TIME_ONLY
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.analysis.safe_text import printable
from overlap_callbacks.report.record import Record, RecordError, read

# Time for a command to end when asked to. torchrun ends its workers within it.
GRACE_S = 10.0
_POLL_S = 0.1
# After one rank has failed: time for the others to print their errors.
_LAST_WORDS_S = 3.0
# Time for the system to remove killed processes.
_KILL_WAIT_S = 5.0


class Ending(enum.Enum):
    """Why a command ended."""

    BY_ITSELF = "by itself"
    DONE = "done"  # it had done enough, and was ended
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        ending: why.
        exit_code: of a command that ended by itself; with several ranks, of the first that failed; negative for a
            signal. None if it was ended.
        seconds: from its start until none of its processes was left.
    """

    ending: Ending
    exit_code: int | None
    seconds: float


def supervise(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    is_done: Callable[[], bool] = lambda: False,
    on_interrupt: Callable[[], None] = lambda: None,
    timeout_s: float = math.inf,
    ranks: Sequence[Mapping[str, str]] = ({},),
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run a command in its own session, so that Ctrl-C reaches only this process, which ends it cleanly.

    Args:
        command: program and arguments.
        environment: of the command. It gets one more variable, which identifies the command's processes.
        is_done: polled; the command is ended once it returns True.
        on_interrupt: called at a KeyboardInterrupt, before the command is asked to end.
        timeout_s: maximum time.
        ranks: further variables of each rank; the command is started once per rank. If one fails, all are ended.
        stdout: where the output goes; None for this process's.
        stderr: the same for errors.
        grace_s: time for the command to end when asked to; then all of its processes are killed.

    Raises:
        OSError: the command cannot be started.
        KeyboardInterrupt: Ctrl-C, or a signal that ``interruptible`` turns into it. The command has ended.
    """
    begun_s = time.monotonic()
    mark = f"{COMMAND_MARK}_{secrets.token_hex(16)}"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for variables in ranks:
            with _signals_held_back():
                process = subprocess.Popen(
                    list(command),
                    env={**environment, **variables, mark: "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
                started.append(process)
        ending, exit_code = _await(started, is_done, begun_s + timeout_s)
        if exit_code:
            grace_s = 0.0  # the remaining processes have had time to print their errors
    except KeyboardInterrupt:
        on_interrupt()
        raise
    finally:
        _end(started, mark, grace_s)
    return Outcome(ending, exit_code, time.monotonic() - begun_s)


def _await(
    started: Sequence[subprocess.Popen[bytes]], is_done: Callable[[], bool], deadline_s: float
) -> tuple[Ending, int | None]:
    failed = 0
    while True:
        codes = [process.poll() for process in started]
        if not failed and (failed := next(filter(None, codes), 0)):
            deadline_s = min(deadline_s, time.monotonic() + _LAST_WORDS_S)
        running = [process for process, code in zip(started, codes, strict=True) if code is None]
        # Its last output may complete what was needed.
        if is_done():
            return Ending.DONE, None if running else failed
        if not running:
            return Ending.BY_ITSELF, failed
        if time.monotonic() > deadline_s:
            return (Ending.BY_ITSELF, failed) if failed else (Ending.TIMEOUT, None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(_POLL_S)


def _end(started: Sequence[subprocess.Popen[bytes]], mark: str, grace_s: float) -> None:
    """End what is left of a command: by SIGTERM, and after ``grace_s`` by SIGKILL."""

    def is_left() -> bool:
        return any([process.poll() is None for process in started]) or bool(processes_with(mark, "1"))

    def signal_groups(number: signal.Signals) -> None:
        # Once a leader has ended, its group id may be reused. Find the rest by their environment.
        for process in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)

    def await_end(timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while is_left() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S / 2)

    try:
        if any([process.poll() is None for process in started]):
            signal_groups(signal.SIGTERM)
            await_end(grace_s)
    finally:  # a second Ctrl-C cuts the grace period short
        signal_groups(signal.SIGKILL)
        # A process that is just forked, or begins a program, is missed by a single look.
        deadline_s, num_looks = time.monotonic() + _KILL_WAIT_S, 0
        while num_looks < 2 and time.monotonic() < deadline_s:
            for pid in processes_with(mark, "1"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S / 4)
            num_looks = 0 if is_left() else num_looks + 1


def processes_with(variable: str, value: str) -> list[int]:
    """Ids of the other processes started with this value of an environment variable.

    ``torchrun`` starts each worker in its own session, and once it is killed they have another parent. Their
    environment still identifies them. Linux only: without ``/proc`` none are found.
    """
    wanted = os.fsencode(f"{variable}={value}")
    found = []
    with contextlib.suppress(OSError):
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                # it has ended, or belongs to another user; a zombie has no environment
                with contextlib.suppress(OSError):
                    if wanted in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
    return found


# -- signals


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Delay signals that end this process until the block is over: a command just started would be orphaned."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda found, _: held.append(found)):
        yield
    if held:
        os.kill(os.getpid(), held[0])


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP act like Ctrl-C: the command is ended, and results are kept. Main thread only."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with _handled((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[..., object]) -> Iterator[None]:
    """Install another signal handler; signals that this process was started to ignore stay ignored."""
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: was for number, was in before.items() if was is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, signal.SIG_DFL if was is None else was)


# -- ranks of a job


def rank_variables(size: int) -> list[dict[str, str]]:
    """The variables that ``torchrun`` would set for each rank of a job on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


# -- a run with its own folder


_STDOUT, _STDERR = "stdout.log", "stderr.log"


@dataclass(frozen=True)
class Limits:
    """Time limits of a run.

    Attributes:
        timeout_s: after this it has failed.
        left_s: time left for all runs; once it is over, the run does not count.
    """

    timeout_s: float
    left_s: float


def fresh_folder(folder: Path, name: str) -> Path:
    """An empty folder for a run; raises OSError if it cannot be created."""
    own = (folder / "runs" / name).resolve()
    if own.exists():
        shutil.rmtree(own)  # from a run that was cut short
    own.mkdir(parents=True)
    return own


def run_kept(
    command: Sequence[str],
    own: Path,
    limits: Limits,
    *,
    environment: Mapping[str, str],
    is_done: Callable[[], bool] = lambda: False,
    ranks: Sequence[Mapping[str, str]] = ({},),
) -> Outcome | None:
    """Run a command; its output and the library's record go to its own folder.

    Args:
        command: program and arguments.
        own: its folder.
        limits: of time.
        environment: added to ours, without our settings for the library.
        is_done: as in ``supervise``.
        ranks: as in ``supervise``.

    Returns:
        How it ended; None if the time for all runs was over first.

    Raises:
        OSError: the command cannot be started, or a file cannot be written.
        KeyboardInterrupt: Ctrl-C. The command has ended.
    """
    ours = {name: value for name, value in os.environ.items() if name not in (SWITCH, TIME_ONLY)}
    with (own / _STDOUT).open("wb") as stdout, (own / _STDERR).open("wb") as stderr:
        outcome = supervise(
            command,
            environment={**ours, **environment, RUN_DIR: str(own)},
            is_done=is_done,
            timeout_s=min(limits.timeout_s, limits.left_s),
            ranks=ranks,
            stdout=stdout,
            stderr=stderr,
        )
    return None if outcome.ending is Ending.TIMEOUT and limits.left_s < limits.timeout_s else outcome


class GrowingRecord:
    """The record of a running job, read again whenever it has grown; None before there is one."""

    def __init__(self, folder: Path, *, details: bool = True) -> None:
        self._path = folder / FILE_NAME
        self._details = details
        self._size = -1
        self.record: Record | None = None

    def read(self) -> Record | None:
        """The current record."""
        with contextlib.suppress(OSError, RecordError):
            size = self._path.stat().st_size
            if size != self._size:
                self.record = read(self._path, details=self._details)
                self._size = size
        return self.record


# -- why a command failed

# Number of bytes examined at the end of the output.
_TAIL_BYTES = 256 * 1024
_MAX_LENGTH = 200
_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "[rank1]: torch.OutOfMemoryError: CUDA out of memory. ...", with the prefixes of launchers.
_ERROR = re.compile(
    r"^(?:\[[^\]]*\]:?\s*|\d+:\s*)*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Failure)\b.*)$"
)
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|Cannot allocate memory|can't allocate memory", re.IGNORECASE)
# How a launcher, or another rank, reports a rank that has failed.
_CONSEQUENCE = re.compile(
    r"ChildFailedError|ProcessRaisedException|ProcessExitedException|SignalException|CalledProcessError"
    r"|Connection (?:reset|closed|refused)|Broken pipe|DistNetworkError|DistStoreError"
)


def exit_in_words(exit_code: int) -> str:
    """E.g. ``exit code 1`` or ``ended by SIGKILL``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"ended by signal {-exit_code}"


def last_words(own: Path) -> str:
    """The error that a run printed, to follow other words; empty if it printed nothing."""
    line = telling_line(_end_of(own / _STDERR)) or telling_line(_end_of(own / _STDOUT))
    return f": {line}" if line else ""


def telling_line(output: str) -> str:
    """The line of a command's output that best explains its failure; empty without output.

    A line on memory; else the last exception that is not a consequence of another; else the last line.
    """
    lines = [line.strip() for line in _COLORS.sub("", output).splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    causes = [line for line in errors if not _CONSEQUENCE.search(line)]
    memory = [line for line in errors or lines if _OUT_OF_MEMORY.search(line)]
    line = (memory or causes[-1:] or errors[-1:] or lines[-1:] or [""])[0]
    return printable(shortened(line, _MAX_LENGTH))


def _end_of(file: Path) -> str:
    """The end of an output file; empty if there is none."""
    try:
        with file.open("rb") as source:
            source.seek(max(0, source.seek(0, 2) - _TAIL_BYTES))
            return source.read().decode(errors="replace")
    except OSError:
        return ""
