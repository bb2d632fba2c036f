"""Notes what a training loop trains, bit by bit. Nothing here imports the library: the reference runs without it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

# One recorded step, 2 x OSSO timed ones, and OSSO profiled ones. From step 3 on DDP has rebuilt its buckets.
WINDOW_STEPS = 13
FIRST_STEP = 3
NUM_STEPS = FIRST_STEP + WINDOW_STEPS + 4
OPTIONS: dict[str, Any] = {
    "spread": False,
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
        losses: each that went into a backward pass, or was given to ``note_loss``.
        weights: a digest of all parameters after each step of an optimizer.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: list[str] = []

    def facts(self) -> dict[str, Any]:
        return {"losses": self.losses, "weights": self.weights}


_watches: list[Watch] = []


def note_loss(loss: float) -> None:
    """For a loop whose backward passes are not started by ``Tensor.backward``."""
    _watches[-1].losses.append(loss)


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watches all that any loop in this process trains meanwhile."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    watch = Watch()
    _watches.append(watch)
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
        _watches.remove(watch)
