"""DeepSpeed: ``attach(engine)`` after ``deepspeed.initialize``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist

from overlap_callbacks import OverlapMonitor, Sink, WandbSink
from overlap_callbacks.analysis.step_vectors import AFTER_BACKWARD, INPUT, OPTIMIZER, WAITING
from overlap_callbacks.gate.switches import OverlapSwitch
from overlap_callbacks.monitor.config import default_sinks
from overlap_callbacks.sinks import FunctionSink

from . import _configuration
from .base import (
    Attachments,
    build_monitor,
    check_callable,
    check_version,
    flush_sinks,
    full_precision,
    is_native,
    missing_of,
    precision_of,
    wrap,
)

try:
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
except ImportError:
    raise ImportError("attach needs DeepSpeed: pip install 'overlap-callbacks[deepspeed]'") from None

from deepspeed.monitor.monitor import Monitor
from deepspeed.monitor.wandb import WandbMonitor

from ._deepspeed_race import EngineStep
from ._deepspeed_switches import limit_switch, native_switches
from ._names import tell_names
from ._options import Options
from ._parts import PassMarks, around

_NEEDED = ("module", "forward", "step", "global_steps", "global_samples", "was_step_applied", "monitor")

_attachments = Attachments("engine")


def attach(
    engine: DeepSpeedEngine,
    *,
    sequential: str = "gate",
    repeat_step: Callable[[], Any] | None = None,
    **options: Unpack[Options],
) -> OverlapMonitor:
    """Measure the job of ``engine``: any ZeRO stage, or a pipeline.

    A step begins at the first training forward after ``engine.global_steps`` has changed, and ends with the
    ``engine.step()`` in which it has changed again, so gradient accumulation needs no setting. Of a ``PipelineEngine``
    it is one ``train_batch``. Steps have DeepSpeed's own numbers, which checkpoints keep. The time of a step that the
    loss scaler skipped does not count. Evaluation is not part of any step.

    Reports go to the record, to the active W&B run, and to the other backends of ``engine.monitor``.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        sequential: what makes a step sequential. ``"gate"`` waits for every collective. ``"native"`` flips DeepSpeed's
            own switches between steps: ``overlap_comm`` of ZeRO-1 and 2, the prefetch bucket size of ZeRO-3 (and, on
            GPUs, the streams beside the main one).
        repeat_step: for ``check_gradients=True`` with ZeRO-1: runs ``engine.backward(engine(batch))`` once, on a batch
            that it holds, and nothing else. What it changes in the engine is put back.
        **options: see ``Options``, e.g. ``every_n_steps=200``.

    Returns:
        The monitor; its ``close()``, between steps, leaves the engine as it was.

    Raises:
        TypeError: not a DeepSpeed engine, a ``repeat_step`` that cannot be called, or an option that does not exist.
        ValueError: a value is not allowed. With ``strict=True`` also: the engine has a monitor already, or DeepSpeed's
            switches would corrupt this job's training or change nothing.
        RuntimeError: (``strict=True`` only) there is no process group, this DeepSpeed lacks something needed, or
            another rank cannot measure.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"engine must be what deepspeed.initialize returned first, got a {type(engine).__name__}")
    check_callable("repeat_step", repeat_step)
    native = is_native(sequential)
    switches: OverlapSwitch | None = None
    events: EventsSink | None = None
    framework = f"deepspeed {deepspeed.__version__}"

    def check() -> str:
        nonlocal switches
        if not dist.is_initialized():
            raise RuntimeError("attach(engine) was called without a process group: call it after deepspeed.initialize")
        _attachments.check_free(engine)
        check_version("deepspeed", deepspeed.__version__, missing_of(engine, *_NEEDED))
        switches = native_switches(engine) if native else None
        return framework if switches is None else f"{framework}, sequential by {switches.name}"

    def sinks(given: list[Sink] | None, folder: Path) -> list[Sink]:
        nonlocal events
        events = EventsSink(engine, options.get("detail", "short"))
        return sinks_of(given, folder, engine, events)

    monitor = build_monitor(
        framework,
        options,
        check=check,
        sinks=sinks,
        precision=lambda: _precision(engine),
        next_step=getattr(engine, "global_steps", 0),
        unused="no step of the attached engine has begun",
        target=engine,
    )
    if not monitor.active or events is None:
        return monitor
    if switches is not None:
        monitor.use_native(switches)
    monitor.offer_switches(
        {
            "native": lambda arm: native_switches(engine),
            "zero3_limit": lambda arm: limit_switch(engine, arm),
        }
    )
    if repeat_step is not None:
        monitor.offer_repetition(EngineStep(repeat_step, engine))
    monitor.name_groups(_dimensions(engine))
    tell_names(monitor, [engine.module])
    _configuration.tell(monitor, lambda: _configuration.of_deepspeed(engine))
    steps = _Steps(engine, monitor, events)
    is_pipeline = isinstance(engine, PipelineEngine)
    for method in ("train_batch",) if is_pipeline else ("forward", "step"):  # on this engine only, not on its class
        monitor.call_on_close(wrap(engine, method, getattr(steps, method)))
    after = WAITING if is_pipeline else AFTER_BACKWARD
    parts = {"allreduce_gradients": WAITING, "_take_model_step": OPTIMIZER, "_next_batch": INPUT}
    for method, part in parts.items():
        if hasattr(engine, method):
            monitor.call_on_close(wrap(engine, method, around(monitor, part, after)))
    PassMarks(monitor, idle=is_pipeline).watch([engine.module])
    _attachments.add(engine, monitor)
    return monitor


