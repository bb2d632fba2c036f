"""Megatron-core: ``attach(model_chunks, optimizer)``; Megatron-LM: ``hook_pretrain()`` before ``pretrain(...)``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed.distributed_c10d as c10d

from overlap_callbacks import Mode, OverlapMonitor, OverlapReport, Sink, WandbSink, checks
from overlap_callbacks.build import build_monitor, check_names, switched_off
from overlap_callbacks.monitor import HASTY_CLOSE_S
from overlap_callbacks.native import NativeForm
from overlap_callbacks.ranks import Channel, Job, next_prefix
from overlap_callbacks.run_info import default_run_folder
from overlap_callbacks.sinks import JsonlSink, RunInfo

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

# The settings under which the switches were seen to leave every bit of the weights as it is. With tensor, context or
# expert parallelism there is besides communication that no switch reaches.
_PROVEN: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "overlap_p2p_comm_warmup_flush": False,
    "cuda_graph_impl": "none",
    "fp8": None,
    "delay_wgrad_compute": False,
    "num_distributed_optimizer_instances": 1,
    "average_in_collective": False,
    "reduce_scatter_with_fp32_accumulation": False,
    "fp8_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False,
}

# Time between two looks for a report at the rank with the W&B run, and the longest that it waits for the last one.
_LOOK_S = 1.0
_LAST_REPORT_S = 30.0

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
        step = checks.count("start_step", start_step, minimum=0)
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
    switches: _Switches | None = None
    inbox: _Inbox | None = None
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
        timeout_s = HASTY_CLOSE_S
        try:
            result = train(*args, **kwargs)
            timeout_s = _LAST_REPORT_S
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


def _begin_step(monitor: OverlapMonitor, switches: _Switches | None, step: int) -> None:
    monitor.step_begin(step)
    if switches is not None and monitor.mode is Mode.SEQUENTIAL:
        switches.gather_parameters()


def _end_step(monitor: OverlapMonitor, skipped: bool) -> None:
    if skipped:
        with monitor.pause():  # such a step does less, so it does not count
            pass
    monitor.step_end()


def _open(
    core: Any, chunks: list[Any], sequential: str, options: dict[str, Any], by_hand: bool = False
) -> tuple[OverlapMonitor, _Switches | None]:
    """A monitor that knows the job's groups, waits for its batches of sends and receives, and has its switches."""
    if not core.groups.model_parallel_is_initialized():
        raise RuntimeError("model parallelism is not initialised: call initialize_model_parallel() first")
    switches = None
    if sequential == "native":
        switches = _Switches(core, chunks, by_hand)
    elif sequential != "gate":
        raise ValueError(f'sequential must be "gate" or "native", got {sequential!r}')
    monitor = build_monitor(core.name, options)
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


# -- the native form


class _Switches(NativeForm):
    """Megatron's own switches, between steps; only those that the job was built with."""

    def __init__(self, core: Any, chunks: list[Any], by_hand: bool) -> None:
        if not all(isinstance(chunk, core.ddp) for chunk in chunks):
            raise ValueError("sequential='native' needs model chunks in Megatron-core's DistributedDataParallel")
        configs = list({id(c): c for chunk in chunks for c in (chunk.ddp_config, chunk.config)}.values())
        found = {(name, getattr(holder, name, None)) for holder in (*chunks, *configs) for name in _PROVEN}
        odd = sorted(f"{name}={value!r}" for name, value in found if value not in (None, _PROVEN[name]))
        if odd:
            raise ValueError(
                f"sequential='native' is not known to be safe, or to reach all communication, with {', '.join(odd)}: "
                f"use sequential='gate'"
            )
        names = ("overlap_grad_reduce", "overlap_p2p_comm")
        self._flags = [(c, name) for c in configs for name in names if getattr(c, name, False)]
        self._gathering = [chunk for chunk in chunks if chunk.use_forward_hook]
        if not self._flags and not self._gathering:
            raise ValueError("sequential='native' has nothing to switch off: the job was built without overlap")
        if self._gathering and by_hand:
            raise ValueError(
                "sequential='native' with overlap_param_gather needs the optimizer: attach(model, optimizer)"
            )
        gather = ["overlap_param_gather"] if self._gathering else []
        self.name = ", ".join(dict.fromkeys([name for _, name in self._flags] + gather))
        self._configs = configs
        self._undo: list[tuple[Any, str, Any]] = []

    def sequential(self) -> None:
        for config, name in self._flags:
            if getattr(config, name) is not True:
                raise RuntimeError(f"{name} was switched off by somebody else: it is left alone")
            self._set(config, name, False)
        # With these set, pipeline stages start the reductions and gathers themselves: reductions would be done twice.
        for config in self._configs:
            for name in ("grad_sync_func", "param_sync_func"):
                if getattr(config, name, None) is not None:
                    self._set(config, name, None)

    def _set(self, config: Any, name: str, value: Any) -> None:
        self._undo.append((config, name, getattr(config, name)))
        setattr(config, name, value)
        if getattr(config, name) is not value:
            raise RuntimeError(f"{name} did not take the value {value}")

    def overlapped(self) -> None:
        while self._undo:
            setattr(*self._undo.pop())

    def gather_parameters(self) -> None:
        """At a sequential step's begin: gather all parameters now, so that the hooks before the layers find them.

        The flag and the hooks stay as they are, because Megatron-LM takes the hooks off and on itself.
        """
        for chunk in self._gathering:
            if chunk.remove_forward_pre_hook_handles:  # it has them off in its first step
                chunk.start_param_sync(force_sync=True)


