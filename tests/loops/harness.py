"""Runs somebody else's training loop on two Gloo ranks, with the library and without, and compares what it trained.

A loop is a function that trains: it gets the options of the library, or None to train without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.loops.watching import NUM_STEPS, OPTIONS, watched


def compare(
    loop: Callable[..., None],
    folder: Path,
    *args: Any,
    num_steps: int = NUM_STEPS,
    timeout_s: float = 150.0,
    **options: Any,
) -> OverlapReport:
    """Train with and without the library, and require the same losses and weights, bit by bit.

    Args:
        loop: ``loop(options, *args)`` of a module's top level; makes its own process group, as under ``torchrun``.
        folder: for the record.
        *args: further arguments of the loop.
        num_steps: that the loop takes at least.
        timeout_s: longest time for each of the two runs.
        **options: of the library, besides ``OPTIONS``.

    Returns:
        The report of the one window.
    """
    without = run_ranks(_watch, 2, loop, None, args, timeout_s=timeout_s, backend="")
    measured = {**OPTIONS, "run_dir": str(folder), **options}
    with_it = run_ranks(_watch, 2, loop, measured, args, timeout_s=timeout_s, backend="")
    for absent, present in zip(without, with_it, strict=True):
        assert len(absent["weights"]) >= num_steps - 1
        assert len(set(absent["weights"])) > num_steps // 2  # it does train
        assert present == absent
    assert any(facts["losses"] for facts in without)  # only the last stage of a pipeline has them
    (file,) = folder.rglob("overlap.jsonl")
    (window,) = record.read(file).windows
    return window


def _watch(rank: int, loop: Callable[..., None], options: dict[str, Any] | None, args: tuple[Any, ...]) -> Any:
    with watched() as watch:
        loop(options, *args)
    return watch.facts()


def expect_measured(window: OverlapReport) -> None:
    """A whole window of both ranks that has communication, and is valid or says why it is not."""
    assert window.complete
    assert window.ranks == (0, 1)
    assert window.speedup_vs_sequential is not None
    assert sum(collective.bytes_in for collective in window.collectives) > 0
    assert window.valid or window.problems
