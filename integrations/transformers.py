"""Hugging Face: ``Trainer(callbacks=[OverlapCallback()])``; in Accelerate loops ``attach_accelerate(optimizer)``."""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from overlap_callbacks import OverlapMonitor, Sink
from overlap_callbacks.analysis.dimension_rules import dimension_of
from overlap_callbacks.analysis.step_vectors import INPUT, OPTIMIZER
from overlap_callbacks.analysis.throughput import PRECISIONS
from overlap_callbacks.monitor import EXCEPTION_CLOSE_TIMEOUT_S
from overlap_callbacks.monitor.config import default_sinks
from overlap_callbacks.sinks import FunctionSink

from . import _configuration
from ._options import Options, checked
from ._parts import PassMarks
from .base import (
    TrainerParts,
    build_monitor,
    check_version,
    expect_dtensors,
    flush_sinks,
    lacks,
    missing_of,
    precision_of,
    switched_off,
)
from .pytorch import attach, tell_models

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
    raise ImportError(lacks("accelerate", accelerate.__version__, f"{error.name} as here ({error})")) from error


# Arguments of ``attach`` other than the monitor's options.
_ARGUMENTS = frozenset(inspect.signature(attach).parameters) - {"options"}


class OverlapCallback(TrainerParts, transformers.TrainerCallback):
    """Measures what overlap costs and saves in a ``transformers.Trainer``.

    A step is an optimizer step, from ``on_step_begin`` to ``on_step_end``: all its micro-batches, clipping included.
    Loading its batches, logging, evaluating and saving lie between steps. Steps are numbered by ``state.global_step``,
    so a resumed job continues from there. Each ``train()`` has its own monitor. Reports go to the JSONL record, to the
    W&B run, if there is one (the Trainer's or your own), and to the other loggers of ``report_to``.

    The Trainer does not report exceptions to its callbacks. After one, measuring ends with the next ``train()`` or with
    the process. Call ``close()`` if the process does something else before that.

    Args:
        **options: see ``Options``, e.g. ``every_n_steps=200``. ``run_dir`` defaults to a new folder under
            ``<output_dir>/overlap_runs``.

    Attributes:
        monitor: of the current training; None outside.

    Raises:
        TypeError, ValueError: an option that does not exist, or a value that is not allowed. What may be wrong on one
            rank alone does not raise, unless ``strict=True``: no rank measures, and rank 0 says why.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.close()
        framework = f"transformers {transformers.__version__}"

        def make_sinks(given: list[Sink] | None, folder: Path) -> list[Sink]:
            detail = self._options.get("detail", "short")
            self._loggers = [LoggerSink(one, detail, args, state, control) for one in _loggers()]
            return [*(default_sinks(folder, detail) if given is None else given), *self._loggers]

        self.monitor = build_monitor(
            framework,
            self._options,
            root=args.output_dir or "",
            sinks=make_sinks,
            check=lambda: _check_version(args, state, objects),
            precision=lambda: _precision(args, objects["model"]),
            next_step=getattr(state, "global_step", 0),
            unused="the Trainer has trained no step",
            target=objects.get("model"),
        )
        if self.monitor.active:
            self.monitor.name_groups(dimensions_of(objects["model"].parameters()) | _deepspeed_dimensions(args))
            expect_dtensors(self.monitor, objects["model"].parameters())
            _configuration.tell(self.monitor, lambda: _facts(args, objects["model"]))
            tell_models(self.monitor, [objects["model"]])
            PassMarks(self.monitor).watch([objects["model"]])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pause.close()
        if self.monitor is not None and not self.monitor.in_step:
            self.monitor.step_begin(state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.monitor is not None:  # after each micro-batch but the last
            self.monitor.tell_micro_batch()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._enter(OPTIMIZER)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.monitor is not None:
            self.monitor.enter(INPUT)
            self.monitor.tell_micro_batch()
            # Known with ``include_num_input_tokens_seen``. A mean, because batches differ in length.
            if getattr(state, "num_input_tokens_seen", 0) and "tokens_per_step" not in self._options:
                self.monitor.tokens_per_step = round(state.num_input_tokens_seen / (state.global_step or 1))
            self.monitor.step_end()
            flush_sinks(self._loggers, self.monitor)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # If an iterable data set ends between two micro-batches of a step, the step continues in the next epoch. The
        # evaluation and the checkpoint in between are not part of it.
        self._pause_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "train_runtime" in (logs or ()):  # logged after the last step, while loggers still take the last reports
            self._close()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loggers = []  # they are closed
        self._close()

    def close(self) -> None:
        """End measuring after ``train()`` raised an exception. Safe to call at any time."""
        if self.monitor is not None and self.monitor.in_step:
            self._pause.close()
            self.monitor.abort_step()
        self._close(EXCEPTION_CLOSE_TIMEOUT_S)


class LoggerSink(FunctionSink):
    """Passes reports to a logger of the Trainer's (TensorBoard, MLflow, ...), on the training thread.

    The Trainer's own ``log`` is not used: it would mix reports with the training's rows in ``state.log_history``.
    """

    def __init__(self, logger: Any, detail: str, args: Any, state: Any, control: Any) -> None:
        def write(metrics: dict[str, float], step: int) -> None:
            at_step = copy.copy(state)
            at_step.global_step = step
            logger.on_log(args, at_step, control, logs=metrics)

        super().__init__(write, deferred=True, flush_on_close=False, detail=detail)


def _loggers() -> list[Any]:
    """The loggers of the Trainer that calls a callback, but W&B's, which has a sink of its own.

    Callbacks are not told of each other: the caller's frame has the list.
    """
    kinds = transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK
    taken = tuple([kind for name, kind in kinds.items() if name != "wandb"])
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, transformers.trainer_callback.CallbackHandler):
            return [logger for logger in handler.callbacks if isinstance(logger, taken)]
        frame = frame.f_back
    return []


class AttachOptions(Options, total=False):
    """The options of ``attach`` of the PyTorch adapter."""

    model: nn.Module | Sequence[nn.Module] | None
    pipeline: Any
    sequential: str
    start_step: int
    repeat_step: Callable[[], Any] | None


def attach_accelerate(optimizer: AcceleratedOptimizer, **options: Unpack[AttachOptions]) -> OverlapMonitor:
    """Measure an Accelerate loop, given the optimizer that ``accelerator.prepare`` returned.

    A step lasts from one step of the torch optimizer to the next. Within ``accelerator.accumulate`` Accelerate passes
    only every n-th ``optimizer.step()`` on to it. The rest is as in ``integrations.pytorch.attach``: ``with
    monitor.pause():`` for evaluations, and ``monitor.close()`` after the loop (or ``with attach_accelerate(...):``).

    Args:
        optimizer: if there are several, the one that steps last.
        **options: those of ``integrations.pytorch.attach``, e.g. ``start_step`` or ``every_n_steps=200``.

    Returns:
        The monitor; its ``close()`` removes the hook from the optimizer.

    Raises:
        TypeError: not a prepared optimizer, or an option that does not exist.
        ValueError: a value is not allowed; (``strict=True`` only) DeepSpeed steps the optimizer.
        RuntimeError: (``strict=True`` only) this Accelerate lacks something needed.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            f"optimizer must be what accelerator.prepare gave, got {optimizer!r} (a {type(optimizer).__name__}); "
            f"integrations.pytorch.attach takes a plain torch optimizer"
        )
    checked({name: value for name, value in options.items() if name not in _ARGUMENTS})
    try:
        check_version("accelerate", accelerate.__version__, missing_of(optimizer, "optimizer"))
        # Accelerate's wrapper is an optimizer only by name: it takes no hooks.
        inner = optimizer.optimizer
        if type(optimizer) is not AcceleratedOptimizer or not isinstance(inner, torch.optim.Optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} is stepped by its engine: use integrations.deepspeed.attach with the "
                f"model that accelerator.prepare gave"
            )
    except (ValueError, RuntimeError) as error:
        return switched_off(f"accelerate {accelerate.__version__}", error, strict=options.get("strict"))
    if options.get("precision") is None:
        options["precision"] = _accelerate_precision(optimizer)
    monitor = attach(inner, **options)
    monitor.name_groups(dimensions_of(parameter for group in inner.param_groups for parameter in group["params"]))
    return monitor


