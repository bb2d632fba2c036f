"""Marks where the parts of a step begin, at hooks of modules and parameters and around the autograd engine's runs.

They read and change no tensor. In a copy of a model, and in compiled code, they do nothing.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
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
from overlap_callbacks.monitor.step_ring import Leave

from . import base

_is_compiling = torch.compiler.is_dynamo_compiling
_is_compiling_or_exporting = torch.compiler.is_compiling  # takes longer
_is_grad_enabled = torch.is_grad_enabled
_now_ns = time.perf_counter_ns


class PassMarks:
    """Marks forward and backward passes for a monitor. A copy, with the model that has it as its hooks, marks nothing.

    A job's own work fills the caches between two marks, so a mark costs what it touches: what it needs is in slots. A
    hook of a tensor that each step makes anew costs twenty times what a mark does. So a backward pass is marked where
    torch hands it to the engine.

    ``idle``: what is not in a pass of a model is waiting, as in a pipeline between micro-batches.
    """

    __slots__ = (
        "__weakref__", "_after_backward", "_has_leaf", "_idle", "_is_backward", "_is_queued", "_is_told", "_monitor",
        "_queue", "leave",
    )  # fmt: skip
    leave: Leave

    def __init__(self, monitor: OverlapMonitor, *, idle: bool = False) -> None:
        self._monitor = monitor
        self._idle = idle
        self._after_backward = WAITING if idle else AFTER_BACKWARD
        self._is_told = False  # a forward pass is marked since the last optimizer step
        self._is_backward = self._is_queued = self._has_leaf = False
        self._queue: Any = torch.autograd.Variable._execution_engine.queue_callback
        monitor.lend_marks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return PassMarks, (_Nobody(),)

    def watch(self, models: Sequence[nn.Module], parameters: Iterable[torch.Tensor] = ()) -> None:
        """Mark the passes of these models; without one the ends of backward passes, by these parameters."""
        for model in models:
            hooks = [model.register_forward_pre_hook(self.forward_begins, prepend=True)]
            if self._idle:
                hooks.append(model.register_forward_hook(self._forward_ended, prepend=True))
            for hook in hooks:
                self._monitor.call_on_close(hook.remove)
        if models:
            self.watch_backward(torch.autograd, "_engine_run_backward")
            parameters = [parameter for model in models for parameter in model.parameters()]
        self.watch_parameters(parameters)

    def watch_backward(self, holder: Any, name: str) -> None:
        """Mark backward passes, after a forward pass that is marked: at a function that runs the engine."""
        inner, this = getattr(holder, name, None), weakref.ref(self)
        if inner is None:  # in another version
            return

        def run(*args: Any, **kwargs: Any) -> Any:
            marks = this()
            if marks is None or not marks._is_told:  # another model's
                return inner(*args, **kwargs)
            if marks._is_backward:
                return marks._recompute(inner, *args, **kwargs)
            if not (kwargs.get("accumulate_grad", True) or marks._idle):  # of a loss made of gradients
                return inner(*args, **kwargs)
            marks._is_backward, marks._is_queued = True, False
            hook = None if marks._has_leaf else marks._watch_first(*args)
            marks.leave((BACKWARD, _now_ns()))
            try:
                return inner(*args, **kwargs)
            finally:
                marks._is_backward = False
                marks._has_leaf &= marks._is_queued
                marks.leave((marks._after_backward, _now_ns()))  # an optimizer may have stepped meanwhile
                if hook is not None:
                    hook.remove()

        undo = base.patch(holder, name, run)
        weakref.finalize(self, undo).atexit = False  # of a monitor that was never closed
        self._monitor.call_on_close(undo)

    def watch_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Mark the ends of backward passes, of compiled and unknown models too: at a parameter that gets a gradient."""
        found = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
        if found:
            self._has_leaf = True
            self._monitor.call_on_close(found[-1].register_hook(self._gradient_came).remove)

    def optimizer_begins(self, *_: Any) -> None:
        if not _is_compiling():
            leave = self.leave
            self._is_told = self._is_queued = False  # an exception may have ended the backward pass
            leave((OPTIMIZER, _now_ns()))

    def forward_begins(self, *_: Any) -> None:
        if not _is_compiling_or_exporting():
            self._is_told = True
            leave = self.leave
            leave((FORWARD if _is_grad_enabled() else EVALUATION, _now_ns()))

    def _forward_ended(self, *_: Any) -> None:
        if _is_grad_enabled() and not _is_compiling_or_exporting():
            self.leave((WAITING, _now_ns()))

    def _watch_first(self, outputs: Any = (), *_: Any) -> Any:
        """Without a parameter whose gradient tells that a backward pass ends, as in FSDP2, that of its first output."""
        first: Any = outputs if isinstance(outputs, torch.Tensor) else next(iter(outputs), None)
        return first.register_hook(self._gradient_came) if getattr(first, "requires_grad", False) else None

    def _recompute(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A backward pass within another, of a checkpoint: its end is not the other's."""
        queued, self._is_queued = self._is_queued, True
        try:
            return inner(*args, **kwargs)
        finally:
            self._is_queued = queued

    def _gradient_came(self, _: torch.Tensor) -> None:
        if not self._is_queued and not _is_compiling():
            queue = self._queue
            self._is_queued = True
            queue(self._gradients_are_computed)

    def _gradients_are_computed(self) -> None:
        # Called when the graph is done, before what was queued later: DDP and FSDP wait there for their collectives.
        leave = self.leave
        leave((WAITING, _now_ns()))
        if not self._is_backward:
            queue = self._queue
            queue(self._backward_ended)

    def _backward_ended(self) -> None:
        leave = self.leave
        self._is_queued = False
        leave((self._after_backward, _now_ns()))


class _Nobody:
    """In place of a copy's monitor."""

    def lend_marks(self, marker: PassMarks) -> None:
        marker.leave = lambda _: None


def around(monitor: OverlapMonitor, part: int, after: int) -> Callable[..., Any]:
    """A wrapper for ``base.wrap``: a call is a part of the step, and another one follows."""

    def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        monitor.enter(part)
        try:
            return inner(*args, **kwargs)
        finally:
            monitor.enter(after)

    return call
