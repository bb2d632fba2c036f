"""A job on its way, whatever its strategy: what a step is, and how the library is attached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks.experiments.study.job.building import loss_of
from overlap_callbacks.experiments.study.job_spec import JobSpec
from overlap_callbacks.experiments.study.models import Transformer

# As in GPT-3's smaller sizes; what a weight becomes does not matter here.
_ADAM_RATE, _SGD_RATE, _SGD_MOMENTUM = 1e-4, 1e-2, 0.9


@dataclass(frozen=True)
class Place:
    """Where a rank trains.

    Attributes:
        rank: its number.
        ranks: of the job.
        device: its own.
    """

    rank: int
    ranks: int
    device: torch.device


class Training(ABC):
    """A model, its optimizer and its data.

    Args:
        spec: the job.
        place: of this rank.

    Attributes:
        samples_per_step: sequences or images of a step of the whole job.
        losses: of this rank, step by step, where it has any.
    """

    def __init__(self, spec: JobSpec, place: Place) -> None:
        self.spec = spec
        self.place = place
        self.samples_per_step = spec.configuration.batch * place.ranks
        self.losses: list[torch.Tensor] = []

    @abstractmethod
    def step(self) -> None:
        """Train one step."""

    @abstractmethod
    def attach(self, steps_done: int, **options: Any) -> Any:
        """Add the library's one line; its monitor."""


class LoopTraining(Training):
    """A loop of one's own around a module that takes a batch.

    Args:
        spec: the job.
        place: of this rank.
        module: in the form of its strategy.
        data: inputs and targets.
    """

    def __init__(
        self, spec: JobSpec, place: Place, module: nn.Module, data: Iterator[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        super().__init__(spec, place)
        self.module = module
        self.data = data
        self.optimizer = optimizer_of(spec, list(module.parameters()))
        self._scale = loss_scale(spec.configuration.precision)

    def step(self) -> None:
        inputs, targets = next(self.data)
        with self.casting():
            loss = loss_of(self.module(inputs), targets)
        (loss * self._scale).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def casting(self) -> Any:
        """In which the forward pass runs."""
        return autocast(self.spec.configuration.precision, self.place.device)

    def attach(self, steps_done: int, **options: Any) -> Any:
        from overlap_callbacks.integrations.pytorch import attach

        return attach(self.optimizer, model=self.module, start_step=steps_done, **options)


def optimizer_of(spec: JobSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW for language models, SGD with momentum for image networks."""
    # torch's optimizers update many tensors at once, but not some that are split over ranks together with some that
    # are not.
    split = [parameter for parameter in parameters if hasattr(parameter, "to_local")]
    whole = [parameter for parameter in parameters if not hasattr(parameter, "to_local")]
    groups = [{"params": group} for group in (split, whole) if group]
    if isinstance(spec.model, Transformer):
        return torch.optim.AdamW(groups, lr=_ADAM_RATE)
    scale = loss_scale(spec.configuration.precision)
    return torch.optim.SGD(groups, lr=_SGD_RATE / scale, momentum=_SGD_MOMENTUM)


def rank_place(device: torch.device) -> Place:
    """This rank of the process group."""
    return Place(dist.get_rank(), dist.get_world_size(), device)


# -- precision: TF32 on or off for all products, autocast for 16 bit


_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Gradients of 16 bit would vanish without. It is fixed: nothing waits for a check whether they overflowed.
_FP16_LOSS_SCALE = 1024.0


def set_tf32(precision: str) -> None:
    """Have 32-bit matrix products and convolutions of GPUs use TF32, or not."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def half_type(precision: str) -> torch.dtype | None:
    """The 16-bit type of a precision; None for those of 32 bit."""
    return _HALF.get(precision)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """In which the forward pass runs: 32-bit weights, products of 16 bit."""
    kind = half_type(precision)
    return nullcontext() if kind is None else torch.autocast(device.type, dtype=kind)


def loss_scale(precision: str) -> float:
    """What the loss is multiplied by before the backward pass."""
    return _FP16_LOSS_SCALE if precision == "fp16" else 1.0
