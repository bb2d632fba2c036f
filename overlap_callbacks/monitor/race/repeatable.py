"""What the race check needs of a job: a step that can be run again, its gradients, and what is around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from overlap_callbacks.gate.step_log import StepLog


class RepeatableStep:
    """Interface: forward and backward of one step, on a batch that somebody holds. Adapters make one.

    All of it is called on the training thread, between two steps.
    """

    def refusal(self) -> str:
        """Why this job's step must not be repeated, in words; empty if it may be. The same on every rank."""
        return ""

    def run(self) -> None:
        """Run forward and backward once. What it raises is the user's."""
        raise NotImplementedError

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Everything that trains, by name: none of it may change."""
        raise NotImplementedError

    def modules(self) -> Sequence[nn.Module]:
        """The modules of the model, whose buffers and modes are put back."""
        raise NotImplementedError

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        """The gradients of the repetition that has just ended, by the parameter's name; this rank's part of each."""
        return {name: parameter.grad for name, parameter in self.parameters().items()}

    def put_back(self) -> None:
        """Undo what a repetition changed beside gradients, buffers and random numbers. Called after each."""

    def bucket_of(self, parameter: str) -> str:
        """What to call the bucket of gradients that this one is reduced with; empty where none is known."""
        return ""

    def collective_of(self, parameter: str, log: StepLog) -> str:
        """The collective of a sequential repetition that reduces this gradient, in words; empty where none is known.

        Args:
            parameter: its name.
            log: of the repetition.
        """
        return ""


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    to_local: Callable[[], Any] | None = getattr(tensor, "to_local", None)
    part: torch.Tensor = tensor if to_local is None else to_local()
    return part.detach()
