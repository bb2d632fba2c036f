"""Runs somebody else's training loop on two Gloo ranks, with the library and without, and compares what it trained.

A loop is a function that trains: it gets the options of the library, or None to train without it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record
from tests.distributed import run_ranks

# One recorded step, 2 x OSSO timed ones, and OSSO profiled ones. From step 3 on DDP has rebuilt its buckets.
WINDOW_STEPS = 13
FIRST_STEP = 3
NUM_STEPS = FIRST_STEP + WINDOW_STEPS + 4
OPTIONS: dict[str, Any] = {
    "every_n_steps": 1000,
    "first_step": FIRST_STEP,
    "repeats": 2,
    "steps_per_block": 1,
    "warmup_steps": 0,
    "profiled_steps": 2,
    "max_overhead": None,
    "strict": True,
}


class Watch:
    """What a loop trained, bit by bit.

    Attributes:
        losses: each that went into a backward pass.
        weights: a digest of all parameters after each step of an optimizer.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: list[str] = []

    def facts(self) -> dict[str, Any]:
        return {"losses": self.losses, "weights": self.weights}


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watches all that any loop in this process trains meanwhile."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    watch = Watch()
    backward = torch.Tensor.backward

    def noting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if tensor.numel() == 1:
            watch.losses.append(float(tensor.detach().to("cpu")))
        backward(tensor, *args, **kwargs)

    def note_weights(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                found.update(local.detach().contiguous().float().cpu().numpy().tobytes())
        watch.weights.append(found.hexdigest())

    hook = register_optimizer_step_post_hook(note_weights)
    torch.Tensor.backward = noting  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        hook.remove()


def compare(
    loop: Callable[..., None], folder: Path, *args: Any, timeout_s: float = 150.0, **options: Any
) -> OverlapReport:
    """Train with and without the library, and require the same losses and weights, bit by bit.

    Args:
        loop: ``loop(options, *args)`` of a module's top level; makes its own process group, as under ``torchrun``.
        folder: for the record.
        *args: further arguments of the loop.
        timeout_s: longest time for each of the two runs.
        **options: of the library, beside ``OPTIONS``.

    Returns:
        The report of the one window.
    """
    without = run_ranks(_watch, 2, loop, None, args, timeout_s=timeout_s, backend="")
    measured = {**OPTIONS, "run_dir": str(folder), **options}
    with_it = run_ranks(_watch, 2, loop, measured, args, timeout_s=timeout_s, backend="")
    for absent, present in zip(without, with_it, strict=True):
        assert len(absent["weights"]) >= NUM_STEPS - 1
        assert len(set(absent["weights"])) > NUM_STEPS // 2  # it does train
        assert absent["losses"]
        assert present == absent
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
