"""FSDP without overlap, by its own parts: its communication streams are the compute stream for the step.

Both FSDPs overlap because they issue their collectives and copies on streams of their own. With the compute stream in
the place of each, the device runs all of them in the order of issue. The streams are attributes of FSDP's state, read
anew at each use, and so can be exchanged between steps and put back.

On a machine without an accelerator streams are placeholders and Gloo's collectives block: there this form changes
nothing, and there is nothing to change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from overlap_callbacks.gate.native import OverlapSwitch

from ._versions import missing_of, torch_lacks

_FSDP1 = ("_unshard_stream", "_pre_unshard_stream", "_post_backward_stream", "_all_reduce_stream")
_FSDP2 = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")


class FsdpStreams(OverlapSwitch):
    """The compute stream in place of FSDP's communication streams.

    Args:
        modules: FSDP1's or FSDP2's, all of them.

    Raises:
        ValueError: some of their communication does not run on these streams; with the reason.
    """

    name = "fsdp_streams"

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        for group in _param_groups(modules):
            if getattr(group, "unshard_async_op", False):
                raise ValueError("sequential='native' cannot reach all-gathers of _set_unshard_async_op: use 'gate'")
            if getattr(group, "_all_reduce_hook_stream", None) is not None:
                raise ValueError("sequential='native' cannot reach a stream of set_all_reduce_hook: use 'gate'")
        self._modules = modules
        self._replaced: list[tuple[Any, str, Any]] = []  # holder, attribute, FSDP's own stream

    def disable(self) -> None:
        for holder, handle, names in list(_holders(self._modules)):  # all looked at before one is changed
            compute = handle.current_stream()
            for name in names:
                own = getattr(holder, name)
                self._replaced.append((holder, name, own))
                if own != compute:
                    compute.wait_stream(own)  # nothing that FSDP left on its stream is overtaken
                setattr(holder, name, compute)
                if getattr(holder, name) != compute:
                    raise RuntimeError(f"FSDP's {name} could not be exchanged")
        if not self._replaced:
            known = torch_lacks("streams of FSDP's under the names known")
            raise RuntimeError(f"FSDP has no streams yet: the model has not run, or {known}")

    def restore(self) -> None:
        while self._replaced:
            holder, name, own = self._replaced.pop()
            compute = getattr(holder, name)
            if own != compute:
                own.wait_stream(compute)
            setattr(holder, name, own)


def _holders(modules: Iterable[nn.Module]) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    """What holds the streams, with its device's torch module and the attributes' names; each holder once."""
    holders = {}
    for module in modules:
        if isinstance(module, FullyShardedDataParallel):
            holders[id(module)] = (module, "_device_handle", _FSDP1)
        else:
            context = _fsdp2_state(module)._comm_ctx
            holders[id(context)] = (context, "device_handle", _FSDP2)
    for holder, handle, names in holders.values():
        if any(hasattr(holder, name) for name in names):  # made when the model first runs
            missing = missing_of(holder, handle, *names)
            if missing:
                raise RuntimeError(torch_lacks(" and no ".join(missing)))
            yield holder, getattr(holder, handle), names


def _fsdp2_state(module: Any) -> Any:
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


def _param_groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in modules:
        if isinstance(module, FSDPModule):
            state = _fsdp2_state(module)
            several = getattr(state, "_fsdp_param_groups", None)  # torch 2.12; one before
            yield from several if several is not None else filter(None, [state._fsdp_param_group])


def data_groups(modules: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """The groups over which FSDP shards and replicates."""
    modules = list(modules)
    found = []
    for module in modules:
        if isinstance(module, FullyShardedDataParallel):
            found += [getattr(module, "process_group", None), getattr(module, "_inter_node_pg", None)]
    with contextlib.suppress(ValueError):  # of a torch that keeps them elsewhere: then their roles are not known
        for group in _param_groups(modules):
            mesh_info = getattr(group, "mesh_info", None)
            found += [getattr(mesh_info, name, None) for name in ("shard_process_group", "replicate_process_group")]
    return [group for group in found if group is not None]
