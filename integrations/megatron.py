"""Megatron-core: ``attach(model_chunks, optimizer)``; Megatron-LM: ``hook_pretrain()`` before ``pretrain(...)``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from overlap_callbacks import OverlapMonitor, _validation

from ._megatron_core import MegatronCore
from ._megatron_lm import PretrainHook
from ._megatron_steps import checked_chunks, open_steps
from .base import check_names, switched_off, wrap

_in_use: list[str] = []  # which of the two functions here has a monitor in this process, if any


def attach(
    model_chunks: Any, optimizer: Any, *, start_step: int = 0, sequential: str = "gate", **options: Any
) -> OverlapMonitor:
    """Measure the loop that steps ``optimizer``: a step lasts from one ``optimizer.step()`` to the next.

    Micro-batches and pipeline schedules need no setting. A step that the optimizer skipped, for an overflow, does not
    count. Put evaluations within the loop into ``with monitor.pause():``. Call ``monitor.close()`` after the loop, or
    use ``with attach(...):``.

    Args:
        model_chunks: what the pipeline schedule is given as ``model``: a module or a list of them.
        optimizer: what ``get_megatron_optimizer`` returned. None if you mark the steps yourself, with
            ``monitor.step()``.
        start_step: optimizer steps done before, when a job resumes.
        sequential: what makes a step sequential. ``"gate"`` waits for every collective and batch of sends and receives.
            ``"native"`` switches off ``overlap_grad_reduce``, ``overlap_param_gather`` and ``overlap_p2p_comm``, those
            that the job was built with.
        **options: keyword arguments of ``Schedule`` and ``OverlapMonitor``, e.g. ``every_n_steps=200``.

    Returns:
        The monitor; its ``close()`` puts everything back.

    Raises:
        ImportError: Megatron-core is not installed, or lacks what is needed here.
        TypeError: not a model or a Megatron optimizer, or an option that does not exist.
        RuntimeError: (``strict=True`` only) model parallelism is not initialised, or Megatron has a monitor already.
        ValueError: (``strict=True`` only) a value is not allowed, or Megatron's switches are refused for this job.
    """
    core = MegatronCore.load()
    if optimizer is not None and not isinstance(optimizer, core.optimizer):
        raise TypeError(f"optimizer must be Megatron's, of get_megatron_optimizer(), got a {type(optimizer).__name__}")
    chunks = checked_chunks(model_chunks)
    check_names(options)
    try:
        _check_free()
        step = _validation.count("start_step", start_step, minimum=0)
        steps = open_steps(core, chunks, sequential, options, by_hand=optimizer is None)
    except (TypeError, ValueError, RuntimeError) as error:
        return switched_off(core.name, error, strict=options.get("strict"))
    monitor = steps.monitor
    if not monitor.active:
        return monitor
    _in_use.append("attach()")
    monitor.call_on_close(_in_use.clear)
    if optimizer is None:
        return monitor

    def step_and_mark(optimizer_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal step
        outcome = optimizer_step(*args, **kwargs)
        if monitor.in_step:
            steps.end(skipped=outcome[0] is False)
        step += 1
        steps.begin(step)
        return outcome

    # On the instance: the class's method also serves the optimizers within a chained one. A torch hook on the inner
    # optimizer would run before the parameters are gathered, and not at all after an overflow.
    monitor.call_on_close(wrap(optimizer, "step", step_and_mark))
    return monitor


def hook_pretrain(*, sequential: str = "gate", **options: Any) -> None:
    """Measure the next ``pretrain(...)`` of Megatron-LM: call this once before it, on all ranks.

    A step is a call of ``train_step``. Evaluation and checkpoints lie between steps. When training ends, measuring ends
    and everything is put back. Rank 0 writes the record. The W&B run that Megatron-LM opens on the last rank gets the
    reports.

    Args:
        sequential: as in ``attach``.
        **options: as in ``attach``.

    Raises:
        ImportError: Megatron-LM or Megatron-core cannot be imported, or lacks what is needed here.
        TypeError: an option that does not exist.
        RuntimeError: (``strict=True`` only) called twice, or Megatron has a monitor already.
    """
    check_names(options)
    core = MegatronCore.load()
    try:
        _check_free()
    except RuntimeError as error:
        switched_off(core.name, error, strict=options.get("strict"))
        return
    try:
        training = importlib.import_module("megatron.training.training")
        PretrainHook(core, training, sequential, options, _in_use.clear).install()
    except (ImportError, AttributeError) as error:
        raise ImportError(f"hook_pretrain needs Megatron-LM, with megatron.training.training: {error}") from error
    _in_use.append("hook_pretrain()")


def _check_free() -> None:
    if _in_use:
        raise RuntimeError(f"Megatron has a monitor already, of {_in_use[0]}: one at a time, close() that one first")
