"""DeepSpeed's own switches: those that make a step sequential without the gate, and those of arms."""

from __future__ import annotations

from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from overlap_callbacks.gate.arms import ZeroLiveParameters, ZeroPrefetchBucket
from overlap_callbacks.gate.switches import OverlapSwitch, RefusedError

from .base import lacks

_COORDINATOR = "_PartitionedParameterCoordinator"
PREFETCH_ATTRIBUTE = f"{_COORDINATOR}__prefetch_bucket_sz"
_LIMITS = {
    "stage3_prefetch_bucket_size": PREFETCH_ATTRIBUTE,
    "stage3_max_live_parameters": f"{_COORDINATOR}__max_n_available_params",
}
_NAMED_BUCKET = "prefetch bucket size of ZeRO-3 under the known name"


class Switches(OverlapSwitch):
    """DeepSpeed attributes with one value with overlap, as the job was built, and another without.

    Each of ``switches`` is the object that has it, the attribute, and its value without overlap.
    """

    # During accumulation DeepSpeed sets gradients aside. At its end, only the same way of reducing finds them.
    only_between_steps = True

    def __init__(self, name: str, *switches: tuple[Any, str, Any]) -> None:
        self.name = name
        self._switches = [(holder, attribute, getattr(holder, attribute), off) for holder, attribute, off in switches]

    def disable(self) -> None:
        for holder, attribute, on, _ in self._switches:
            current = getattr(holder, attribute)
            if current != on:
                raise RefusedError(
                    f"{attribute} was {on!r} when the monitor was attached, and now is {current!r} [OC134]"
                )
        self._settle()
        for holder, attribute, _, off in self._switches:
            setattr(holder, attribute, off)

    def _settle(self) -> None:
        get_accelerator().synchronize()  # nothing may still run on a stream that is about to be replaced

    def restore(self) -> None:
        for holder, attribute, on, off in self._switches:
            if getattr(holder, attribute) == off:
                setattr(holder, attribute, on)


def native_switches(engine: DeepSpeedEngine) -> Switches:
    """The switches of this job. Raises a ValueError if they must not be flipped, or would have no effect."""
    optimizer = engine.optimizer
    coordinator = getattr(getattr(optimizer, "parameter_offload", None), "param_coordinator", None)
    why = _why_no_switch(engine, coordinator)
    if why:
        raise ValueError(f"sequential='native' is refused: {why}; use 'gate'")
    if engine.zero_optimization_stage() < 3:
        return Switches("overlap_comm", (optimizer, "overlap_comm", False))
    # A job built with overlap_comm off has the main stream in place of these (which are None on the host).
    streams = [(coordinator, f"{_COORDINATOR}__allgather_stream"), (optimizer, "reduce_and_partition_stream")]
    main = get_accelerator().default_stream()
    replaced = [(holder, name, main) for holder, name in streams if getattr(holder, name, None) is not None]
    name = "stage3_prefetch_bucket_size and streams" if replaced else "stage3_prefetch_bucket_size"
    return Switches(name, (coordinator, PREFETCH_ATTRIBUTE, 0), *replaced)


class LimitSwitch(Switches):
    """Sets a limit of what ZeRO-3's coordinator prefetches. Steps stay overlapped."""

    sequential = False

    def _settle(self) -> None:
        """Do nothing: no stream is replaced, so there is no need to wait for the device."""


def limit_switch(engine: DeepSpeedEngine, arm: ZeroPrefetchBucket | ZeroLiveParameters) -> LimitSwitch:
    """The switch of an arm. Raises a ValueError if the engine has no such limit, or already has this one."""
    attribute = _LIMITS[arm.key]
    coordinator = getattr(getattr(engine.optimizer, "parameter_offload", None), "param_coordinator", None)
    if engine.zero_optimization_stage() != 3:
        raise ValueError(f"the engine has ZeRO stage {engine.zero_optimization_stage()}, and 3 is needed")
    if not hasattr(coordinator, attribute):
        raise ValueError(lacks("deepspeed", deepspeed.__version__, f"{arm.key} of ZeRO-3 under the known name"))
    if engine.zero_offload_param():
        raise ValueError(f"{arm.key} is not known to be safe to change with offloading")
    if getattr(coordinator, attribute) == arm.elements:
        raise ValueError(f"{arm.key} is {arm.elements} already: nothing would change")
    return LimitSwitch(arm.key, (coordinator, attribute, arm.elements))


def _why_no_switch(engine: DeepSpeedEngine, coordinator: Any) -> str:
    """Why this job's switch must not be flipped; empty if it may be."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if isinstance(engine, PipelineEngine):
        return "DeepSpeed does not overlap the communication of pipelines"
    if stage == 0:
        return "ZeRO stage 0 reduces all gradients after the backward pass, and has no switch"
    if not engine.zero_overlap_comm():
        # Stage 1 created its gradient hooks for its initial setting. Switched on later, it would not reduce at all.
        return "the job was built with overlap_comm off, so there is nothing to switch off"
    if engine.zero_offload_optimizer() or engine.zero_offload_param():
        return "its switches are not known to be safe to flip with offloading"
    if stage == 3:
        if not hasattr(coordinator, PREFETCH_ATTRIBUTE):
            return lacks("deepspeed", deepspeed.__version__, _NAMED_BUCKET)
        built_without = not getattr(coordinator, PREFETCH_ATTRIBUTE)
        return "the job was built with stage3_prefetch_bucket_size 0: nothing to switch off" if built_without else ""
    if type(optimizer) is not DeepSpeedZeroOptimizer:
        return f"overlap_comm of a {type(optimizer).__name__} is not known to be safe to flip"
    if stage == 1 and not optimizer.contiguous_gradients:
        return "ZeRO stage 1 without contiguous_gradients has its gradient hooks for the sake of overlap_comm alone"
    return ""
