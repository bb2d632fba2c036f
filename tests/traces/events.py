"""Hand-made traces and what is read from them: events, figures, the command line's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overlap_callbacks.traces import analyze, read_trace
from overlap_callbacks.traces.figures import TraceFigures
from tests import kineto
from tests.commands import invoke

MS = 1_000_000


def gemm(start: float, end: float, correlation: int = 0, **options: Any) -> kineto.Event:
    return kineto.kernel(kineto.GEMM, round(start * MS), round(end * MS), correlation, **options)


def all_reduce(start: float, end: float, correlation: int = 0, **options: Any) -> kineto.Event:
    return kineto.kernel(kineto.ALL_REDUCE, round(start * MS), round(end * MS), correlation, stream=20, **options)


def figures_of(folder: Path, events: list[kineto.Event], **options: Any) -> TraceFigures:
    (found,) = analyze([read_trace(kineto.write(folder / "trace.json", events, **options))]).traces
    return found


def said(problems: tuple[str, ...], *words: str) -> bool:
    return any(all(word in problem for word in words) for problem in problems)


def overlap(*arguments: str) -> Any:
    result = invoke(*arguments, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def error_of(*arguments: str) -> str:
    """The one line with which a command refuses."""
    result = overlap(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
    return str(result.output)


def collective(
    start: float, end: float, correlation: int = 0, name: str = kineto.ALL_REDUCE, **args: Any
) -> kineto.Event:
    return kineto.kernel(name, round(start * MS), round(end * MS), correlation, stream=20, **args)


def short_trace(**args: Any) -> list[kineto.Event]:
    return [
        kineto.step(1, 0, 9 * MS),
        kineto.launch(10, 1),
        gemm(1, 3, 1),
        kineto.launch(20, 2),
        all_reduce(2, 4, 2, **args),
        kineto.launch(30, 3),
        gemm(5, 6, 3, grid=(2, 1, 1)),
    ]
