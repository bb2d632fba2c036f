"""Applies a precision: TF32 on or off for all products, autocast for 16 bit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

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
