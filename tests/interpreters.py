"""Runs a function in several interpreters that end as scripts do; for tests of the end.

Like the ranks of ``tests/distributed.py``, they are forked from a server that has torch loaded, and end as the
interpreter of a script ends. But nothing stands between the function and the end: it makes its own process group, and
exits, raises or dies as a script's top level would. Rank 0 serves the store of the job, as without ``torchrun``, so
that the store dies with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.distributed import collect_own_garbage, end_interpreter, redirect_output, starter
from tests.margins import PATIENCE_S

_HOST = "127.0.0.1"
_POLL_S = 0.01


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
        *args: further arguments; pickled.
        timeout_s: longest time for all; those that are left then are killed.
        environment: variables that they get beside those of ``torchrun``.
    """
    with tempfile.TemporaryDirectory(prefix="interpreters-") as folder, contextlib.ExitStack() as stack:
        outputs = [Path(folder, f"output-{rank}") for rank in range(world_size)]
        variables = {
            "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(_free_port()), **(environment or {}),
        }  # fmt: skip
        processes = [
            stack.enter_context(started(function, *args, output=output, rank=rank, environment=variables))
            for rank, output in enumerate(outputs)
        ]
        _await(processes, timeout_s)
        codes = [process.exitcode for process in processes]
        stack.close()
        return [
            Ending(rank, code, output.read_text(errors="replace"))
            for rank, (code, output) in enumerate(zip(codes, outputs, strict=True))
        ]


@contextlib.contextmanager
def started(
    function: Callable[..., Any], *args: Any, output: Path, rank: int = 0, environment: dict[str, str] | None = None
) -> Iterator[Any]:
    """An interpreter that calls ``function(*args)`` and nothing else; killed at the end, if it is still there.

    Args:
        function: of a module's top level.
        *args: further arguments; pickled.
        output: file of its stdout and stderr.
        rank: its number.
        environment: variables that it gets beside that one.
    """
    main = ([(function, args)], rank, str(output), environment or {})
    process: Any = multiprocessing.get_context("forkserver").Process(target=_main, args=main, daemon=True)
    starter(function)(process)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _await(processes: list[Any], timeout_s: float) -> None:
    deadline = time.monotonic() + min(4 * timeout_s, PATIENCE_S)  # a busy machine has less time for them
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


# -- in the interpreters


def _main(
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]], rank: int, output: str, variables: dict[str, str]
) -> None:
    collect_own_garbage()
    redirect_output(Path(output))
    faulthandler.enable(all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    end_interpreter(_call(*calls.pop()))


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Call the function as a script's top level; the exit code that Python would give."""
    try:
        function(*args)
    except SystemExit as ending:
        if not isinstance(ending.code, str):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException:
        # What Python does with an exception that nobody catches: its frames live until the end.
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
