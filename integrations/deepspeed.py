"""DeepSpeed: ``attach(engine)`` after ``deepspeed.initialize``, nothing else."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks import OverlapMonitor, OverlapReport, Sink, WandbSink
from overlap_callbacks.gate.native import OverlapSwitch
from overlap_callbacks.sinks import JsonlSink

from .base import build_monitor, check_names, switched_off

try:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.monitor.monitor import Monitor
    from deepspeed.monitor.wandb import WandbMonitor
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
except ImportError:
    raise ImportError("attach needs DeepSpeed: pip install 'overlap-callbacks[deepspeed]'") from None

KNOWN_TO_WORK = "known to work: 0.17.0, 0.18.0 and 0.19.8"
_NEEDED = ("module", "forward", "step", "global_steps", "global_samples", "was_step_applied", "monitor")
_COORDINATOR = "_PartitionedParameterCoordinator"
_PREFETCH = f"{_COORDINATOR}__prefetch_bucket_sz"

_attached: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def attach(engine: DeepSpeedEngine, *, sequential: str = "gate", **options: Any) -> OverlapMonitor:
    """Measure the job of ``engine``, from ``deepspeed.initialize``: any ZeRO stage, or a pipeline.

    A step reaches from the first training forward after a change of ``engine.global_steps`` to the end of the
    ``engine.step()`` in which it has changed again, so gradient accumulation needs nothing; of a ``PipelineEngine`` it
    is one ``train_batch``. Steps have DeepSpeed's own numbers, which a checkpoint brings back. A step that the loss
    scaler skipped is a step, whose time does not count. Evaluation is no part of any step.

    Reports go to the record, to the W&B run that is active, and to the other backends of ``engine.monitor``.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        sequential: what makes a step sequential: ``"gate"``, which waits for every collective, or ``"native"``,
            DeepSpeed's own switches, flipped between steps: ``overlap_comm`` of ZeRO-1 and 2, the prefetch bucket size
            of ZeRO-3 (and, on GPUs, the streams beside the main one).
        **options: keyword arguments of ``Schedule`` and ``OverlapMonitor``, e.g. ``every_n_steps=200``.

    Returns:
        The monitor; its ``close()``, between steps, leaves the engine as it was.

    Raises:
        TypeError: not a DeepSpeed engine, or an option that does not exist.
        ValueError: (``strict=True`` only) a value is not allowed, the engine is attached to already, or the native
            switch would corrupt this job's training or change nothing.
        RuntimeError: (``strict=True`` only) there is no process group, or this DeepSpeed lacks something needed.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"engine must be what deepspeed.initialize returned first, got a {type(engine).__name__}")
    check_names(options)
    framework = f"deepspeed {deepspeed.__version__}"
    try:
        _check_time(engine)
        _check_version(engine)
        form = _native_form(engine, sequential)
    except (ValueError, RuntimeError) as error:
        if options.get("strict"):
            raise
        return switched_off(framework, error)
    if form is not None:
        framework += f", sequential by {form.name}"
    events = _EventsSink(engine)
    monitor = build_monitor(
        framework, options, sinks=lambda given, folder: _with_engines_monitor(given, folder, engine, events)
    )
    if not monitor.active:
        return monitor
    if form is not None:
        monitor.use_native(form)
    monitor.name_groups(_dimensions(engine))
    steps = _Steps(engine, monitor, events)
    if isinstance(engine, PipelineEngine):
        monitor.call_on_close(_wrap(engine, "train_batch", steps.train_batch))
    else:
        monitor.call_on_close(_wrap(engine, "forward", steps.forward))
        monitor.call_on_close(_wrap(engine, "step", steps.step))
    _attached.add(engine)
    monitor.call_on_close(lambda: _attached.discard(engine))
    return monitor


def _check_time(engine: DeepSpeedEngine) -> None:
    if not dist.is_initialized():
        raise RuntimeError("attach(engine) was called without a process group: call it after deepspeed.initialize")
    if engine in _attached:
        raise ValueError("engine is attached to already: close() that monitor first, or use it")


def _check_version(engine: DeepSpeedEngine) -> None:
    missing = [name for name in _NEEDED if not hasattr(engine, name)]
    if missing:
        raise RuntimeError(f"DeepSpeed {deepspeed.__version__} has no engine.{missing[0]}; {KNOWN_TO_WORK}")


