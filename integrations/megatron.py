"""Megatron-core: ``attach(model_chunks, optimizer)``; Megatron-LM: ``hook_pretrain()`` before ``pretrain(...)``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from overlap_callbacks import Mode, OverlapMonitor, Sink, WandbSink, _validation
from overlap_callbacks.monitor.background.store import next_prefix
from overlap_callbacks.monitor.monitor import EXCEPTION_CLOSE_TIMEOUT_S
from overlap_callbacks.sinks import JsonlSink

from ._megatron_native import Switches
from ._megatron_reports import LAST_REPORT_S, Inbox, Outbox
from .base import MakeSinks, build_monitor, check_names, switched_off

KNOWN_TO_WORK = "0.14.0, 0.15.0, 0.16.1"

# What the groups of parallel_state are for; those not named here tell it by their descriptions.
_ROLES = {
    "get_tensor_model_parallel_group": "tensor",
    "get_pipeline_model_parallel_group": "pipeline",
    "get_data_parallel_group": "data",
    "get_context_parallel_group": "context",
    "get_expert_model_parallel_group": "expert",
    "get_expert_tensor_parallel_group": "tensor",
    "get_expert_data_parallel_group": "data",  # the gradients of experts
    "get_embedding_group": "embedding",
    "get_position_embedding_group": "embedding",
    "get_expert_tensor_model_pipeline_parallel_group": "model",  # the norm of gradients
    "get_intra_distributed_optimizer_instance_group": "model",
}

_in_use: list[str] = []  # the function here that has wrapped Megatron's own ones in this process, if any


def attach(
    model_chunks: Any, optimizer: Any, *, start_step: int = 0, sequential: str = "gate", **options: Any
) -> OverlapMonitor:
    """Measure the loop that steps ``optimizer``: a step reaches from one ``optimizer.step()`` to the next.

    Micro-batches and pipeline schedules need nothing. A step that the optimizer skipped, for an overflow, does not
    count. Put ``with monitor.pause():`` around an evaluation within the loop, and ``monitor.close()`` (or ``with
    attach(...):``) around the loop's end.

    Args:
        model_chunks: what the pipeline schedule is given as ``model``: a module or a list of them.
        optimizer: of ``get_megatron_optimizer``. None where you mark the steps yourself, with ``monitor.step()``.
        start_step: optimizer steps done before, when a job resumes.
        sequential: how sequential steps are made: ``"gate"`` waits for every collective and batch of sends and
            receives; ``"native"`` switches off ``overlap_grad_reduce``, ``overlap_param_gather`` and
            ``overlap_p2p_comm`` where the job was built with them.
        **options: keyword arguments of ``Schedule`` and ``OverlapMonitor``, e.g. ``every_n_steps=200``.

    Returns:
        The monitor; its ``close()`` puts everything back.

    Raises:
        ImportError: Megatron-core is not installed, or lacks what is needed here.
        TypeError: not a model or a Megatron optimizer, or an option that does not exist.
        RuntimeError: (``strict=True`` only) model parallelism is not initialised, or Megatron has a monitor already.
        ValueError: (``strict=True`` only) a value is not allowed, or the native form is refused for this job.
    """
    core = _core()
    if optimizer is not None and not isinstance(optimizer, core.optimizer):
        raise TypeError(f"optimizer must be Megatron's, of get_megatron_optimizer(), got a {type(optimizer).__name__}")
    chunks = _checked_chunks(model_chunks)
    check_names(options)
    try:
        _check_free()
        step = _validation.count("start_step", start_step, minimum=0)
        monitor, switches = _open(core, chunks, sequential, options, by_hand=optimizer is None)
    except (TypeError, ValueError, RuntimeError) as error:
        if options.get("strict"):
            raise
        return switched_off(core.name, error)
    if not monitor.active:
        return monitor
    _in_use.append("attach()")
    monitor.call_on_close(_in_use.clear)
    if optimizer is None:
        return monitor

    # On the instance: the class's method is also that of the optimizers within a chained one. A hook of torch's on the
    # optimizer within would come before the parameters are gathered, and not at all after an overflow.
    def step_and_mark(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        outcome = inner(*args, **kwargs)
        if monitor.in_step:
            _end_step(monitor, skipped=outcome[0] is False)
        step += 1
        _begin_step(monitor, switches, step)
        return outcome

    inner = optimizer.step
    monitor.call_on_close(_put(optimizer, "step", functools.wraps(inner)(step_and_mark)))
    return monitor


def hook_pretrain(*, sequential: str = "gate", **options: Any) -> None:
    """Measure the next ``pretrain(...)`` of Megatron-LM: call this once before it, on all ranks.

    A step is a call of ``train_step``; evaluation and checkpoints lie between. Measuring ends, and all is put back,
    when training ends. Rank 0 writes the record; the W&B run that Megatron-LM opens on the last rank gets the reports.

    Args:
        sequential: as in ``attach``.
        **options: as in ``attach``.

    Raises:
        ImportError: Megatron-LM or Megatron-core cannot be imported, or lacks what is needed here.
        TypeError: an option that does not exist.
        RuntimeError: (``strict=True`` only) called twice, or Megatron has a monitor already.
    """
    check_names(options)
    core = _core()
    try:
        _check_free()
    except RuntimeError as error:
        if options.get("strict"):
            raise
        switched_off(core.name, error)
        return
    try:
        training = importlib.import_module("megatron.training.training")
        train, train_step = training.train, training.train_step
    except (ImportError, AttributeError) as error:
        raise ImportError(f"hook_pretrain needs Megatron-LM, with megatron.training.training: {error}") from error
    monitor: OverlapMonitor | None = None
    switches: Switches | None = None
    inbox: Inbox | None = None
    step = -1

    @functools.wraps(train_step)
    def measured_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal monitor, switches, inbox, step
        if monitor is None:
            model = inspect.signature(train_step).bind(*args, **kwargs).arguments["model"]
            monitor, switches, inbox = _open_in_pretrain(core, training, model, sequential, options)
        iteration = kwargs.get("iteration")  # newer ones give it, so that numbers survive a resume
        step = step + 1 if iteration is None else iteration
        _begin_step(monitor, switches, step)
        try:
            outcome = train_step(*args, **kwargs)
        except BaseException:
            monitor.abort_step()
            raise
        _end_step(monitor, skipped=bool(outcome[1]))
        if inbox is not None:
            inbox.look()
        return outcome

    @functools.wraps(train)
    def measured_train(*args: Any, **kwargs: Any) -> Any:
        timeout_s = EXCEPTION_CLOSE_TIMEOUT_S
        try:
            result = train(*args, **kwargs)
            timeout_s = LAST_REPORT_S
            return result
        finally:
            for undo in undos:
                undo()
            _in_use.clear()
            if monitor is not None:
                monitor.close(timeout_s)
            if inbox is not None:
                inbox.look(wait_s=timeout_s)

    # pretrain() looks both up in its module each time that it calls them.
    undos = [_put(training, "train", measured_train), _put(training, "train_step", measured_step)]
    _in_use.append("hook_pretrain()")


# -- what both have in common


def _core() -> Any:
    """What is needed of Megatron-core."""
    version = "of an unknown version"
    try:
        version = getattr(importlib.import_module("megatron.core"), "__version__", version)
    except ImportError:
        raise ImportError("this needs Megatron-core: pip install 'overlap-callbacks[megatron]'") from None
    try:
        communicator = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication").P2PCommunicator
        found = SimpleNamespace(
            name=f"megatron-core {version}",
            communicator=communicator,
            communicate=communicator._communicate,
            ddp=importlib.import_module("megatron.core.distributed").DistributedDataParallel,
            optimizer=importlib.import_module("megatron.core.optimizer").MegatronOptimizer,
            groups=importlib.import_module("megatron.core.parallel_state"),
        )
        found.groups.model_parallel_is_initialized  # noqa: B018 - asked for, so that its absence is told here
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"megatron-core {version} lacks what is needed here ({error}); known to work: {KNOWN_TO_WORK}"
        ) from error
    return found


def _check_free() -> None:
    if _in_use:
        raise RuntimeError(f"Megatron has a monitor already, of {_in_use[0]}: one at a time, close() that one first")


def _checked_chunks(model: Any) -> list[Any]:
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        raise TypeError(f"model_chunks must be a module or a list of modules, got a {type(model).__name__}")
    return chunks


def _begin_step(monitor: OverlapMonitor, switches: Switches | None, step: int) -> None:
    monitor.step_begin(step)
    if switches is not None and monitor.mode is Mode.SEQUENTIAL:
        switches.gather_parameters()


def _end_step(monitor: OverlapMonitor, skipped: bool) -> None:
    if skipped:
        monitor.skip_step("its gradients overflowed")
    monitor.step_end()


def _open(
    core: Any,
    chunks: list[Any],
    sequential: str,
    options: dict[str, Any],
    by_hand: bool = False,
    sinks: MakeSinks | None = None,
) -> tuple[OverlapMonitor, Switches | None]:
    """A monitor that knows the job's groups, waits for its batches of sends and receives, and has its switches."""
    if not core.groups.model_parallel_is_initialized():
        raise RuntimeError("model parallelism is not initialised: call initialize_model_parallel() first")
    switches = None
    if sequential == "native":
        switches = Switches(core, chunks, by_hand)
    elif sequential != "gate":
        raise ValueError(f"sequential must be 'gate' or 'native', got {sequential!r} (a {type(sequential).__name__})")
    monitor = build_monitor(core.name, options, sinks=sinks)
    if monitor.active:
        monitor.name_groups(_dimensions(core, getattr(chunks[0], "config", None)))
        if switches is not None:
            monitor.use_native(switches)
        monitor.call_on_close(_put(core.communicator, "_communicate", _waiting(core.communicate, monitor)))
    return monitor, switches


