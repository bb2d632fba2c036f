"""Runs DDP without overlap by its own means: the backward pass waits for each bucket where DDP issues it.

Without a communication hook the reducer calls ``allreduce`` of its process group. That group can be replaced between
steps by one that passes the call on and waits. The reducer still decides on buckets, operands and division. The reducer
itself holds a communication hook, so this cannot be replaced: the user must register it through ``switchable``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.gate.switches import OverlapSwitch, RefusedError
from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.clocks import StepClock

from .base import missing_of, torch_lacks

# hook(state, bucket), as DDP calls it.
Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


def switchable(hook: Hook) -> Hook:
    """A communication hook that can wait, for ``attach(..., sequential="native")``.

    Register the result: ``model.register_comm_hook(state, switchable(fp16_compress_hook))``. It does what ``hook``
    does. In sequential steps it also waits for the bucket's future before it returns.

    Args:
        hook: as for ``DistributedDataParallel.register_comm_hook``.

    Raises:
        TypeError: ``hook`` is not callable.
    """
    if not callable(hook):
        raise TypeError(f"hook must be callable, got {hook!r} (a {type(hook).__name__})")

    @functools.wraps(hook)  # DDP reads a hook's name and signature
    def waiting(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if not switch.sequential:
            return hook(state, bucket)
        with _between_compute(switch.compute):
            future = hook(state, bucket)
            future.wait()
        switch.waited += 1
        return future

    waiting.overlap_switch = switch = _HookSwitch()  # type: ignore[attr-defined]
    return waiting


@contextlib.contextmanager
def _between_compute(compute: device.Stream | None) -> Iterator[None]:
    """Order what is issued between what the compute stream has so far and what it gets later.

    DDP reduces on the stream on which it was created, which Lightning gives a stream of its own.
    """
    issuing = None if compute is None else device.accelerator().current_stream(compute.device)
    if compute is not None and issuing is not None and issuing != compute:
        issuing.wait_stream(compute)
        yield
        compute.wait_stream(issuing)
    else:
        yield


class _HookSwitch:
    """Whether a hook waits, the number of buckets that it has waited for, and the stream that waits with it."""

    def __init__(self) -> None:
        self.sequential = False
        self.waited = 0
        self.compute: device.Stream | None = None


class WaitingGroup(dist.ProcessGroup):
    """Passes the reducer's calls on to another process group, and waits for all-reduces."""

    def __init__(self, group: dist.ProcessGroup, compute: device.Stream | None) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group, self._compute = group, compute
        self.waited = 0

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        with _between_compute(self._compute):
            work = self._group.allreduce(tensors, options)
            work.wait()
        self.waited += 1
        return work

    def broadcast(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._group.broadcast(tensors, options)  # the buckets' new order, after the first backward pass

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return str(self._group.name())


class DdpBucketWait(OverlapSwitch):
    """Waits for every bucket of these models (all DDP modules of the job) where it is issued.

    Raises a ValueError with the reason if a model's reduction cannot be made to wait, or cannot be restored.
    """

    name = "ddp_bucket_wait"

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = models
        self._hooks = [switch for model in models if (switch := _switch_of(model)) is not None]
        self._groups: list[WaitingGroup] = []
        self._had_no_effect = False  # a sequential step waited for no bucket

    def disable(self) -> None:
        if self._had_no_effect:
            raise RefusedError(
                "no bucket of the DDP models was waited for in a sequential step: the switch has no effect [OC137]"
            )
        compute = StepClock().compute_stream
        for model in self._models:
            if not model._comm_hooks:
                group = WaitingGroup(model.process_group, compute)
                self._groups.append(group)
                model.reducer._update_process_group(group)
        for switch in self._hooks:
            switch.sequential, switch.waited, switch.compute = True, 0, compute

    def restore(self) -> None:
        switched = bool(self._groups) or any(switch.sequential for switch in self._hooks)
        waited = sum(group.waited for group in self._groups) + sum(switch.waited for switch in self._hooks)
        for model in self._models:
            if not model._comm_hooks:
                model.reducer._update_process_group(model.process_group)
        for switch in self._hooks:
            switch.sequential, switch.compute = False, None
        self._groups = []
        self._had_no_effect = switched and not waited


def _switch_of(model: DistributedDataParallel) -> _HookSwitch | None:
    """The switch of a model's hook; None if the model has no hook."""
    missing = missing_of(cast(Any, dist).Reducer, "_update_process_group")
    missing += missing_of(model, "_comm_hooks", "_use_python_reducer", "process_group")
    if getattr(model, "logger", None) is not None:  # DDP with the Python reducer has none
        missing += missing_of(model.logger, "_get_ddp_logging_data")
    if missing:
        raise ValueError(
            f"sequential='native' for DDP needs torch 2.8 or later, found {torch.__version__}: use 'gate' "
            f"({torch_lacks(' and no '.join(missing))})"
        )
    if not hasattr(model, "reducer") or model._use_python_reducer:
        raise ValueError("sequential='native' needs DDP's own reducer, which this model does not have: use 'gate'")
    switches = [getattr(hook, "overlap_switch", None) for hook, _ in model._comm_hooks]
    if None in switches:
        names = [getattr(hook, "__qualname__", repr(hook)) for hook, _ in model._comm_hooks]
        raise ValueError(
            f"sequential='native' cannot reach the communication hook {', '.join(names)}: register it as "
            f"model.register_comm_hook(state, switchable(hook)), or use 'gate'"
        )
    if switches:
        return switches[0]
    builtin = cast(Any, model.logger)._get_ddp_logging_data().strs_map.get("comm_hook")
    if builtin:
        raise ValueError(f"sequential='native' cannot reach DDP's builtin communication hook {builtin}: use 'gate'")
    return None


def data_groups(models: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """The process groups of those that are DDP models."""
    return [model.process_group for model in models if isinstance(model, DistributedDataParallel)]
