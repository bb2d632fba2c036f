"""Megatron-core: ``attach(model_chunks, optimizer)``; Megatron-LM: ``hook_pretrain()`` before ``pretrain(...)``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from overlap_callbacks import OverlapMonitor, Sink, WandbSink, _validation
from overlap_callbacks.monitor import EXCEPTION_CLOSE_TIMEOUT_S
from overlap_callbacks.monitor.background.store import next_prefix
from overlap_callbacks.sinks import JsonlSink

from . import _configuration
from ._megatron_core import MegatronCore
from ._megatron_reports import LAST_REPORT_S, Inbox, Outbox
from ._megatron_switches import Switches
from .base import MakeSinks, build_monitor, check_names, is_native, precision_of, switched_off, wrap

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
    chunks = _checked_chunks(model_chunks)
    check_names(options)
    try:
        _check_free()
        step = _validation.count("start_step", start_step, minimum=0)
        steps = _open(core, chunks, sequential, options, by_hand=optimizer is None)
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
        _PretrainHook(core, training, sequential, options).install()
    except (ImportError, AttributeError) as error:
        raise ImportError(f"hook_pretrain needs Megatron-LM, with megatron.training.training: {error}") from error
    _in_use.append("hook_pretrain()")


# -- what both have in common


class _Steps:
    """Marks steps: for a monitor, and for Megatron's switches if they make steps sequential."""

    def __init__(self, monitor: OverlapMonitor) -> None:
        self.monitor = monitor
        self.switches: Switches | None = None  # once they are in use

    def begin(self, step: int) -> None:
        self.monitor.step_begin(step)
        if self.switches is not None and self.monitor.is_turned(self.switches):
            self.switches.gather_parameters()

    def end(self, *, skipped: bool) -> None:
        if skipped:
            self.monitor.skip_step("its gradients overflowed")
        self.monitor.step_end()


def _check_free() -> None:
    if _in_use:
        raise RuntimeError(f"Megatron has a monitor already, of {_in_use[0]}: one at a time, close() that one first")


def _checked_chunks(model: Any) -> list[Any]:
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        raise TypeError(f"model_chunks must be a module or a list of modules, got a {type(model).__name__}")
    return chunks


def _open(
    core: MegatronCore,
    chunks: list[Any],
    sequential: str,
    options: dict[str, Any],
    by_hand: bool = False,
    sinks: MakeSinks | None = None,
) -> _Steps:
    """A monitor that knows the job's groups and switches, and waits for its batches of sends and receives."""
    if not core.groups.model_parallel_is_initialized():
        raise RuntimeError("model parallelism is not initialised: call initialize_model_parallel() first")
    switches = Switches(core.ddp, chunks, by_hand) if is_native(sequential) else None
    config = getattr(chunks[0], "config", None)
    monitor = build_monitor(core.name, options, sinks=sinks, precision=lambda: _precision(config))
    steps = _Steps(monitor)

    def make_switches(arm: object = None) -> Switches:
        steps.switches = steps.switches or Switches(core.ddp, chunks, by_hand)
        return steps.switches

    if monitor.active:
        monitor.name_groups(core.dimensions(config))
        monitor.tell_model_chunks(len(chunks))
        _configuration.tell(monitor, lambda: _configuration.of_megatron(chunks))
        if switches is not None:
            steps.switches = switches
            monitor.use_native(switches)
        monitor.offer_switches({"native": make_switches})
        monitor.call_on_close(wrap(core.communicator, "_communicate", _waiting(monitor)))
    return steps


def _precision(config: Any) -> str | None:
    """That of matrix products, by Megatron's configuration of the model; None without one."""
    if config is None:
        return None
    kinds = (("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"))
    chosen = next((name for attribute, name in kinds if getattr(config, attribute, None)), None)
    return chosen or precision_of(getattr(config, "params_dtype", None))


