"""Finds the waits in a source, and leaves out one of them."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

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


def waits_of(folder: Path) -> list[Wait]:
    """All waits in the files of a folder."""
    found = []
    for file in sorted(folder.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            owner, functions = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
            for function in functions:
                if isinstance(function, ast.FunctionDef):
                    waits = [one for one in ast.walk(function) if _waits(one)]
                    found += [Wait(f"{owner}{function.name}", number) for number in range(len(waits))]
    return found