def _put(holder: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; what is returned puts back what was there, unless somebody else has set it since."""
    own = vars(holder)
    there, before = name in own, own.get(name)
    setattr(holder, name, value)

    def undo() -> None:
        if vars(holder).get(name) is not value:
            return
        if there:
            setattr(holder, name, before)
        else:
            delattr(holder, name)

    return undo


def _waiting(communicate: Callable[..., Any], monitor: OverlapMonitor) -> Callable[..., Any]:
    """The method that posts a batch of sends and receives; in sequential steps it waits for all once all are posted.

    That comes to an end: the stages go through their batches in step, each one's k-th forward (or backward) batch
    answering the neighbour's. Megatron itself waits there wherever ``overlap_p2p_comm`` is off.
    """

    @functools.wraps(communicate)
    def post(self: Any, *args: Any, **kwargs: Any) -> Any:
        def works_of(result: Any) -> list[Any]:
            works = result[2]  # a list or a dictionary; None where Megatron itself has waited
            return list(works.values()) if isinstance(works, dict) else list(works or ())

        result, handed_on = monitor.post(lambda: communicate(self, *args, **kwargs), works_of)
        from_previous, from_next, works = result
        if works:
            works = dict(zip(works, handed_on, strict=True)) if isinstance(works, dict) else handed_on
        return from_previous, from_next, works

    return post


def _dimensions(core: Any, config: Any) -> dict[str, str]:
    """The roles of the job's groups, by their names."""
    roles = {}
    for function, role in _ROLES.items():
        found = None
        with contextlib.suppress(AssertionError, AttributeError):  # a group that the job, or this version, has not
            found = getattr(core.groups, function)()
        for group in found if isinstance(found, list) else [found] if found is not None else []:
            roles[group.group_name] = role
            # Without batches, two stages send one way over the default group, so as to have two communicators.
            if role == "pipeline" and group.size() == 2 and not getattr(config, "batch_p2p_comm", True):
                roles[c10d._get_default_group().group_name] = role
    return roles


# -- Megatron-LM


def _open_in_pretrain(
    core: Any, training: Any, model: Any, sequential: str, options: dict[str, Any]
) -> tuple[OverlapMonitor, Switches | None, Inbox | None]:
    """What ``_open`` gives, and on the rank that has the W&B run an inbox for the reports; errors stop no training."""
    prefix = f"{next_prefix()}/megatron"

    def with_outbox(given: list[Sink] | None, folder: Path) -> list[Sink]:
        return [*(given or [JsonlSink(folder), WandbSink(start=False)]), Outbox(prefix)]

    try:
        monitor, switches = _open(core, _checked_chunks(model), sequential, options, sinks=with_outbox)
    except (TypeError, ValueError, RuntimeError) as error:
        if options.get("strict"):
            raise
        return switched_off(core.name, error), None, None
    if not monitor.active:
        return monitor, switches, None
    if monitor.tokens_per_step is None:
        monitor.tokens_per_step = _tokens_per_step(training)
    inbox = None
    try:
        writer = training.get_wandb_writer()
        inbox = None if writer is None else Inbox(prefix, writer, monitor)
    except Exception as error:
        if options.get("strict"):
            monitor.close(EXCEPTION_CLOSE_TIMEOUT_S)  # nobody else will: Megatron's methods would stay wrapped
            raise
        # Of this rank alone: were its monitor closed, the others' windows would wait for it.
        monitor.sink_failed(WandbSink(start=False), error)
    return monitor, switches, inbox


def _tokens_per_step(training: Any) -> int | None:
    """By Megatron-LM's arguments; None where the batch is still growing, or a version names them otherwise."""
    try:
        arguments = training.get_args()  # which asserts that they are there
        if arguments.rampup_batch_size is not None:
            return None
        return int(arguments.seq_length * arguments.global_batch_size)
    except (AssertionError, AttributeError, TypeError):
        return None