def _waiting(monitor: OverlapMonitor) -> Callable[..., Any]:
    """For ``_communicate``, which posts a batch of sends and receives: sequential steps wait once all are posted.

    This cannot hang: the stages go through their batches in step, and each one's k-th forward (or backward) batch is
    the other side of its neighbour's. Megatron itself waits there if ``overlap_p2p_comm`` is off.
    """

    def works_of(result: Any) -> list[Any]:
        works = result[2]  # a list or a dictionary; None if Megatron itself has waited
        return list(works.values()) if isinstance(works, dict) else list(works or ())

    def post(communicate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result, handed_on = monitor.post(lambda: communicate(*args, **kwargs), works_of)
        from_previous, from_next, works = result
        if works:
            works = dict(zip(works, handed_on, strict=True)) if isinstance(works, dict) else handed_on
        return from_previous, from_next, works

    return post


# -- Megatron-LM


class _PretrainHook:
    """Wraps Megatron-LM's ``train`` and ``train_step`` until ``train`` ends.

    The monitor is built at the first step, because the model does not exist before.

    Args:
        core: what is used of Megatron-core.
        training: the module that holds both functions.
        sequential: as the user gave it.
        options: as the user gave them.
    """

    def __init__(self, core: MegatronCore, training: Any, sequential: str, options: dict[str, Any]) -> None:
        self._core = core
        self._training = training
        self._sequential = sequential
        self._options = options
        self._steps: _Steps | None = None
        self._inbox: Inbox | None = None
        self._step = -1
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Wrap both, in their module: ``pretrain`` looks them up there whenever it calls them.

        Raises:
            AttributeError: the module lacks one of them. Then none is wrapped.
        """
        _ = self._training.train, self._training.train_step
        self._undo = [wrap(self._training, "train", self._train), wrap(self._training, "train_step", self._train_step)]

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        timeout_s = EXCEPTION_CLOSE_TIMEOUT_S
        try:
            result = train(*args, **kwargs)
            timeout_s = LAST_REPORT_S
            return result
        finally:
            for undo in self._undo:
                undo()
            _in_use.clear()
            if self._steps is not None:
                self._steps.monitor.close(timeout_s)
            if self._inbox is not None:
                self._inbox.look(wait_s=timeout_s)

    def _train_step(self, train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._steps is None:
            self._steps = self._open(inspect.signature(train_step).bind(*args, **kwargs).arguments["model"])
        iteration = kwargs.get("iteration")  # newer versions pass it, so that numbers survive a resume
        self._step = self._step + 1 if iteration is None else iteration
        self._steps.begin(self._step)
        try:
            outcome = train_step(*args, **kwargs)
        except BaseException:
            self._steps.monitor.abort_step()
            raise
        self._steps.end(skipped=bool(outcome[1]))
        if self._inbox is not None:
            self._inbox.look()
        return outcome

    def _open(self, model: Any) -> _Steps:
        """Build the monitor. Unless strict, errors do not stop the training."""
        prefix = f"{next_prefix()}/megatron"
        strict = self._options.get("strict")

        def with_outbox(given: list[Sink] | None, folder: Path) -> list[Sink]:
            return [*(given or [JsonlSink(folder), WandbSink(start=False)]), Outbox(prefix)]

        try:
            steps = _open(self._core, _checked_chunks(model), self._sequential, self._options, sinks=with_outbox)
        except (TypeError, ValueError, RuntimeError) as error:
            return _Steps(switched_off(self._core.name, error, strict=strict))
        monitor = steps.monitor
        if not monitor.active:
            return steps
        if monitor.tokens_per_step is None:
            monitor.tokens_per_step = _tokens_per_step(self._training)
        try:
            writer = self._training.get_wandb_writer()  # None on all ranks but the one with the W&B run
            self._inbox = None if writer is None else Inbox(prefix, writer, monitor)
        except Exception as error:
            if strict:
                monitor.close(EXCEPTION_CLOSE_TIMEOUT_S)  # nobody else would: Megatron's methods would stay wrapped
                raise
            # This rank alone has the error: if its monitor were closed, the other ranks' windows would wait for it.
            monitor.sink_failed(WandbSink(start=False), error)
        return steps


def _tokens_per_step(training: Any) -> int | None:
    """From Megatron-LM's arguments; None while the batch size still grows, or if a version names them otherwise."""
    try:
        arguments = training.get_args()  # asserts that they exist
        if arguments.rampup_batch_size is not None:
            return None
        return int(arguments.seq_length * arguments.global_batch_size)
    except (AssertionError, AttributeError, TypeError):
        return None