# -- Megatron-LM


def _open_in_pretrain(
    core: Any, training: Any, model: Any, sequential: str, options: dict[str, Any]
) -> tuple[OverlapMonitor, _Switches | None, _Inbox | None]:
    """What ``_open`` gives, and on the rank that has the W&B run an inbox for the reports; errors stop no training."""
    try:
        prefix = f"{next_prefix()}/megatron"
        options = {"run_dir": default_run_folder(), **options}
        sinks = options.get("sinks") or [JsonlSink(options["run_dir"]), WandbSink(start=False)]
        options["sinks"] = [*([sinks] if isinstance(sinks, Sink) else sinks), _Outbox(prefix)]
        monitor, switches = _open(core, _checked_chunks(model), sequential, options)
        writer = training.get_wandb_writer() if monitor.active else None
        return monitor, switches, None if writer is None else _Inbox(prefix, writer, monitor)
    except (TypeError, ValueError, RuntimeError) as error:
        if options.get("strict"):
            raise
        return switched_off(core.name, error), None, None


class _Outbox(Sink):
    """Passes reports on from rank 0, through the job's store, to the rank where Megatron-LM has its W&B run."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._run: RunInfo | None = None
        self._sent = 0

    def open(self, run: RunInfo) -> None:
        self._run = run

    def log(self, report: OverlapReport) -> None:
        self._post(str(self._sent), msgspec.json.encode((self._run, report)))
        self._sent += 1

    def close(self) -> None:
        self._post("end", b"-")

    def _post(self, key: str, message: bytes) -> None:
        channel = _channel(self._prefix)
        if channel.look("reader"):  # else the message would lie in the store for good
            channel.post(key, message)


class _Inbox:
    """The other end. It looks for reports between steps, on the training thread: Megatron-LM logs there too."""

    def __init__(self, prefix: str, writer: Any, monitor: OverlapMonitor) -> None:
        self._channel = _channel(prefix)
        self._channel.post("reader", b"-")
        self._sink = WandbSink(getattr(writer, "run", None))
        self._monitor = monitor
        self._taken = 0
        self._expecting = False  # there has been a window
        self._next_look = 0.0

    def look(self, wait_s: float | None = None) -> None:
        """Log the reports that have come; with ``wait_s``, at the end, wait so long for the last one."""
        if self._monitor.in_window:
            self._expecting = True
        elif self._expecting and (wait_s is not None or time.monotonic() > self._next_look):
            self._next_look = time.monotonic() + _LOOK_S
            try:
                self._take(wait_s)
            except Exception as error:
                self._expecting = False
                self._monitor.sink_failed(self._sink, error)

    def _take(self, wait_s: float | None) -> None:
        if wait_s is not None:
            self._channel.await_message("end", wait_s, stop=lambda: False)
        while (message := self._channel.look(str(self._taken))) is not None:
            self._channel.delete(str(self._taken))
            run, report = msgspec.json.decode(message, type=tuple[RunInfo, OverlapReport])
            if self._taken == 0:
                self._sink.open(run)
            self._taken += 1
            self._sink.log(report)
        if wait_s is not None:
            self._channel.delete("reader", "end")
            self._sink.close()


def _channel(prefix: str) -> Channel:
    job = Job.current()
    assert job is not None
    return Channel(job, prefix)
