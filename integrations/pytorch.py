"""Your own training loop: ``attach(optimizer)``, with DDP, FSDP or whatever uses ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import OverlapMonitor, _validation
from overlap_callbacks.analysis.dimension_rules import UNKNOWN, WORLD, dimension_of
from overlap_callbacks.gate.arms import Offers
from overlap_callbacks.gate.switches import OverlapSwitch
from overlap_callbacks.instruments import device
from overlap_callbacks.monitor.background.store import Job

from . import _configuration, _pytorch_ddp, _pytorch_fsdp
from ._names import tell_names
from ._options import Options
from ._parts import PassMarks
from ._pytorch_ddp import switchable
from ._pytorch_graphs import GraphReplays
from ._pytorch_race import PlainStep
from .base import Attachments, build_monitor, check_callable, expect_dtensors, is_native

__all__ = ["attach", "switchable"]

_attachments = Attachments("optimizer")


def attach(
    optimizer: torch.optim.Optimizer,
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    pipeline: Any = None,
    sequential: str = "gate",
    start_step: int = 0,
    repeat_step: Callable[[], Any] | None = None,
    **options: Unpack[Options],
) -> OverlapMonitor:
    """Measure the loop that steps ``optimizer``: a step lasts from one ``optimizer.step()`` to the next.

    Gradient accumulation needs no setting: its micro-batches lie between two optimizer steps. Wrap evaluations inside
    the loop in ``with monitor.pause():``. Call ``monitor.close()`` after the loop, or use ``with attach(...):``.

    Wrong values raise: they are the same on all ranks. What may be wrong on one rank alone (the folder of the record,
    the environment, an optimizer that has a monitor already) does not raise, since the other ranks would wait for that
    one: no rank measures, and rank 0 says why.

    Args:
        optimizer: if there are several, the one that steps last.
        model: the model, or a list of them. ``sequential="native"`` needs it; otherwise it helps to find the groups for
            data parallelism.
        pipeline: the schedule of ``torch.distributed.pipelining``, if there is one. Sequential steps then also wait for
            each batch of its sends and receives. Without it these are recorded and not serialised.
        sequential: what makes a step sequential. ``"gate"`` serialises every collective, whoever issues it.
            ``"native"`` uses DDP's or FSDP's own parts instead, as a second and independent way.
        start_step: optimizer steps done before, when a job resumes.
        repeat_step: for ``check_gradients=True``: runs forward and backward once, on a batch that it holds, and nothing
            else. Needs ``model``. All that it changes is put back.
        **options: see ``Options``, e.g. ``every_n_steps=200``.

    Returns:
        The monitor; its ``close()`` leaves optimizer, model and schedule as they were.

    Raises:
        TypeError: an argument that is not an optimizer, model or schedule, or an option that does not exist.
        ValueError: a value is not allowed. With ``strict=True`` also: the model or schedule cannot be made sequential
            in this way, the optimizer takes no step hooks (PostLocalSGDOptimizer), or it has a monitor already.
        RuntimeError: (``strict=True`` only) called before ``init_process_group``, or another rank cannot measure.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r} (a {type(optimizer).__name__})")
    models = _as_list(model)
    check_callable("repeat_step", repeat_step)
    if pipeline is not None:
        from . import _pytorch_pipelining as pipelining

        pipelining.check_type(pipeline)
    step = _validation.count("start_step", start_step, minimum=0)
    switch: OverlapSwitch | None = None
    native = is_native(sequential)
    if native and not models:
        raise ValueError("sequential='native' needs the model: attach(optimizer, model=model, sequential='native')")

    def check() -> None:
        nonlocal switch
        _check_ready(optimizer, strict=bool(options.get("strict")))
        switch = _switch(models) if native else None
        if pipeline is not None:
            pipelining.check_order(pipeline)

    monitor = build_monitor(
        f"pytorch {torch.__version__}",
        options,
        check=check,
        next_step=step + 1,
        unused=f"`optimizer.step()` was never called on the attached {type(optimizer).__name__}",
        target=optimizer,
    )
    if not monitor.active:
        return monitor

    accelerator, replays = device.accelerator(), GraphReplays(monitor)

    # The current step began before we attached. The first step with a known start is the next one.
    def after_step() -> None:
        if accelerator.is_initialized() and accelerator.is_capturing():
            # Nothing was trained, and an event recorded or queried here would invalidate the user's graph. The open
            # step continues, but does not count.
            replays.watch()
            with monitor.pause():
                return
        replays.stop()
        if monitor.in_step:
            monitor.step_end()
        monitor.step_begin(max(step, monitor.last_step) + 1)

    monitor.name_groups(_dimensions(optimizer, models, pipeline))
    _configuration.tell(
        monitor, lambda: _configuration.of_optimizer(optimizer), lambda: _configuration.of_models(models)
    )
    expect_dtensors(monitor, (parameter for group in optimizer.param_groups for parameter in group["params"]))
    if switch is not None:
        monitor.use_native(switch)
    tell_models(monitor, models)
    if repeat_step is not None:
        monitor.offer_repetition(PlainStep(repeat_step, models, optimizer, pipeline))
    if pipeline is not None:
        monitor.call_on_close(pipelining.wait_for_batches(monitor))
    monitor.call_on_close(replays.stop)
    monitor.call_on_close(optimizer.register_step_post_hook(monitor.step_hook(after_step)).remove)
    marks = PassMarks(monitor, idle=pipeline is not None)
    monitor.call_on_close(optimizer.register_step_pre_hook(marks.optimizer_begins).remove)
    marks.watch(models, (parameter for group in optimizer.param_groups for parameter in group["params"]))
    _attachments.add(optimizer, monitor)
    return monitor


