"""A training loop of one's own, with DDP or anything else that communicates through torch.distributed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import OverlapMonitor, _validation
from overlap_callbacks.analysis.dimension_rules import UNKNOWN, WORLD, dimension_of
from overlap_callbacks.gate.native import OverlapSwitch

from . import _ddp, _fsdp
from ._ddp import switchable
from .base import build_monitor, switched_off

__all__ = ["attach", "switchable"]

_FORMS = ("gate", "native")

_attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def attach(
    optimizer: torch.optim.Optimizer,
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    pipeline: Any = None,
    sequential: str = "gate",
    start_step: int = 0,
    **options: Any,
) -> OverlapMonitor:
    """Measure the loop that steps ``optimizer``: a step reaches from one ``optimizer.step()`` to the next.

    Gradient accumulation needs nothing: its micro-batches lie between two optimizer steps. Put ``with
    monitor.pause():`` around an evaluation within the loop, and ``monitor.close()`` (or ``with attach(...):``) around
    the loop's end.

    What is wrong with a parameter's value, or comes at the wrong time, costs the measuring and not the job: it is said
    once, and the monitor comes back switched off. With ``strict=True`` it is raised.

    Args:
        optimizer: the one that steps last, where there are several.
        model: the model, or a list of them. Needed for ``sequential="native"``; otherwise it only helps to tell which
            process groups serve data parallelism.
        pipeline: the schedule of ``torch.distributed.pipelining``, where there is one: sequential steps then wait for
            each batch of its sends and receives too, which are otherwise recorded and left alone.
        sequential: what makes a step sequential: ``"gate"``, which takes every collective of whatever origin, or
            ``"native"``, DDP's or FSDP's own parts, as a second and independent way.
        start_step: optimizer steps done before, when a job resumes.
        **options: keyword arguments of ``Schedule`` and ``OverlapMonitor``, e.g. ``every_n_steps=200``.

    Returns:
        The monitor; its ``close()`` leaves optimizer, model and schedule as they were.

    Raises:
        TypeError: not an optimizer, model or schedule, or an option that does not exist.
        ValueError: (``strict=True`` only) a value is not allowed, a model or schedule cannot be made sequential in this
            way, or the optimizer is attached to already.
        RuntimeError: (``strict=True`` only) called before ``init_process_group``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r} (a {type(optimizer).__name__})")
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise TypeError(
            f"optimizer must take step hooks, which a {type(optimizer).__name__} does not: give the torch optimizer "
            "within it (for Accelerate's: integrations.transformers.attach_accelerate)"
        )
    models = _as_list(model)
    if pipeline is not None:
        from . import _pipelining

        _pipelining.check_type(pipeline)
    framework = f"pytorch {torch.__version__}"
    monitor = build_monitor(framework, options)
    if not monitor.active:
        return monitor
    try:
        step = _validation.count("start_step", start_step, minimum=0)
        _check_time(optimizer)
        form = _native_form(sequential, models)
        if pipeline is not None:
            _pipelining.check_order(pipeline)
    except (TypeError, ValueError, RuntimeError) as error:
        if options.get("strict"):
            raise
        return switched_off(framework, error)

    # The step that is under way when we attach began before us, so the first one with a known start is the next.
    def after_step(*_: Any) -> None:
        nonlocal step
        if monitor.in_step:
            monitor.step_end()
        step += 1
        monitor.step_begin(step)

    monitor.name_groups(_dimensions(optimizer, models, pipeline))
    if form is not None:
        monitor.use_native(form)
    if pipeline is not None:
        monitor.call_on_close(_pipelining.wait_for_batches(monitor))
    # Out of a compiled optimizer.step(): Dynamo would trace on into the monitor, and break the graph there.
    # It costs no import: torch.optim loads Dynamo when an optimizer is made.
    hook: Any = torch.compiler.disable(after_step)
    monitor.call_on_close(optimizer.register_step_post_hook(hook).remove)
    _attached.add(optimizer)
    monitor.call_on_close(lambda: _attached.discard(optimizer))
    return monitor


def _as_list(model: Any) -> list[nn.Module]:
    models = [] if model is None else list(model) if isinstance(model, (list, tuple)) else [model]
    for found in models:
        if not isinstance(found, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module or a list of them, got {found!r} (a {type(found).__name__})"
            )
    return models


def _check_time(optimizer: torch.optim.Optimizer) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("attach(optimizer) was called before torch.distributed.init_process_group: call it after")
    if optimizer in _attached:
        raise ValueError("optimizer is attached to already: close() that monitor first, or use it")


def _native_form(sequential: str, models: Sequence[nn.Module]) -> OverlapSwitch | None:
    if sequential not in _FORMS:
        allowed = " or ".join(map(repr, _FORMS))
        raise ValueError(f"sequential must be {allowed}, got {sequential!r} (a {type(sequential).__name__})")
    if sequential == "gate":
        return None
    if not models:
        raise ValueError("sequential='native' needs the model: attach(optimizer, model=model, sequential='native')")
    ddp = [m for m in _modules(models) if isinstance(m, DistributedDataParallel)]
    fsdp = [m for m in _modules(models) if isinstance(m, (FSDPModule, FullyShardedDataParallel))]
    if bool(ddp) == bool(fsdp):
        found = "both" if ddp else "neither"
        raise ValueError(
            f"sequential='native' needs a model with DDP or FSDP in it, and this one has {found}: use 'gate'"
        )
    form: OverlapSwitch = _ddp.DdpWaits(ddp) if ddp else _fsdp.FsdpStreams(fsdp)
    return form


def _modules(models: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for model in models:
        yield from model.modules()


def _dimensions(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], pipeline: Any) -> dict[str, str]:
    """What process groups serve that do not say so themselves: above all the default group, if it is all of a mesh."""
    known: dict[str, str] = {}

    def learn(group: dist.ProcessGroup, dimension: str) -> None:
        if dimension != UNKNOWN and dimension_of(group.group_desc) in (WORLD, UNKNOWN):
            known.setdefault(group.group_name, dimension)

    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for mesh in {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}:
        for name in mesh.mesh_dim_names or ():
            learn(mesh.get_group(name), dimension_of(f"mesh_{name}"))
    for group in (*_ddp.data_groups(_modules(models)), *_fsdp.data_groups(_modules(models))):
        learn(group, "data")
    if pipeline is not None:
        from . import _pipelining

        for group in _pipelining.groups_of(pipeline):
            learn(group, "pipeline")
    return known
