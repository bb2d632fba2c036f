"""A step of DeepSpeed's ZeRO-1 that can be repeated, for the race check.

After a backward pass ZeRO-1 has the gradients that its optimizer would read in ``averaged_gradients``: this rank's part
of each parameter's. ``engine.step()`` takes them away, so that between two steps there are none. A repetition leaves
them there, beside counters of micro-steps and buckets. All of that is put back.
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

from overlap_callbacks.monitor.race.held_state import SteppedAnOptimizerError, modules_of
from overlap_callbacks.monitor.race.repeatable import RepeatableStep

from .base import patch

# Values that are put back as they are. Tensors and objects are not: ZeRO changes them in a step alone.
_PLAIN = (type(None), bool, int, float, str)


class EngineStep(RepeatableStep):
    """Forward and backward of an engine on a batch that the user holds.

    Args:
        run: the user's function: ``engine.backward(engine(batch))``, once. It reduces its gradients, whatever number of
            micro-batches a step has.
        engine: with ZeRO-1.
    """

    def __init__(self, run: Callable[[], Any], engine: DeepSpeedEngine) -> None:
        self._run = run
        self._engine = engine
        self._held = _Held([])

    def refusal(self) -> str:
        engine, optimizer = self._engine, self._engine.optimizer
        if isinstance(engine, PipelineEngine):
            return "a step of a pipeline cannot be repeated"
        if engine.zero_optimization_stage() != 1 or not isinstance(optimizer, DeepSpeedZeroOptimizer):
            return "of DeepSpeed, steps of ZeRO-1 alone can be repeated"
        features = {
            "offload of the optimizer": optimizer.cpu_offload,
            "experts": engine.has_moe_layers,
            "DeepCompile": _says(engine, "is_deepcompile_enabled"),
            "ZenFlow": getattr(engine, "zenflow", False),
            "random-LTD": _says(engine, "random_ltd_enabled"),
            "wall_clock_breakdown": _says(engine, "wall_clock_breakdown"),
            "the FLOPs profiler": _says(engine, "flops_profiler_enabled"),
            "managed_gradient_accumulation=false": not _says(engine, "managed_gradient_accumulation", absent=True),
            "Muon": "muon" in type(optimizer.optimizer).__name__.lower(),
        }
        used = [name for name, is_used in features.items() if is_used]
        if used:
            return f"a step of ZeRO-1 with {' and '.join(used)} cannot be repeated"
        return ""

    def run(self) -> None:
        engine, optimizer = self._engine, self._engine.optimizer
        self._held = _Held(_holders(engine), [*engine.module.parameters()])
        with ExitStack() as stack:
            for holder in (engine, optimizer):
                stack.callback(patch(holder, "step", _refuse))
            engine.set_gradient_accumulation_boundary(True)
            try:
                self._run()
            except BaseException:
                self._held.put_back()
                raise

    def put_back(self) -> None:
        self._held.put_back()

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


def _says(engine: DeepSpeedEngine, name: str, *, absent: bool = False) -> bool:
    """What an engine says of itself; versions that cannot be asked are as ``absent``."""
    asked: Callable[[], bool] = getattr(engine, name, lambda: absent)
    return bool(asked())


def _holders(engine: DeepSpeedEngine) -> list[tuple[Any, bool]]:
    """Objects that forward and backward write to, and whether their containers are put back too."""
    optimizer = engine.optimizer
    inner = [getattr(optimizer, "_backward_hook_state", None), optimizer.loss_scaler, engine.tput_timer]
    inner += [*getattr(optimizer, "ipg_buckets", {}).values()]
    holders = [optimizer, *[holder for holder in inner if hasattr(holder, "__dict__")]]
    # The engine is a module: its containers hold modules and hooks, which are the user's.
    return [(engine, False), *[(holder, True) for holder in holders]]


class _Held:
    """Plain values and containers of some objects, and gradients accumulated beside ``.grad``, as they are now.

    Args:
        holders: the objects, and whether their containers are put back too.
        parameters: with the gradients.
    """

    def __init__(self, holders: Sequence[tuple[Any, bool]], parameters: Sequence[torch.Tensor] = ()) -> None:
        self._holders = [
            (holder, whole, {name: _held(value) for name, value in vars(holder).items() if _counts(value, whole)})
            for holder, whole in holders
        ]
        self._accumulated = [(p, p.grad_accum) for p in parameters if hasattr(p, "grad_accum")]

    def put_back(self) -> None:
        for holder, whole, values in self._holders:
            for name in [name for name, value in vars(holder).items() if _counts(value, whole) and name not in values]:
                delattr(holder, name)
            for name, held in values.items():
                vars(holder)[name] = _restored(held)
        for parameter, gradient in self._accumulated:
            parameter.grad_accum = gradient


class _Container:
    """A dictionary or list, and what it held.

    Args:
        container: the very object.
    """

    def __init__(self, container: Any) -> None:
        self._container = container
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        self._items = [(key, _held(container[key])) for key in keys]

    def restored(self) -> Any:
        self._container.clear()
        for key, held in self._items:
            if isinstance(self._container, dict):
                self._container[key] = _restored(held)
            else:
                self._container.append(_restored(held))
        return self._container


def _counts(value: Any, whole: bool) -> bool:
    return isinstance(value, (*_PLAIN, dict, list)) if whole else isinstance(value, _PLAIN)


def _held(value: Any) -> Any:
    return _Container(value) if type(value) in (dict, list) else value


def _restored(held: Any) -> Any:
    return held.restored() if isinstance(held, _Container) else held