# -- steps


class _Steps:
    """Goes around the engine's public methods, and tells the monitor where a step begins and ends."""

    def __init__(self, engine: DeepSpeedEngine, monitor: OverlapMonitor, events: _EventsSink) -> None:
        self._engine = engine
        self._monitor = monitor
        self._events = events
        self._number = -1

    def forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._engine.module.training:
            if torch.is_grad_enabled():
                self._begin()
        elif self._monitor.in_step:  # an evaluation between two micro-batches
            with self._monitor.pause():
                return inner(*args, **kwargs)
        return inner(*args, **kwargs)

    def step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        self._end()
        return result

    def train_batch(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # From the first receive of a later stage to the broadcast of the loss, which lie outside of forward and step.
        self._begin()
        try:
            result = inner(*args, **kwargs)
        except BaseException:
            self._monitor.abort_step()
            raise
        self._end()
        return result

    def _begin(self) -> None:
        # A step that was given up and is tried again has had its number: the next one is measured.
        if not self._monitor.in_step and self._engine.global_steps != self._number:
            self._number = self._engine.global_steps
            self._monitor.step_begin(self._number)

    def _end(self) -> None:
        if not self._monitor.in_step or self._engine.global_steps == self._number:
            return
        if not self._engine.was_step_applied():
            self._monitor.skip_step("its gradients overflowed")
        self._monitor.step_end(self._number)
        try:
            self._events.flush()
        except Exception as error:
            self._events.drop()
            self._monitor.sink_failed(self._events, error)


def _wrap(engine: DeepSpeedEngine, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Put ``around(method, ...)`` in a method's place on this one engine; returns what undoes it."""
    before = vars(engine).get(name)  # a wrapper of someone else's
    inner = getattr(engine, name)
    wrapper = functools.wraps(inner)(functools.partial(around, inner))
    setattr(engine, name, wrapper)

    def undo() -> None:
        if vars(engine).get(name) is not wrapper:
            return  # someone wrapped it once more since: ours, which does nothing any more, stays inside
        if before is None:
            delattr(engine, name)
        else:
            setattr(engine, name, before)

    return undo


def _dimensions(engine: DeepSpeedEngine) -> dict[str, str]:
    """Dimensions of DeepSpeed's groups by their names: it gives them no descriptions."""
    groups = [(group, "expert") for group in (engine.expert_parallel_group or {}).values()]
    groups += [(group, "data") for group in (engine.expert_data_parallel_group or {}).values()]
    groups += [(engine.seq_data_parallel_group, "data"), (engine.data_parallel_group, "data")]
    # ZeRO-3 gathers over a group that its parameters know, by default the job's first.
    groups += [(getattr(parameter, "ds_process_group", None), "data") for parameter in engine.module.parameters()]
    if isinstance(engine, PipelineEngine):
        grid = engine.grid
        groups += [(grid.ds_model_proc_group, "model"), (grid.slice_proc_group, "tensor")]
        groups += [(grid.pp_proc_group, "pipeline"), (grid.dp_proc_group, "data")]
        groups += [(dist.group.WORLD, "pipeline")]  # its sends and receives
    return {group.group_name: label for group, label in groups if isinstance(group, dist.ProcessGroup)}


# -- DeepSpeed's own switches


class _Switches(OverlapSwitch):
    """Attributes of DeepSpeed's that have one value with overlap, as the job was built, and one without.

    Args:
        name: for the record.
        *switches: of each, the object that holds it, its name, and its value without overlap.
    """

    # Gradients that were set aside for one way of reducing are looked for by it at the accumulation's end.
    only_between_steps = True

    def __init__(self, name: str, *switches: tuple[Any, str, Any]) -> None:
        self.name = name
        self._switches = [(holder, attribute, getattr(holder, attribute), off) for holder, attribute, off in switches]

    def disable(self) -> None:
        for holder, attribute, on, _ in self._switches:
            found = getattr(holder, attribute)
            if found != on:
                raise RuntimeError(f"{attribute} was {on!r} when the monitor was attached, and now is {found!r}")
        get_accelerator().synchronize()  # nothing may be under way on a stream that is put aside
        for holder, attribute, _, off in self._switches:
            setattr(holder, attribute, off)

    def restore(self) -> None:
        for holder, attribute, on, off in self._switches:
            if getattr(holder, attribute) == off:
                setattr(holder, attribute, on)


def _native_form(engine: DeepSpeedEngine, sequential: str) -> _Switches | None:
    if sequential not in ("gate", "native"):
        raise ValueError(f"sequential must be 'gate' or 'native', got {sequential!r} (a {type(sequential).__name__})")
    if sequential == "gate":
        return None
    optimizer = engine.optimizer
    coordinator = getattr(getattr(optimizer, "parameter_offload", None), "param_coordinator", None)
    why = _why_no_switch(engine, coordinator)
    if why:
        raise ValueError(f"sequential='native' is refused: {why}; use 'gate'")
    if engine.zero_optimization_stage() < 3:
        return _Switches("overlap_comm", (optimizer, "overlap_comm", False))
    # The streams (None on the host) are what a job built with overlap_comm off has in their place.
    streams = [(coordinator, f"{_COORDINATOR}__allgather_stream"), (optimizer, "reduce_and_partition_stream")]
    main = get_accelerator().default_stream()
    aside = [(holder, name, main) for holder, name in streams if getattr(holder, name, None) is not None]
    return _Switches("stage3_prefetch_bucket_size" + " and streams" * bool(aside), (coordinator, _PREFETCH, 0), *aside)


def _why_no_switch(engine: DeepSpeedEngine, coordinator: Any) -> str:
    """Why this job's switch must not be flipped; empty where it may be."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if isinstance(engine, PipelineEngine):
        return "DeepSpeed does not overlap the communication of pipelines"
    if stage == 0:
        return "ZeRO stage 0 reduces all gradients after the backward pass, and has no switch"
    if not engine.zero_overlap_comm():
        # Stage 1 made its gradient hooks for one value or the other: switched on, it would not reduce at all.
        return "the job was built with overlap_comm off, so there is nothing to switch off"
    if engine.zero_offload_optimizer() or engine.zero_offload_param():
        return "its switches are not known to be safe to flip with offloading"
    if stage == 3:
        if not hasattr(coordinator, _PREFETCH):
            return f"DeepSpeed {deepspeed.__version__} keeps ZeRO-3's prefetch bucket size elsewhere; {KNOWN_TO_WORK}"
        built_without = not getattr(coordinator, _PREFETCH)
        return "the job was built with stage3_prefetch_bucket_size 0: nothing to switch off" if built_without else ""
    if type(optimizer) is not DeepSpeedZeroOptimizer:
        return f"overlap_comm of a {type(optimizer).__name__} is not known to be safe to flip"
    if stage == 1 and not optimizer.contiguous_gradients:
        return "ZeRO stage 1 without contiguous_gradients has its gradient hooks for the sake of overlap_comm alone"
    return ""


# -- the engine's monitor


class _EventsSink(Sink):
    """Passes reports on to the backends of ``engine.monitor``, on the training thread, against the samples seen.

    Not to its W&B backend: the run that this one starts is the active one, where ``WandbSink`` logs the same with
    tables and an axis of steps.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        backends = vars(engine.monitor).values()  # each is None where it is not enabled, and on all ranks but the first
        self.backends = [b for b in backends if isinstance(b, Monitor) and not isinstance(b, WandbMonitor)]
        self._waiting: deque[OverlapReport] = deque(maxlen=100)

    def log(self, report: OverlapReport) -> None:
        self._waiting.append(report)

    def flush(self) -> None:
        while self._waiting:
            metrics = self._waiting.popleft().metrics()
            events = [(name, value, self._engine.global_samples) for name, value in metrics.items()]
            for backend in self.backends:
                backend.write_events(events)

    def drop(self) -> None:
        """Write nothing any more."""
        self.backends = []

    def close(self) -> None:
        self.flush()  # the last reports come in while the training thread waits in the monitor's close()


def _with_engines_monitor(
    given: list[Sink] | None, folder: Path, engine: DeepSpeedEngine, events: _EventsSink
) -> list[Sink]:
    """The sinks with the engine's monitor among them; one W&B sink at most."""
    sinks = [JsonlSink(folder), WandbSink(start=False)] if given is None else given
    if not engine.monitor.enabled:
        return sinks
    extra: list[Sink] = [events] if events.backends else []
    if engine.monitor.wandb_monitor is not None and not any(isinstance(sink, WandbSink) for sink in sinks):
        extra.append(WandbSink(start=False))
    return [*sinks, *extra]
