"""Runs a function in several real interpreters that start as scripts do and end as they do; for tests of the end.

Ranks of ``tests/distributed.py`` leave with ``os._exit``, and so cannot show what happens while an interpreter ends:
its ``atexit`` functions, its daemon threads, and crashes in what torch does last. These do. Rank 0 serves the store
of the job, as without ``torchrun``, so that the store dies with it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HOST = "127.0.0.1"
_ROOT = Path(__file__).parent.parent
_POLL_S = 0.01
# Faults of the C++ part show the stack of each Python thread.
_SCRIPT = """
import faulthandler
faulthandler.enable(all_threads=True)
from {module} import {function}
{function}(*{args!r})
"""


@dataclass(frozen=True)
class Ending:
    """How one interpreter ended.

    Attributes:
        rank: its number.
        code: the return code of its process; negative for a signal; None if it had to be killed.
        output: stdout and stderr.
    """

    rank: int
    code: int | None
    output: str

    def __str__(self) -> str:
        return f"--- rank {self.rank} ended with {'a hang' if self.code is None else self.code}\n{self.output}"


def run_interpreters(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Ending]:
    """How interpreters end that call ``function(*args)`` and nothing else.

    Args:
        function: of a module's top level; makes its own process group, from the environment.
        world_size: interpreters.
        *args: further arguments; what ``repr`` shows of them makes them again.
        timeout_s: longest time for all; those that are left then are killed.
        environment: variables that they get beside those of ``torchrun``.
    """
    source = _SCRIPT.format(module=function.__module__, function=function.__name__, args=args)
    with tempfile.TemporaryDirectory(prefix="interpreters-") as folder:
        script = Path(folder, "script.py")
        script.write_text(source)
        outputs = [Path(folder, f"output-{rank}") for rank in range(world_size)]
        port = _free_port()
        processes = [
            _start(script, output, rank, world_size, port, environment or {}) for rank, output in enumerate(outputs)
        ]
        try:
            _await(processes, timeout_s)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            Ending(rank, code, output.read_text(errors="replace"))
            for rank, (code, output) in enumerate(zip(codes, outputs, strict=True))
        ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _start(
    script: Path, output: Path, rank: int, world_size: int, port: int, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    variables = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port), **environment,
    }  # fmt: skip
    with output.open("wb") as file:
        return subprocess.Popen([sys.executable, str(script)], env=variables, stdout=file, stderr=subprocess.STDOUT)


def _await(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
