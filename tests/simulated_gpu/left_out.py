"""Finds the waits in a source, leaves out one of them, and says what jobs then show."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.distributed import run_ranks
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog

_NAMES = {"wait", "wait_stream", "wait_event", "synchronize"}


@dataclass(frozen=True)
class Wait:
    """A statement that waits.

    Attributes:
        where: class and function, or function.
        number: of the statement among those of the function.
    """

    where: str
    number: int = 0

    @property
    def name(self) -> str:
        return f"{self.where} {self.number}" if self.number else self.where

    @contextlib.contextmanager
    def left_out(self, *modules: Any) -> Iterator[None]:
        """Without it in the one of these modules that has it."""
        *owner, name = self.where.split(".")
        holder = next(module for module in modules if (*owner, name)[0] in vars(module))
        holder = getattr(holder, owner[0]) if owner else holder
        original = inspect.unwrap(getattr(holder, name))
        tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
        _LeaveOut(self.number).visit(tree)
        found: dict[str, Any] = {}
        exec(compile(ast.fix_missing_locations(tree), inspect.getfile(original), "exec"), original.__globals__, found)
        with mock.patch.object(holder, name, found[name]):
            yield


class _LeaveOut(ast.NodeTransformer):
    def __init__(self, number: int) -> None:
        self._left = number

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if not _waits(node.value):
            return node
        self._left -= 1
        return ast.Pass() if self._left == -1 else node


def _waits(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _NAMES


def waits_of(folder: Path, without: str = "") -> list[Wait]:
    """All waits in the files of a folder but one."""
    found = []
    for file in sorted(set(folder.glob("*.py")) - {folder / without}):
        for node in ast.parse(file.read_text()).body:
            owner, functions = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
            for function in functions:
                if isinstance(function, ast.FunctionDef):
                    waits = [one for one in ast.walk(function) if _waits(one)]
                    found += [Wait(f"{owner}{function.name}", number) for number in range(len(waits))]
    return found


# -- jobs without a wait


@contextlib.contextmanager
def host_ahead() -> Iterator[None]:
    """The device begins with what is enqueued here once all of it is."""
    enqueued = threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(_: int) -> None:
        enqueued.wait()

    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert ctypes.CDLL("libcudart.so.13").cudaLaunchHostFunc(stream, function, None) == 0
    try:
        yield
    finally:
        enqueued.set()
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Ran:
    """Two steps of a job on a rank, an overlapped one and a sequential one.

    Attributes:
        begun: when the host began each, and when it had ended the second.
        numbers: that they came to.
    """

    begun: tuple[int, int, int]
    numbers: list[list[float]]


@dataclass(frozen=True)
class Shown:
    """The same on all ranks.

    Attributes:
        overlapped_ms: the least for which an overlapped step computed and communicated at once, by the devices' logs.
        sequential_ms: the most for which a sequential one did.
        numbers: of each rank.
    """

    overlapped_ms: float
    sequential_ms: float
    numbers: list[list[list[float]]]


ByJob = dict[str, dict[str, Ran]]


def run(jobs: Callable[[int, Parameters], tuple[int, ByJob]], folder: Path) -> dict[str, dict[str, Shown]]:
    """What jobs on two ranks have shown, by what was left out and by job.

    Args:
        jobs: a rank's part; returns the process's number, and what ran.
        folder: for the log.
    """
    told = Parameters(computes=True, stall_s=30, log=folder / "log", kernel_us=300, collective_us=400)
    ranks = run_ranks(jobs, 2, told, backend="", timeout_s=240)
    logs = [DeviceLog.read(folder / "log", process) for process, _ in ranks]

    def shown(name: str, job: str) -> Shown:
        both = [found[name][job] for _, found in ranks]
        steps = [log.steps(one.begun) for log, one in zip(logs, both, strict=True)]
        return Shown(
            min(overlapped.hidden_ms for overlapped, _ in steps),
            max(sequential.hidden_ms for _, sequential in steps),
            [one.numbers for one in both],
        )

    return {name: {job: shown(name, job) for job in of_name} for name, of_name in ranks[0][1].items()}


def overlapping(found: dict[str, Shown]) -> set[str]:
    """The jobs whose sequential step overlaps."""
    return {job for job, one in found.items() if one.sequential_ms > 0}


def wrong(found: dict[str, Shown], right: dict[str, Shown]) -> set[str]:
    """The jobs whose numbers are not the right ones."""
    return {job for job, one in found.items() if repr(one.numbers) != repr(right[job].numbers)}
