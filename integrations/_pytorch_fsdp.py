"""FSDP's switches between steps: its streams, so that nothing overlaps, and FSDP2's own options.

Both FSDPs overlap because they issue their collectives and copies on separate streams. If all of these are the compute
stream, the device runs everything in the order of issue. The streams are attributes of FSDP's state, which reads them
at every use, so they can be replaced between steps and restored. Without an accelerator, streams are placeholders and
Gloo's collectives block: the switch has no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from overlap_callbacks.gate.arms import Prefetch, Reshard
from overlap_callbacks.gate.switches import AttributeSwitch, OverlapSwitch, RefusedError

from .base import check_version, missing_of, torch_lacks

# Attributes that hold communication streams.
FSDP1_STREAMS = ("_unshard_stream", "_pre_unshard_stream", "_post_backward_stream", "_all_reduce_stream")
FSDP2_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
_COPY_STREAM = "all_gather_copy_in_stream"
# Attributes of FSDP2's state with the modules to prefetch.
PREFETCH = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
# Attribute of a mesh with the group that its reduce-scatters alone use (torch 2.13).
SEPARATE_GROUP = "reduce_scatter_process_group"


class FsdpStreams(OverlapSwitch):
    """Replaces the communication streams of these modules (all FSDP modules of the job) by the compute stream.

    Raises a ValueError if some of their communication does not run on these streams.
    """

    name = "fsdp_streams"

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        for group in param_groups_of(modules):
            if getattr(group, "unshard_async_op", False):
                raise ValueError("sequential='native' cannot reach all-gathers of _set_unshard_async_op: use 'gate'")
            if getattr(group, "_all_reduce_hook_stream", None) is not None:
                raise ValueError("sequential='native' cannot reach a stream of set_all_reduce_hook: use 'gate'")
        self._modules = modules
        self._replaced: list[tuple[Any, str, Any]] = []  # holder, attribute, FSDP's own stream

    def disable(self) -> None:
        for holder, handle, names in list(_holders(self._modules)):  # a list: check all before changing one
            compute = handle.current_stream()
            for name in names:
                own = getattr(holder, name)
                self._replaced.append((holder, name, own))
                if own != compute:
                    compute.wait_stream(own)  # the step must not overtake what FSDP left on its stream
                setattr(holder, name, compute)
                if getattr(holder, name) != compute:
                    raise RefusedError(f"FSDP's {name} could not be exchanged [OC138]")
        if not self._replaced:
            known = torch_lacks("streams of FSDP's under the names known")
            raise RefusedError(f"FSDP has no streams yet: the model has not run, or {known} [OC139]")

    def restore(self) -> None:
        while self._replaced:
            holder, name, own = self._replaced.pop()
            compute = getattr(holder, name)
            if own != compute:
                own.wait_stream(compute)
            setattr(holder, name, own)


class CopyStreams:
    """The streams on which FSDP copies into its all-gathers: they compute, and issue none.

    FSDP creates them when the model first runs, so they are looked up each time.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [module for module in modules if isinstance(module, (FSDPModule, FullyShardedDataParallel))]

    def __iter__(self) -> Iterator[Any]:
        found = {}
        for module in self._modules:
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            for holder, name in ((module, "_pre_unshard_stream"), (getattr(state, "_comm_ctx", None), _COPY_STREAM)):
                stream = getattr(holder, name, None)
                if stream is not None:
                    found[id(stream)] = stream
        return iter(found.values())


def _holders(modules: Iterable[nn.Module]) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    """Each object that holds streams, once, with its device's torch module and the attributes' names."""
    holders = {}
    for module in modules:
        if isinstance(module, FullyShardedDataParallel):
            holders[id(module)] = (module, "_device_handle", FSDP1_STREAMS)
        else:
            context = fsdp2_state(module)._comm_ctx
            holders[id(context)] = (context, "device_handle", FSDP2_STREAMS)
    for holder, handle, names in holders.values():
        if any(hasattr(holder, name) for name in names):  # FSDP creates them when the model first runs
            check_version("torch", str(torch.__version__), missing_of(holder, handle, *names))
            yield holder, getattr(holder, handle), names


def fsdp2_state(module: Any) -> Any:
    missing = missing_of(type(module), "_get_fsdp_state")
    state = None if missing else module._get_fsdp_state()
    missing = missing or missing_of(state, "_comm_ctx")
    if not (missing or hasattr(state, "_fsdp_param_groups")):
        missing = missing_of(state, "_fsdp_param_group")
    if missing:
        raise ValueError(
            f"sequential='native' for fully_shard needs torch 2.8 or later, found {torch.__version__}: use 'gate' "
            f"({torch_lacks(missing[0])})"
        )
    return state


