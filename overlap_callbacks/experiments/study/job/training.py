"""A running job of any strategy: its step, and how the library is attached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks.experiments.study.job.building import loss_of
from overlap_callbacks.experiments.study.models import JobSpec, Transformer

# As in GPT-3's smaller sizes; the values of the weights do not matter here.
_ADAM_RATE, _SGD_RATE, _SGD_MOMENTUM = 1e-4, 1e-2, 0.9


class Training(ABC):
    """A model, its optimizer and its data.

    Attributes:
        spec: the job.
        device: of this rank.
        rank: number of this rank.
        samples_per_step: sequences or images of a step of the whole job.
        losses: of this rank, step by step, where it has any.
    """

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.rank = dist.get_rank()
        self.samples_per_step = spec.configuration.batch * spec.ranks
        self.losses: list[torch.Tensor] = []

    @abstractmethod
    def step(self) -> None:
        """Train one step."""

    @abstractmethod
    def attach(self, steps_done: int, **options: Any) -> Any:
        """Attach the library as a user does; returns its monitor."""


class LoopTraining(Training):
    """A plain training loop around a module in its strategy's form, which takes a batch.

    ``casts``: the forward pass runs under autocast if the precision has 16 bit.
    """

    def __init__(
        self,
        spec: JobSpec,
        device: torch.device,
        module: nn.Module,
        data: Iterator[tuple[torch.Tensor, torch.Tensor]],
        *,
        casts: bool = True,
    ) -> None:
        super().__init__(spec, device)
        self.module = module
        self.data = data
        self._half = HALF.get(spec.configuration.precision) if casts else None
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

    def casting(self) -> AbstractContextManager[object]:
        """Context of the forward pass: 32-bit weights, 16-bit products."""
        return nullcontext() if self._half is None else torch.autocast(self.device.type, dtype=self._half)

    def attach(self, steps_done: int, **options: Any) -> Any:
        from overlap_callbacks.integrations.pytorch import attach

        return attach(self.optimizer, model=self.module, start_step=steps_done, **options)


def optimizer_of(spec: JobSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW for language models, SGD with momentum for image networks."""
    # torch's optimizers update many tensors at once, but cannot mix tensors that are split over ranks with others.
    split = [parameter for parameter in parameters if hasattr(parameter, "to_local")]
    whole = [parameter for parameter in parameters if not hasattr(parameter, "to_local")]
    groups = [{"params": group} for group in (split, whole) if group]
    if isinstance(spec.model, Transformer):
        return torch.optim.AdamW(groups, lr=_ADAM_RATE)
    scale = loss_scale(spec.configuration.precision)
    return torch.optim.SGD(groups, lr=_SGD_RATE / scale, momentum=_SGD_MOMENTUM)


# -- precision: TF32 on or off for all products, autocast for 16 bit


# The 16-bit types.
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Without it, 16-bit gradients would vanish. It is fixed, so that no step waits for an overflow check.
_FP16_LOSS_SCALE = 1024.0


def set_tf32(precision: str) -> None:
    """Allow or forbid TF32 for 32-bit matrix products and convolutions on GPUs."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def loss_scale(precision: str) -> float:
    """The factor of the loss before the backward pass."""
    return _FP16_LOSS_SCALE if precision == "fp16" else 1.0
