"""Runs a command until it ends, has done enough, or has taken too long; and leaves none of its processes behind."""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# Marks the processes of one command. Of its own, so that no other process can have the same value.
MARK = "OVERLAP_CALLBACKS_COMMAND"
# Time in which a command that is asked to end may do so. torchrun ends its workers within it.
GRACE_S = 10.0
_POLL_S = 0.1
# Time in which the system takes away processes that were killed.
_KILL_WAIT_S = 5.0


class Ending(enum.Enum):
    """Why a command is over."""

    BY_ITSELF = "by itself"
    DONE = "done"  # it had done enough, and was ended
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        ending: why.
        exit_code: that it ended with by itself; negative for a signal. None if it was ended.
        seconds: from its start until nothing of it was left.
    """

    ending: Ending
    exit_code: int | None
    seconds: float


def supervise(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    is_done: Callable[[], bool],
    timeout_s: float,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run a command in a session of its own, so that Ctrl-C in the terminal reaches only us, and we end it in order.

    Args:
        command: program and arguments.
        environment: of the command. It gets one more variable, by which the command's processes are found.
        is_done: asked again and again; the command is ended once it says so.
        timeout_s: maximum time.
        stdout: where the command's output goes; None for where ours goes.
        stderr: the same for its errors.
        grace_s: time in which the command may end when it is asked to; then all of its processes are killed.

    Raises:
        OSError: the command cannot be started.
        KeyboardInterrupt: Ctrl-C, or a signal that ``interruptible`` turns into it. The command has ended.
    """
    begun_s = time.monotonic()
    mark = secrets.token_hex(16)
    process: subprocess.Popen[bytes] | None = None
    try:
        with _signals_held_back():
            process = subprocess.Popen(
                list(command),
                env={**environment, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        ending = _await(process, is_done, begun_s + timeout_s)
    finally:
        if process is not None:
            exit_code = process.poll()
            _end(process, mark, grace_s)
    return Outcome(ending, exit_code, time.monotonic() - begun_s)


def _await(process: subprocess.Popen[bytes], is_done: Callable[[], bool], deadline_s: float) -> Ending:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            # What it wrote last may be all that was wanted.
            return Ending.DONE if is_done() else Ending.BY_ITSELF
        if is_done():
            return Ending.DONE
        if time.monotonic() > deadline_s:
            return Ending.TIMEOUT


def _end(process: subprocess.Popen[bytes], mark: str, grace_s: float) -> None:
    """End what is left of a command: by SIGTERM, and after ``grace_s`` by SIGKILL."""

    def left() -> list[int]:
        return processes_with(MARK, mark)

    try:
        if process.poll() is None:
            _signal_group(process, signal.SIGTERM)
            _await_end(process, left, grace_s)
    finally:  # a second Ctrl-C cuts the grace short
        _signal_group(process, signal.SIGKILL)
        send_signal(left(), signal.SIGKILL)
        _await_end(process, left, _KILL_WAIT_S)


def _await_end(process: subprocess.Popen[bytes], left: Callable[[], list[int]], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while (process.poll() is None or left()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S / 2)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Once the leader has ended, the group's number may be another's. What is left of it is found by the environment.
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Signals that end us come when the block is over: a command that has started and has no name yet would stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda found, _: held.append(found)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        os.kill(os.getpid(), held[0])


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end us as Ctrl-C does: the command is ended, and results are kept. Main thread only."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- processes that a job left
# Finds the processes of a command by a variable that they inherit, wherever they stand in the tree of processes.
#
# ``torchrun`` starts each worker in a session of its own. So the command's process group does not hold the workers, and
# once ``torchrun`` is killed they have another parent. Their environment still tells whose they are. Linux only: where
# there is no ``/proc``, only the command's process group is known.


def processes_with(variable: str, value: str) -> list[int]:
    """Ids of the processes, other than this one, that were started with an environment variable.

    Args:
        variable: its name.
        value: its value.
    """
    wanted = os.fsencode(f"{variable}={value}")
    return [pid for pid, environment in _environments() if wanted in environment.split(b"\0")]


def send_signal(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to processes, as far as they are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _environments() -> Iterator[tuple[int, bytes]]:
    with contextlib.suppress(OSError):
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):  # it has ended, or is somebody else's; a zombie has none
                    yield int(folder.name), (folder / "environ").read_bytes()
