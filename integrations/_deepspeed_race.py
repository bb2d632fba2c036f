"""A repeatable step of DeepSpeed's ZeRO-1, for the race check.

After a backward pass ZeRO-1 has the gradients that its optimizer would read in ``averaged_gradients``: this rank's part
of each parameter's. ``engine.step()`` removes them. A repetition leaves them there, with counters of micro-steps and
buckets; all of that is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from overlap_callbacks.monitor.race.repeatable import (
    HeldAttributes,
    RepeatableStep,
    SteppedAnOptimizerError,
    modules_of,
)

from .base import patch


class EngineStep(RepeatableStep):
    """Forward and backward of an engine with ZeRO-1 on a batch that the user holds.

    ``run`` is the user's function: ``engine.backward(engine(batch))``, once. It reduces its gradients, however many
    micro-batches a step has.
    """

    def __init__(self, run: Callable[[], Any], engine: DeepSpeedEngine) -> None:
        self._run = run
        self._engine = engine
        self._held = HeldAttributes([])
        self._accumulated: list[tuple[torch.Tensor, Any]] = []  # gradients outside ``.grad``

    def refusal(self) -> str:
        engine, optimizer = self._engine, self._engine.optimizer
        if isinstance(engine, PipelineEngine):
            return "a step of a pipeline cannot be repeated"
        if engine.zero_optimization_stage() != 1 or not isinstance(optimizer, DeepSpeedZeroOptimizer):
            return "of DeepSpeed, steps of ZeRO-1 alone can be repeated"
        features = {
            "offload of the optimizer": optimizer.cpu_offload,
            "experts": engine.has_moe_layers,
            "DeepCompile": _ask(engine, "is_deepcompile_enabled"),
            "ZenFlow": getattr(engine, "zenflow", False),
            "random-LTD": _ask(engine, "random_ltd_enabled"),
            "wall_clock_breakdown": _ask(engine, "wall_clock_breakdown"),
            "the FLOPs profiler": _ask(engine, "flops_profiler_enabled"),
            "managed_gradient_accumulation=false": not _ask(engine, "managed_gradient_accumulation", absent=True),
            "Muon": "muon" in type(optimizer.optimizer).__name__.lower(),
        }
        used = [name for name, is_used in features.items() if is_used]
        if used:
            return f"a step of ZeRO-1 with {' and '.join(used)} cannot be repeated"
        return ""

    def run(self) -> None:
        engine, optimizer = self._engine, self._engine.optimizer
        # Tensors and objects are not restored: ZeRO changes them only in a step.
        self._held = HeldAttributes(_holders(engine))
        self._accumulated = [(p, p.grad_accum) for p in engine.module.parameters() if hasattr(p, "grad_accum")]
        with ExitStack() as stack:
            for holder in (engine, optimizer):
                stack.callback(patch(holder, "step", _refuse))
            engine.set_gradient_accumulation_boundary(True)
            try:
                self._run()
            except BaseException:
                self.put_back()
                raise

    def put_back(self) -> None:
        self._held.put_back()
        for parameter, gradient in self._accumulated:
            parameter.grad_accum = gradient  # type: ignore[attr-defined]

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self._engine.module.named_parameters())

    def modules(self) -> Sequence[nn.Module]:
        return modules_of([self._engine.module])

    def gradients(self) -> Mapping[str, torch.Tensor | None]:
        optimizer = self._engine.optimizer
        names = {id(parameter): name for name, parameter in self._engine.module.named_parameters()}
        found: dict[str, torch.Tensor | None] = {}
        for number, pieces in optimizer.averaged_gradients.items():
            real = [piece for piece in pieces or () if not getattr(piece, "_zero_padding", False)]
            own = [names.get(id(parameter), "") for parameter in optimizer.params_in_partition[number]]
            for place, piece in enumerate(real):
                name = own[place] if place < len(own) else ""
                found[name or f"part {place} of group {number}"] = piece
        return found


def _refuse(*_: Any, **__: Any) -> None:
    raise SteppedAnOptimizerError


def _ask(engine: DeepSpeedEngine, name: str, *, absent: bool = False) -> bool:
    """An engine's answer about itself; versions without the method count as ``absent``."""
    asked: Callable[[], bool] = getattr(engine, name, lambda: absent)
    return bool(asked())


def _holders(engine: DeepSpeedEngine) -> list[tuple[Any, bool]]:
    """Objects that forward and backward write to, in the form that ``HeldAttributes`` takes."""
    optimizer = engine.optimizer
    inner = [getattr(optimizer, "_backward_hook_state", None), optimizer.loss_scaler, engine.tput_timer]
    inner += [*getattr(optimizer, "ipg_buckets", {}).values()]
    holders = [optimizer, *[holder for holder in inner if hasattr(holder, "__dict__")]]
    # The engine is a module: its containers hold modules and hooks, which are the user's.
    return [(engine, False), *[(holder, True) for holder in holders]]
