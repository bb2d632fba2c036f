"""What the race check needs from a job: a step that can be repeated, and restoring everything that it may change."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import device

# Integer types with the bit width of a tensor's elements.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Types of attribute values that are restored by assignment.
_PLAIN = (type(None), bool, int, float, str)


class RepeatableStep:
    """Interface: forward and backward of one step, called on the training thread, between two steps."""

    def refusal(self) -> str:
        """Why this job's step must not be repeated; empty if it may be. The same on every rank."""
        return ""

    def run(self) -> None:
        """Run forward and backward once. Exceptions are the user's."""
        raise NotImplementedError

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """All trainable parameters, by name: none may change."""
        raise NotImplementedError

    def modules(self) -> Sequence[nn.Module]:
        """The modules of the model, whose buffers and modes are restored."""
        raise NotImplementedError

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        """This rank's part of each gradient of the repetition that has just ended, by parameter name."""
        return {name: parameter.grad for name, parameter in self.parameters().items()}

    def put_back(self) -> None:
        """Undo what a repetition changed other than gradients, buffers and random numbers. Called after each."""

    def bucket_of(self, parameter: str) -> str:
        """Name of the gradient bucket of this parameter; empty if unknown."""
        return ""

    def collective_of(self, parameter: str, log: StepLog) -> str:
        """The collective of a sequential repetition that reduces this gradient; empty if unknown."""
        return ""


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    to_local: Callable[[], Any] | None = getattr(tensor, "to_local", None)
    part: torch.Tensor = tensor if to_local is None else to_local()
    return part.detach()


class SteppedAnOptimizerError(RuntimeError):
    """The user's function tried to step an optimizer, and was stopped before it did."""

    def __init__(self) -> None:
        super().__init__("repeat_step must run forward and backward alone, and it would have stepped an optimizer")


class HeldState:
    """Parameters, gradients, buffers and random states, saved on construction.

    Copies take ``held_bytes`` of host memory. Gradients are detached from their parameters, as by ``zero_grad``, and
    come back as the same objects.
    """

    def __init__(self, step: RepeatableStep) -> None:
        parameters = step.parameters().values()
        self._random = _RandomState([parameter.device for parameter in parameters])
        self._modes = [(module, module.training) for module in step.modules()]
        self._buffers = [
            (module, name, buffer, _on_host(buffer))
            for module in step.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._parameters = [(parameter, _on_host(parameter)) for parameter in parameters]
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else _on_host(parameter.grad))
            for parameter in parameters
        ]
        copies = [copy for *_, copy in self._buffers] + [copy for _, copy in self._parameters]
        copies += [copy for *_, copy in self._gradients if copy is not None]
        self.held_bytes = sum([_nbytes(copy) for copy in copies])

    def rewind(self) -> None:
        """Reset for the next repetition, so that it begins as the first did: without gradients."""
        self._random.restore()
        self._restore_modules()
        for parameter, _, _ in self._gradients:
            parameter.grad = None

    def restore(self) -> list[torch.Tensor]:
        """Restore everything. Returns the parameters that had changed."""
        changed = []
        with torch.no_grad():
            for parameter, gradient, copy in self._gradients:
                if gradient is not None and copy is not None:
                    _put(gradient, copy)  # for example, a view of a bucket that the repetition has overwritten
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
        part.copy_(copy)  # a sparse gradient is a separate object, which no repetition touches


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers: NaNs with the same bits are equal, and 0.0 differs from -0.0."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(bits(one), bits(other))


class _RandomState:
    """The states of all global generators: Python's, NumPy's and torch's, on the host and on the devices."""

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
    """Context in which optimizers of this thread raise SteppedAnOptimizerError instead of stepping."""
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


# -- plain attributes of framework objects


class HeldAttributes:
    """Plain values of some objects, saved on construction; for marked objects, dictionaries and lists too.

    Dictionaries and lists come back as the same objects with their former contents; tensors and other objects in them
    with their current values.
    """

    def __init__(self, holders: Sequence[tuple[Any, bool]]) -> None:
        self._holders = [
            (holder, whole, {name: _held(value) for name, value in vars(holder).items() if _counts(value, whole)})
            for holder, whole in holders
        ]

    def put_back(self) -> None:
        """Restore everything, and remove what was added since."""
        for holder, whole, values in self._holders:
            for name in [name for name, value in vars(holder).items() if _counts(value, whole) and name not in values]:
                delattr(holder, name)
            for name, held in values.items():
                vars(holder)[name] = _restored(held)


class _Container:
    """A dictionary or list: the object itself and its contents."""

    def __init__(self, container: Any) -> None:
        self._container = container
        items = container.items() if isinstance(container, dict) else enumerate(container)
        self._items = [(key, _held(value)) for key, value in items]

    def restored(self) -> Any:
        self._container.clear()
        for key, held in self._items:
            if isinstance(self._container, dict):
                self._container[key] = _restored(held)
            else:
                self._container.append(_restored(held))
        return self._container


def _counts(value: Any, whole: bool) -> bool:
    return isinstance(value, (*_PLAIN, dict, list)) if whole else isinstance(value, _PLAIN)


def _held(value: Any) -> Any:
    return _Container(value) if type(value) in (dict, list) else value


def _restored(held: Any) -> Any:
    return held.restored() if isinstance(held, _Container) else held
