"""Marks where the parts of a step begin, at hooks of modules, tensors and the autograd engine.

They read and change no tensor. In a copy of a model, and in compiled code, they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from overlap_callbacks import OverlapMonitor
from overlap_callbacks.analysis.step_vectors import (
    AFTER_BACKWARD,
    BACKWARD,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    WAITING,
)

# Tensors of a model's output whose gradient may come first.
_MAX_OUTPUTS = 4


class Hook:
    """A function as a hook of a model. A copy of the model, which may be sent or saved, gets one that does nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


class PassMarks:
    """Marks forward and backward passes for a monitor.

    ``idle``: what is not in a pass of a model is waiting, as in a pipeline between micro-batches.
    """

    def __init__(self, monitor: OverlapMonitor, *, idle: bool = False) -> None:
        self._monitor = monitor
        self._enter = monitor.enter
        self._is_backward = False
        self._after_forward = WAITING if idle else None
        self._after_backward = WAITING if idle else AFTER_BACKWARD
        self._queue: Any = torch.autograd.Variable._execution_engine.queue_callback

    def watch_models(self, models: Iterable[nn.Module]) -> None:
        """Mark the passes of these models."""
        for model in models:
            before = model.register_forward_pre_hook(Hook(self._forward_begins), prepend=True)
            after = model.register_forward_hook(Hook(self._forward_ended), prepend=True)
            self._monitor.call_on_close(before.remove)
            self._monitor.call_on_close(after.remove)

    def watch_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Mark the ends of backward passes, of compiled and unknown models too: at a parameter that gets a gradient."""
        found = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
        if found:
            hook = found[-1].register_hook(Hook(self._queue_end))
            self._monitor.call_on_close(hook.remove)

    def watch_backward(self, output: Any) -> None:
        """Mark the backward pass that begins with the gradient of this output."""
        for number, tensor in enumerate(_tensors_in(output)):
            if number == _MAX_OUTPUTS:
                return
            tensor.register_hook(self._backward_begins)

    def optimizer_begins(self, *_: Any) -> None:
        self._is_backward = False  # an exception may have ended the backward pass
        self._enter(OPTIMIZER)

    def _forward_begins(self, *_: Any) -> None:
        self._is_backward = False
        self._enter(FORWARD if torch.is_grad_enabled() else EVALUATION)

    def _forward_ended(self, _model: Any, _inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self.watch_backward(output)
            if self._after_forward is not None:
                self._enter(self._after_forward)

    def _backward_begins(self, _: Any) -> None:
        if not self._is_backward:
            self._enter(BACKWARD)
            self._queue_end()

    def _queue_end(self, *_: Any) -> None:
        if not self._is_backward:
            self._is_backward = True
            self._queue(self._gradients_are_computed)

    def _gradients_are_computed(self) -> None:
        # Called when the graph is done, before what was queued later: DDP and FSDP wait there for their collectives.
        self._enter(WAITING)
        self._queue(self._backward_ended)

    def _backward_ended(self) -> None:
        self._is_backward = False
        self._enter(self._after_backward)


def _tensors_in(output: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors of an output that will get a gradient."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
    elif depth:
        values = output.values() if isinstance(output, Mapping) else output
        if isinstance(values, (tuple, list)) or isinstance(output, Mapping):
            for value in values:
                yield from _tensors_in(value, depth - 1)
        elif hasattr(output, "__dataclass_fields__"):
            yield from _tensors_in(list(vars(output).values()), depth - 1)


def around(monitor: OverlapMonitor, part: int, after: int) -> Callable[..., Any]:
    """A wrapper for ``base.wrap``: a call is a part of the step, and another one follows."""

    def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        monitor.enter(part)
        try:
            return inner(*args, **kwargs)
        finally:
            monitor.enter(after)

    return call