def _accelerate_precision(optimizer: AcceleratedOptimizer) -> str | None:
    """The precision of matrix products: Accelerate's mixed precision, else that of the parameters."""
    mixed = getattr(getattr(optimizer, "accelerator_state", None), "mixed_precision", "no")
    if mixed != "no":
        return mixed if mixed in PRECISIONS else None
    first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    return precision_of(getattr(first, "dtype", None))


def _precision(args: Any, model: Any) -> str | None:
    """The precision of matrix products: that of autocast, else of the model's parameters."""
    if getattr(args, "bf16", False) or getattr(args, "fp16", False):
        return "bf16" if args.bf16 else "fp16"
    return precision_of(getattr(model, "dtype", None))


def _facts(args: Any, model: Any) -> dict[str, Any]:
    """The job's configuration: the model, and the trainer's settings."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "optim")
    told = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {**_configuration.of_models([model]), **{name: getattr(v, "value", v) for name, v in told.items()}}


def _check_version(args: Any, state: Any, objects: dict[str, Any]) -> None:
    hooks = [name for name in vars(OverlapCallback) if name.startswith("on_")]
    missing = missing_of(transformers.TrainerCallback, *hooks)
    missing += missing_of(args, "output_dir") + missing_of(state, "global_step")
    missing += missing_of(transformers.trainer_callback, "CallbackHandler")
    missing += missing_of(transformers.integrations.integration_utils, "INTEGRATION_TO_CALLBACK")
    if "model" not in objects:
        missing.append("model among what its callbacks are given")
    check_version("transformers", transformers.__version__, missing)


def dimensions_of(parameters: Iterable[torch.Tensor]) -> dict[str, str]:
    """The dimension of the default group, which DDP, FSDP and any mesh dimension over all ranks use."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return {}
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    named = [(mesh.get_group(name), dimension_of(name)) for mesh in meshes for name in mesh.mesh_dim_names or ()]
    # Without a ParallelismConfig no mesh has names. All ranks are then data-parallel in any case: they divide the data.
    return {str(group.group_name): dimension for group, dimension in named or [(world, "data")]}


def _deepspeed_dimensions(args: Any) -> dict[str, str]:
    """The dimension of DeepSpeed's groups, which have no descriptions. A callback cannot see the engine itself."""
    if getattr(args.distributed_state, "distributed_type", None) != DistributedType.DEEPSPEED:
        return {}
    from deepspeed.utils import groups

    get_data_group = getattr(groups, "_get_sequence_data_parallel_group", None)
    return {get_data_group().group_name: "data"} if get_data_group is not None else {}