# -- steps


class _Steps:
    """Wraps the engine's public methods, and tells the monitor where a step begins and ends."""

    def __init__(self, engine: DeepSpeedEngine, monitor: OverlapMonitor, events: FunctionSink) -> None:
        self._engine = engine
        self._monitor = monitor
        self._deferred = [events]
        self._number = -1

    def forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._monitor.is_repeating:
            return inner(*args, **kwargs)
        if self._engine.module.training:
            if torch.is_grad_enabled():
                self._begin()
                self._monitor.tell_micro_batch()
        elif self._monitor.in_step:  # an evaluation between two micro-batches
            with self._monitor.pause():
                return inner(*args, **kwargs)
        return inner(*args, **kwargs)

    def step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        self._end()
        return result

    def train_batch(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A later stage begins it with its first receive, and it ends with the broadcast of the loss; both are outside
        # forward and step.
        self._begin()
        try:
            result = inner(*args, **kwargs)
        except BaseException:
            self._monitor.abort_step()
            raise
        self._end()
        return result

    def _begin(self) -> None:
        # A step that is retried after an abort has the same number: it is not measured, the next one is.
        if not self._monitor.in_step and self._engine.global_steps != self._number:
            self._number = self._engine.global_steps
            self._monitor.step_begin(self._number)

    def _end(self) -> None:
        if not self._monitor.in_step or self._engine.global_steps == self._number:
            return
        if not self._engine.was_step_applied():
            self._monitor.skip_step("its gradients overflowed")
        self._monitor.step_end(self._number)
        self._monitor.enter(INPUT)
        flush_sinks(self._deferred, self._monitor)


# -- reports


class EventsSink(FunctionSink):
    """Passes reports to the backends of ``engine.monitor``, on the training thread, against the samples seen.

    Its W&B backend is left out: the run that it starts is the active one, and ``WandbSink`` logs the same there, with
    tables and against a step axis.
    """

    def __init__(self, engine: DeepSpeedEngine, detail: str = "short") -> None:
        # ``close`` writes the last reports, which come while the training thread waits in the monitor's close().
        super().__init__(self._write_events, deferred=True, exact_keys=True, detail=detail)
        self._engine = engine
        backends = vars(engine.monitor).values()  # None if not enabled, and on all ranks but the first
        self.backends = [b for b in backends if isinstance(b, Monitor) and not isinstance(b, WandbMonitor)]

    def _write_events(self, metrics: dict[str, float], step: int) -> None:
        events = [(name, value, self._engine.global_samples) for name, value in metrics.items()]
        for backend in self.backends:
            backend.write_events(events)


def sinks_of(given: list[Sink] | None, folder: Path, engine: DeepSpeedEngine, events: EventsSink) -> list[Sink]:
    """The monitor's sinks: the given or the default ones, and the engine's backends; at most one W&B sink."""
    sinks = default_sinks(folder, events.detail) if given is None else given
    if not engine.monitor.enabled:
        return sinks
    extra: list[Sink] = [events] if events.backends else []
    if engine.monitor.wandb_monitor is not None and not any(isinstance(sink, WandbSink) for sink in sinks):
        extra.append(WandbSink(start=False, detail=events.detail))
    return [*sinks, *extra]


# -- facts of the job


def _precision(engine: DeepSpeedEngine) -> str | None:
    """The precision of matrix products; None if torch's autocast, which the engine may use, has another type."""
    autocast = getattr(engine, "torch_autocast_enabled", None)
    if autocast is not None and autocast():
        return precision_of(engine.torch_autocast_dtype())
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else full_precision()


def _dimensions(engine: DeepSpeedEngine) -> dict[str, str]:
    """The dimension of DeepSpeed's groups, which have no descriptions, by group name."""
    groups = [(group, "expert") for group in (engine.expert_parallel_group or {}).values()]
    groups += [(group, "data") for group in (engine.expert_data_parallel_group or {}).values()]
    groups += [(engine.seq_data_parallel_group, "data"), (engine.data_parallel_group, "data")]
    # ZeRO-3 gathers over a group that its parameters hold, by default the default group.
    groups += [(getattr(parameter, "ds_process_group", None), "data") for parameter in engine.module.parameters()]
    if isinstance(engine, PipelineEngine):
        grid = engine.grid
        groups += [(grid.ds_model_proc_group, "model"), (grid.slice_proc_group, "tensor")]
        groups += [(grid.pp_proc_group, "pipeline"), (grid.dp_proc_group, "data")]
        groups += [(dist.group.WORLD, "pipeline")]  # its sends and receives
    return {group.group_name: label for group, label in groups if isinstance(group, dist.ProcessGroup)}