def param_groups_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The parameter groups that FSDP2 modules gather and reduce together."""
    for module in modules:
        if isinstance(module, FSDPModule):
            state = fsdp2_state(module)
            groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12; before, there was one group
            yield from groups if groups is not None else filter(None, [state._fsdp_param_group])


def data_groups(modules: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    modules = list(modules)
    candidates = []
    for module in modules:
        if isinstance(module, FullyShardedDataParallel):
            candidates += [getattr(module, "process_group", None), getattr(module, "_inter_node_pg", None)]
    with contextlib.suppress(ValueError):  # a torch that keeps them elsewhere: their dimension stays unknown
        for group in param_groups_of(modules):
            mesh_info = getattr(group, "mesh_info", None)
            names = ("shard_process_group", "replicate_process_group")
            candidates += [getattr(mesh_info, name, None) for name in names]
    return [group for group in candidates if group is not None]


# -- FSDP2's own options that can be switched between steps: prefetching, and freeing after the forward pass


class PrefetchSwitch(AttributeSwitch):
    """Makes each sharded module prefetch the parameters of the next ones, in the order in which the model holds them.

    If the model runs its modules in another order, results are the same, but prefetching is of little use. Raises a
    ValueError if the models have fewer than two such modules, or torch keeps them elsewhere.
    """

    name = "set_modules_to_forward_prefetch, set_modules_to_backward_prefetch"
    only_between_steps = False  # a read in mid-step only affects what is gathered next

    def __init__(self, models: Sequence[nn.Module], arm: Prefetch) -> None:
        super().__init__()
        self._arm = arm
        self._modules = _sharded(models)
        if len(self._modules) < 2:
            raise ValueError("fully_shard has sharded one module only: there is no other to prefetch")
        self._states = [fsdp2_state(module) for module in self._modules]
        self._turned: list[Any] = []  # values that it has set
        _expect(self._states[0], *PREFETCH)
        is_default = not any([getattr(state, name) for state in self._states for name in PREFETCH])
        if is_default and not (arm.forward or arm.backward):
            raise ValueError("no module prefetches others already: nothing would change")

    def apply(self) -> None:
        self._turned.clear()
        for state in self._states:
            for name in PREFETCH:
                self.keep(state, name)
        for place, module in enumerate(self._modules):
            module.set_modules_to_forward_prefetch(self._modules[place + 1 : place + 1 + self._arm.forward])
            first = max(0, place - self._arm.backward)
            module.set_modules_to_backward_prefetch(self._modules[first:place][::-1])
        self._turned += [getattr(state, name) for state, name, _ in self._before]

    def restore(self) -> None:
        """Restore what the user has not set anew meanwhile: an arm that is kept is turned for long."""
        if self._turned:
            both = zip(self._before, self._turned, strict=True)
            self._before = [kept for kept, turned in both if getattr(*kept[:2]) is turned]
        self._turned.clear()
        super().restore()


class ReshardSwitch(AttributeSwitch):
    """Frees gathered parameters after the forward pass, or keeps them until the backward pass has used them.

    Raises a ValueError if the models have no sharded module, all are so already, or torch keeps this elsewhere.
    """

    name = "set_reshard_after_forward"
    only_between_steps = False  # gathered parameters are not gathered again

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


class SharedReduceScatterSwitch(AttributeSwitch):
    """Makes reduce-scatters use the group of the all-gathers, as if the job had no separate group for them.

    Raises a ValueError if the job has none, or torch has no such option.
    """

    name = "set_separate_reduce_scatter_group"
    begins_with_communication = True

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        meshes = [getattr(group, "mesh_info", None) for group in param_groups_of(_sharded(models))]
        _expect(meshes[0], SEPARATE_GROUP)
        self._meshes = {id(mesh): mesh for mesh in meshes if getattr(mesh, SEPARATE_GROUP, None) is not None}
        if not self._meshes:
            raise ValueError("the job has not called set_separate_reduce_scatter_group: nothing would change")

    def apply(self) -> None:
        for mesh in self._meshes.values():
            self.set(mesh, SEPARATE_GROUP, None)


def _sharded(models: Sequence[nn.Module]) -> list[Any]:
    modules = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("the model has no module that fully_shard has sharded")
    return modules


def _expect(holder: Any, *names: str) -> None:
    missing = missing_of(holder, *names)
    if missing:
        raise ValueError(torch_lacks(" and no ".join(missing)))
