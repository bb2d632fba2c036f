"""Finds the processes of a command by a variable that they inherit, wherever they stand in the tree of processes.

``torchrun`` starts each worker in a session of its own. So the command's process group does not hold the workers, and
once ``torchrun`` is killed they have another parent. Their environment still tells whose they are. Linux only: where
there is no ``/proc``, only the command's process group is known.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


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