def tell_models(monitor: OverlapMonitor, models: Sequence[nn.Module]) -> None:
    """Offer the switches of these models' DDP and FSDP, and name FSDP's streams that only compute."""
    monitor.offer_switches(_arms_of(models))
    monitor.name_computing_streams(_pytorch_fsdp.CopyStreams(_modules(models)))
    tell_names(monitor, models)


def _arms_of(models: Sequence[nn.Module]) -> Offers:
    """The switches that DDP and FSDP offer to arms."""
    if not models:
        return {}  # each arm then reports what it needs
    return {
        "native": lambda arm: _switch(models),
        "fsdp2_prefetch": lambda arm: _pytorch_fsdp.PrefetchSwitch(models, arm),
        "fsdp2_reshard": lambda arm: _pytorch_fsdp.ReshardSwitch(models, arm),
        "fsdp2_shared_reduce_scatter": lambda arm: _pytorch_fsdp.SharedReduceScatterSwitch(models),
    }


def _as_list(model: Any) -> list[nn.Module]:
    models = [] if model is None else list(model) if isinstance(model, (list, tuple)) else [model]
    for item in models:
        if not isinstance(item, nn.Module):
            given = f"{item!r} (a {type(item).__name__})"
            raise TypeError(f"model must be a torch.nn.Module or a list of them, got {given}")
    return models


def _check_ready(optimizer: torch.optim.Optimizer, *, strict: bool) -> None:
    # Of one rank the parts of steps are timed.
    if Job.current() is None and (strict or Job.alone() is None):
        raise RuntimeError("attach(optimizer) was called before torch.distributed.init_process_group: call it after")
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):  # a wrapper, which is an optimizer only by name
        raise ValueError(
            f"optimizer must take step hooks, which a {type(optimizer).__name__} does not: give the torch optimizer "
            "within it (for Accelerate's: integrations.transformers.attach_accelerate)"
        )
    _attachments.check_free(optimizer)


def _switch(models: Sequence[nn.Module]) -> OverlapSwitch:
    """The switch for these models' DDP or FSDP modules. Raises a ``ValueError`` if none works."""
    ddp = [m for m in _modules(models) if isinstance(m, DistributedDataParallel)]
    fsdp = [m for m in _modules(models) if isinstance(m, (FSDPModule, FullyShardedDataParallel))]
    if bool(ddp) == bool(fsdp):
        which = "both" if ddp else "neither"
        raise ValueError(
            f"sequential='native' needs a model with DDP or FSDP in it, and this one has {which}: use 'gate'"
        )
    return _pytorch_ddp.DdpBucketWait(ddp) if ddp else _pytorch_fsdp.FsdpStreams(fsdp)


def _modules(models: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for model in models:
        yield from model.modules()


def _dimensions(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], pipeline: Any) -> dict[str, str]:
    """Dimensions of groups without descriptions; above all the default group's, which a mesh over all ranks uses."""
    known: dict[str, str] = {}

    def learn(group: dist.ProcessGroup, dimension: str) -> None:
        if dimension != UNKNOWN and dimension_of(group.group_desc) in (WORLD, UNKNOWN):
            known.setdefault(group.group_name, dimension)

    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for mesh in {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}:
        for name in mesh.mesh_dim_names or ():
            learn(mesh.get_group(name), dimension_of(f"mesh_{name}"))
    modules = list(_modules(models))
    for group in (*_pytorch_ddp.data_groups(modules), *_pytorch_fsdp.data_groups(modules)):
        learn(group, "data")
    if pipeline is not None:
        from . import _pytorch_pipelining as pipelining

        for group in pipelining.groups_of(pipeline):
            learn(group, "pipeline")
    return known
