"""What a repeated step may change, and must not: held before it, and put back after it."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overlap_callbacks.instruments import device
from overlap_callbacks.monitor.race.repeatable import RepeatableStep, local

# Of the kinds of integers that have the bits of a tensor.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SteppedAnOptimizerError(RuntimeError):
    """The function that repeats a step would have stepped an optimizer; it was stopped before."""

    def __init__(self) -> None:
        super().__init__("repeat_step must run forward and backward alone, and it would have stepped an optimizer")


class HeldState:
    """Parameters, gradients, buffers and random numbers as they were when this was made.

    Copies are in the host's memory. Gradients are taken off their parameters, as ``zero_grad`` does, and come back as
    the same objects.

    Args:
        step: what is repeated.

    Attributes:
        held_bytes: of the copies.
    """

    def __init__(self, step: RepeatableStep) -> None:
        self._step = step
        self._random = _RandomState([parameter.device for parameter in step.parameters().values()])
        self._modes = [(module, module.training) for module in step.modules()]
        self._buffers = [
            (module, name, buffer, _on_host(buffer))
            for module in step.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        parameters = step.parameters().values()
        self._parameters = [(parameter, _on_host(parameter)) for parameter in parameters]
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else _on_host(parameter.grad))
            for parameter in parameters
        ]
        copies = [copy for *_, copy in self._buffers] + [copy for _, copy in self._parameters]
        copies += [copy for *_, copy in self._gradients if copy is not None]
        self.held_bytes = sum([_nbytes(copy) for copy in copies])

    def rewind(self) -> None:
        """Have the next repetition begin as the first did: without gradients."""
        self._random.restore()
        self._restore_modules()
        for parameter, _, _ in self._gradients:
            parameter.grad = None

    def restore(self) -> list[torch.Tensor]:
        """Put everything back.

        Returns:
            Parameters that had changed; they are as they were again.
        """
        changed = []
        with torch.no_grad():
            for parameter, gradient, copy in self._gradients:
                if gradient is not None and copy is not None:
                    _put(gradient, copy)  # a view of a bucket, say, in which the repetition left its own
                parameter.grad = gradient
            self._restore_modules()
            for parameter, copy in self._parameters:
                if not same_bits(local(parameter).to("cpu"), copy):
                    local(parameter).copy_(copy)
                    changed.append(parameter)
        self._random.restore()
        return changed

    def _restore_modules(self) -> None:
        with torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                module._buffers[name] = buffer
                _put(buffer, copy)
        for module, training in self._modes:
            module.training = training


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    part = local(tensor)
    return part.to("cpu", copy=True) if part.layout is torch.strided else part.to("cpu").clone()


def _put(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    part = local(tensor)
    if part.layout is torch.strided:
        part.copy_(copy)  # a sparse gradient is an object of its own, which no repetition touches


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as whole numbers: of equal bits NaN is equal to NaN, and 0.0 is not -0.0."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bit by bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(bits(one), bits(other))


class _RandomState:
    """The states of all global generators: Python's, NumPy's and torch's, on the host and on the devices.

    Args:
        devices: whose generators count.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = torch.get_rng_state()
        on_device = {of for of in devices if of.type not in ("cpu", "meta")}
        used = device.in_use()
        if used is not None:
            on_device.add(used)
        self._of_devices = {of: device.random_state(of) for of in on_device}

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            numpy: Any = sys.modules["numpy"]
            numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for of, state in self._of_devices.items():
            device.set_random_state(of, state)


@contextlib.contextmanager
def no_optimizer_steps() -> Iterator[None]:
    """Meanwhile no optimizer of this thread steps.

    Raises:
        SteppedAnOptimizerError: (from ``step`` of an optimizer) one would have.
    """
    thread = threading.get_ident()

    def refuse(*_: object) -> None:
        if threading.get_ident() == thread:
            raise SteppedAnOptimizerError

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def modules_of(models: Sequence[nn.Module]) -> list[nn.Module]:
    """All modules of these models, each once."""
    return list(dict.fromkeys([module for model in models for module in model.modules()]))
