"""Refuses to measure jobs on devices that the library cannot time."""

from __future__ import annotations

from typing import Any

import torch

from overlap_callbacks._log import logger

_MEASURED = ("cpu", "cuda")  # ROCm is "cuda" to torch


def accelerator_in_use() -> str:
    """The type of an accelerator on which this process has tensors, if it is neither CUDA nor ROCm; else empty.

    That a machine has one says little: a job may train on its CPU all the same.
    """
    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type in _MEASURED:
            return ""
        module: Any = torch.get_device_module(accelerator.type)
        in_use = module.is_initialized() and module.memory_allocated() > 0
    except (AttributeError, RuntimeError, TypeError):
        # Not every accelerator's module tells. Then the tensors of the first collectives do.
        logger.debug("whether an accelerator is in use is not known", exc_info=True)
        return ""
    return accelerator.type if in_use else ""


def refusal(kind: str) -> str:
    """Why nothing is measured on a device of this type, for people."""
    return (
        f"the job has tensors on a device of type {kind!r}, and only CPU, CUDA and ROCm can be timed: nothing is "
        f"measured, training goes on"
    )
