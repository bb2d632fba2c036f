"""Hugging Face: ``Trainer(callbacks=[OverlapCallback()])``; in Accelerate loops ``attach_accelerate(optimizer)``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from overlap_callbacks import OverlapMonitor
from overlap_callbacks.analysis.dimension_rules import dimension_of
from overlap_callbacks.monitor.monitor import EXCEPTION_CLOSE_TIMEOUT_S

from . import _versions
from .base import build_monitor, check_names, switched_off
from .pytorch import attach

try:
    import accelerate
    import transformers
except ImportError:
    raise ImportError(
        "overlap_callbacks.integrations.transformers needs Transformers and Accelerate: "
        "pip install 'overlap-callbacks[transformers]'"
    ) from None
try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        _versions.lacks("accelerate", accelerate.__version__, f"{error.name} as here ({error})", _versions.ACCELERATE)
    ) from error


class OverlapCallback(transformers.TrainerCallback):
    """Measures what overlap costs and saves in a ``transformers.Trainer``.

    A step is an optimizer step, from ``on_step_begin`` to ``on_step_end``: all its micro-batches, clipping included.
    Loading its batches, logging, evaluating and saving lie between steps. It is numbered by ``state.global_step``, so a
    resumed job goes on where it was.

    Each ``train()`` has a monitor of its own. Reports go to the JSONL record and to the W&B run, if there is one (the
    Trainer's or your own).

    The Trainer does not tell its callbacks of an exception. Measuring ends with the next ``train()``, or with the
    process; call ``close()`` where the process goes on with something else.

    Args:
        **options: keyword arguments of ``Schedule`` and ``OverlapMonitor``, e.g. ``every_n_steps=200``. ``run_dir``
            defaults to a new folder under ``<output_dir>/overlap_runs``.

    Attributes:
        monitor: of the training under way; None outside.

    Raises:
        TypeError: an option that does not exist.
    """

    def __init__(self, **options: Any) -> None:
        check_names(options)
        self.monitor: OverlapMonitor | None = None
        self._options = options
        self._pause = contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.close()
        framework = f"transformers {transformers.__version__}"
        self.monitor = build_monitor(
            framework, self._options, root=args.output_dir or "", check=lambda: _check_version(args, state, objects)
        )
        if self.monitor.active:
            self.monitor.name_groups(_dimensions(objects["model"].parameters()) | _deepspeed_dimensions(args))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pause.close()
        if self.monitor is not None and not self.monitor.in_step:
            self.monitor.step_begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.monitor is not None:
            # Known with ``include_num_input_tokens_seen``; a mean, since batches differ in length.
            if getattr(state, "num_input_tokens_seen", 0) and "tokens_per_step" not in self._options:
                self.monitor.tokens_per_step = round(state.num_input_tokens_seen / (state.global_step or 1))
            self.monitor.step_end()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Where an iterable data set ends amid the micro-batches of a step, the step goes on in the next epoch. The
        # evaluation and the checkpoint in between are no part of it.
        if self.monitor is not None and self.monitor.in_step:
            self._pause.enter_context(self.monitor.pause())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()

    def close(self) -> None:
        """End measuring after an exception came out of ``train()``. Safe to call at any time."""
        if self.monitor is not None and self.monitor.in_step:
            self._pause.close()
            self.monitor.abort_step()
        self._close(EXCEPTION_CLOSE_TIMEOUT_S)

    def _close(self, timeout_s: float | None = None) -> None:
        self._pause.close()
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.close(timeout_s)


def attach_accelerate(optimizer: AcceleratedOptimizer, **options: Any) -> OverlapMonitor:
    """Measure an Accelerate loop, by the optimizer that ``accelerator.prepare`` gave.

    A step reaches from one step of the torch optimizer to the next; within ``accelerator.accumulate`` Accelerate lets
    only every n-th ``optimizer.step()`` through to it. All else is as in ``integrations.pytorch.attach``: put ``with
    monitor.pause():`` around an evaluation, and ``monitor.close()`` (or ``with attach_accelerate(...):``) around the
    loop's end.

    Args:
        optimizer: the one that steps last, where there are several.
        **options: those of ``integrations.pytorch.attach``, e.g. ``start_step`` or ``every_n_steps=200``.

    Returns:
        The monitor; its ``close()`` takes the hook off the optimizer.

    Raises:
        TypeError: not a prepared optimizer, one that DeepSpeed steps, or an option that does not exist.
        ValueError: (``strict=True`` only) an option's value is not allowed.
        RuntimeError: (``strict=True`` only) this Accelerate lacks something needed.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            f"optimizer must be what accelerator.prepare gave, got {optimizer!r} (a {type(optimizer).__name__}); "
            f"integrations.pytorch.attach takes a plain torch optimizer"
        )
    try:
        missing = _versions.missing_of(optimizer, "optimizer")
        _versions.check("accelerate", accelerate.__version__, _versions.ACCELERATE, missing)
    except RuntimeError as error:
        if options.get("strict"):
            raise
        return switched_off(f"accelerate {accelerate.__version__}", error)
    # Accelerate's wrapper is an optimizer by name only: it has no hooks.
    inner = optimizer.optimizer
    if type(optimizer) is not AcceleratedOptimizer or not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is stepped by its engine: use integrations.deepspeed.attach with the model "
            f"that accelerator.prepare gave"
        )
    monitor: OverlapMonitor = attach(inner, **options)
    monitor.name_groups(_dimensions(parameter for group in inner.param_groups for parameter in group["params"]))
    return monitor


def _check_version(args: Any, state: Any, objects: dict[str, Any]) -> None:
    hooks = [name for name in vars(OverlapCallback) if name.startswith("on_")]
    missing = _versions.missing_of(transformers.TrainerCallback, *hooks)
    missing += _versions.missing_of(args, "output_dir") + _versions.missing_of(state, "global_step")
    if "model" not in objects:
        missing.append("model among what its callbacks are given")
    _versions.check("transformers", transformers.__version__, _versions.TRANSFORMERS, missing)


def _dimensions(parameters: Iterable[torch.Tensor]) -> dict[str, str]:
    """What the default group serves: DDP and FSDP have it, and any mesh dimension over all ranks."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return {}
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    named = [(mesh.get_group(name), dimension_of(name)) for mesh in meshes for name in mesh.mesh_dim_names or ()]
    # Without a ParallelismConfig no mesh has names, and what all ranks have in common is the data they divide.
    return {str(group.group_name): dimension for group, dimension in named or [(world, "data")]}


def _deepspeed_dimensions(args: Any) -> dict[str, str]:
    """What DeepSpeed's groups serve, which it gives no descriptions; the engine itself is out of a callback's sight."""
    if getattr(args.distributed_state, "distributed_type", None) != DistributedType.DEEPSPEED:
        return {}
    from deepspeed.utils import groups

    over_data = getattr(groups, "_get_sequence_data_parallel_group", None)
    return {over_data().group_name: "data"} if over_data is not None else {}
