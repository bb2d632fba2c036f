"""FSDP2's own options that can be turned between two steps: prefetching, and freeing after the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from overlap_callbacks.gate.arms import AttributeSwitch, Prefetch, Reshard

from ._pytorch_fsdp import fsdp2_state
from .base import missing_of, torch_lacks

_PREFETCH = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")


class PrefetchSwitch(AttributeSwitch):
    """Has each module gather the parameters of the next ones ahead, in the order in which the model holds them.

    Where the model runs its modules in another order, results are the same, and prefetching is of little use.

    Args:
        models: with modules that ``fully_shard`` has sharded.
        arm: how many modules ahead.

    Raises:
        ValueError: no such module, too few, or a torch that keeps them elsewhere.
    """

    name = "set_modules_to_forward_prefetch, set_modules_to_backward_prefetch"
    only_between_steps = False  # what is read in mid-step only says what is gathered next

    def __init__(self, models: Sequence[nn.Module], arm: Prefetch) -> None:
        super().__init__()
        self._arm = arm
        self._modules = _sharded(models)
        if len(self._modules) < 2:
            raise ValueError("fully_shard has sharded one module only: there is no other to prefetch")
        self._states = [fsdp2_state(module) for module in self._modules]
        _expect(self._states[0], *_PREFETCH)

    def apply(self) -> None:
        for state in self._states:
            for name in _PREFETCH:
                self.keep(state, name)
        for place, module in enumerate(self._modules):
            if self._arm.forward:
                module.set_modules_to_forward_prefetch(self._modules[place + 1 : place + 1 + self._arm.forward])
            if self._arm.backward:
                first = max(0, place - self._arm.backward)
                module.set_modules_to_backward_prefetch(self._modules[first:place][::-1])


class ReshardSwitch(AttributeSwitch):
    """Frees gathered parameters after the forward pass, or keeps them until the backward pass has used them.

    Args:
        models: with modules that ``fully_shard`` has sharded.
        arm: which of them.

    Raises:
        ValueError: no such module, all are so already, or a torch that keeps this elsewhere.
    """

    name = "set_reshard_after_forward"
    only_between_steps = False  # parameters that are gathered are not gathered again

    def __init__(self, models: Sequence[nn.Module], arm: Reshard) -> None:
        super().__init__()
        self._arm = arm
        self._modules = _sharded(models)
        self._states = [fsdp2_state(module) for module in self._modules]
        _expect(self._states[0], "_auto_reshard_after_forward", "_fsdp_param_groups")
        groups = [group for state in self._states for group in state._fsdp_param_groups]
        if groups:
            _expect(groups[0], "post_forward_mesh_info")
        if all((group.post_forward_mesh_info is not None) == arm.after_forward for group in groups):
            already = "freed" if arm.after_forward else "kept"
            raise ValueError(f"parameters are {already} after the forward pass already: nothing would change")

    def apply(self) -> None:
        for state in self._states:
            self.keep(state, "_auto_reshard_after_forward")
            for group in state._fsdp_param_groups:
                self.keep(group, "post_forward_mesh_info")
        for module in self._modules:
            module.set_reshard_after_forward(self._arm.after_forward, recurse=False)


def _sharded(models: Sequence[nn.Module]) -> list[Any]:
    modules = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("the model has no module that fully_shard has sharded")
    return modules


def _expect(holder: Any, *names: str) -> None:
    missing = missing_of(holder, *names)
    if missing:
        raise ValueError(torch_lacks(" and no ".join(missing)))
