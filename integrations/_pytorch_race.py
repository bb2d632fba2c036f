"""A repeatable step of a plain PyTorch loop, for the race check; and where its gradients are reduced.

DDP, FSDP2 and torch's ZeRO-1 (``ZeroRedundancyOptimizer``, whose gradients are DDP's) leave the gradients that their
optimizer reads in ``.grad``; each rank compares its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.monitor.race.repeatable import RepeatableStep, local, modules_of

from ._pytorch_fsdp import param_groups_of

# Types of values in a communication hook's state that are restored, or that the hook must not change.
_PLAIN = (type(None), bool, int, float, str, dist.ProcessGroup)


class PlainStep(RepeatableStep):
    """Forward and backward of the user's own loop, by the user's function ``run``.

    ``models``: everything that it trains. ``optimizer``: the one that it steps. ``pipeline``: its schedule, or None.
    """

    def __init__(
        self, run: Callable[[], Any], models: Sequence[nn.Module], optimizer: torch.optim.Optimizer, pipeline: Any
    ) -> None:
        self._run = run
        self._models = models
        self._optimizer = optimizer
        self._pipeline = pipeline
        self._hook_states: list[tuple[Any, dict[str, Any]]] = []

    def refusal(self) -> str:
        modules = self.modules()
        if not self._models:
            return "it needs the model, whose buffers are put back: attach(optimizer, model=model, ...)"
        if self._pipeline is not None:
            return "a step of a pipeline schedule cannot be repeated"
        if any(isinstance(module, FullyShardedDataParallel) for module in modules):
            return "a step of FSDP1 cannot be repeated, since it keeps gradients in places of its own: use fully_shard"
        if getattr(self._optimizer, "_overlap_with_ddp", False):
            return "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps within the backward pass"
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self.parameters().values()):
            return "parameters have post-accumulate-grad hooks, which may step an optimizer within the backward pass"
        return next(filter(None, map(_stateful_hook, _ddp_modules(modules))), "")

    def run(self) -> None:
        self._hook_states = [
            (state, dict(vars(state)))
            for module in _ddp_modules(self.modules())
            for _, state in module._comm_hooks
            if _has_fields(state)
        ]
        self._run()

    def put_back(self) -> None:
        for state, fields in self._hook_states:
            vars(state).clear()
            vars(state).update(fields)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {}
        for number, model in enumerate(self._models):
            prefix = f"model {number}: " if len(self._models) > 1 else ""
            named |= {f"{prefix}{name}": parameter for name, parameter in model.named_parameters()}
        known = {id(parameter) for parameter in named.values()}
        for group_number, group in enumerate(self._optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    named[f"parameter {number} of the optimizer's group {group_number}"] = parameter
        return named

    def modules(self) -> Sequence[nn.Module]:
        return modules_of(self._models)

    def bucket_of(self, parameter: str) -> str:
        place = self._place_of(parameter)
        return "" if place is None else place.bucket

    def collective_of(self, parameter: str, log: StepLog) -> str:
        place = self._place_of(parameter)
        return "" if place is None else place.collective_in(log)

    def _place_of(self, name: str) -> ReducedTogether | None:
        parameter = self.parameters()[name]
        modules = self.modules()
        fsdp = [module for module in modules if isinstance(module, FSDPModule)]
        return next((p for p in (*_ddp_places(modules), *_fsdp_places(fsdp)) if p.holds(parameter)), None)


@dataclass(frozen=True)
class ReducedTogether:
    """Gradients that are reduced together: those of a bucket, or of a group of sharded parameters.

    Attributes:
        bucket: display name.
        parameters: whose gradients they are.
        number: in the order in which the backward pass reduces them, from 0.
        num_places: number of places of the same framework.
        words: one of these is in the name of the operator that reduces them.
        nbytes: bytes that it reads or writes on this rank.
    """

    bucket: str
    parameters: Sequence[Any]
    number: int
    num_places: int
    words: Sequence[str]
    nbytes: int

    def holds(self, parameter: Any) -> bool:
        return any(own is parameter for own in self.parameters)

    def collective_in(self, log: StepLog) -> str:
        """The collective that reduces them: by its position if each has one, else by its size; empty if unknown."""
        of_kind = [
            (index, call)
            for index, call in enumerate(log.collectives)
            if any(word in call.operator for word in self.words)
        ]
        if len(of_kind) == self.num_places:
            return _described(*of_kind[self.number])
        by_size = [(index, call) for index, call in of_kind if self.nbytes in (call.bytes_in, call.bytes_out)]
        return _described(*by_size[0]) if by_size else ""


def _described(index: int, call: Collective) -> str:
    return f"collective {index} of the step, {call} of {max(call.bytes_in, call.bytes_out):,} bytes"


def _ddp_modules(modules: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


def _ddp_places(modules: Sequence[nn.Module]) -> Iterator[ReducedTogether]:
    """The buckets of DDP modules, in the order in which their reducers issue them."""
    buckets = [
        bucket
        for module in _ddp_modules(modules)
        for bucket in cast(Any, module.reducer)._get_zeros_like_grad_buckets()
    ]
    for number, bucket in enumerate(buckets):
        words = ("allreduce", "reduce_scatter")
        yield ReducedTogether(
            f"DDP bucket {bucket.index()}", bucket.parameters(), number, len(buckets), words, bucket.buffer().nbytes
        )


def _fsdp_places(modules: Sequence[FSDPModule]) -> Iterator[ReducedTogether]:
    """The parameter groups of FSDP2 modules; the backward pass takes the last first."""
    groups = list(param_groups_of(cast(Any, modules)))
    for number, group in enumerate(groups):
        parameters = [each.sharded_param for each in group.fsdp_params]
        nbytes = sum([local(parameter).nbytes for parameter in parameters])
        name = getattr(group, "_module_fqn", None)
        bucket = f"FSDP group {name!r}" if name else f"FSDP group {number}, in the order of the modules"
        yield ReducedTogether(bucket, parameters, len(groups) - 1 - number, len(groups), ("reduce_scatter",), nbytes)


def _has_fields(state: Any) -> bool:
    return not isinstance(state, _PLAIN) and hasattr(state, "__dict__")


def _stateful_hook(module: DistributedDataParallel) -> str:
    """Why a communication hook's state cannot be restored; empty if it can, or there is none."""
    for hook, state in getattr(module, "_comm_hooks", ()):
        if isinstance(state, _PLAIN):
            continue
        kept = vars(state).values() if _has_fields(state) else [state]
        if not all(isinstance(value, _PLAIN) for value in kept):
            name = getattr(hook, "__qualname__", repr(hook))
            return f"the communication hook {name} keeps a state that a repeated step would change"
    return ""
