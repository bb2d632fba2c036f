"""Reads a job's configuration (model, buckets, switches), so that runs can be compared.

Read once, on the host, without raising: a version with other names yields fewer facts. Nothing here communicates, waits
for a device or keeps an object alive.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import OverlapMonitor

from ._pytorch_fsdp import PREFETCH, fsdp2_state

Facts = dict[str, Any]

# The parts of DeepSpeed's ZeRO configuration that determine its communication.
_ZERO = (
    "stage", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "contiguous_gradients", "reduce_scatter",
    "allgather_partitions", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
)  # fmt: skip
# The same for Megatron's configurations of the model and of its DDP.
_MEGATRON_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_moe_experts",
    "moe_router_topk", "sequence_parallel", "recompute_granularity", "overlap_p2p_comm", "tp_comm_overlap",
)  # fmt: skip
_MEGATRON_DDP = (
    "bucket_size", "overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "grad_reduce_in_fp32",
    "average_in_collective",
)  # fmt: skip


def tell(monitor: OverlapMonitor, *readers: Callable[[], Facts]) -> None:
    """Add the results of these readers to the record; one that fails adds nothing."""
    for reader in readers:
        with contextlib.suppress(Exception):
            monitor.tell_configuration(reader())


def of_models(models: Sequence[nn.Module]) -> Facts:
    """Names, sizes and wrappers of the models; empty without models."""
    if not models:
        return {}
    facts: Facts = {"model": ", ".join(dict.fromkeys(type(_inner(model)).__name__ for model in models))}
    facts |= of_parameters(parameter for model in models for parameter in model.parameters())
    modules = [module for model in models for module in model.modules()]
    readers = {DistributedDataParallel: _of_ddp, FullyShardedDataParallel: _of_fsdp1, FSDPModule: _of_fsdp2}
    for wrapper, read in readers.items():
        wrapped = [module for module in modules if isinstance(module, wrapper)]
        with contextlib.suppress(Exception):
            facts |= read(wrapped) if wrapped else {}
    return facts


def of_optimizer(optimizer: torch.optim.Optimizer) -> Facts:
    trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {"optimizer": type(optimizer).__name__, **of_parameters(trained)}


def of_parameters(parameters: Iterable[Any]) -> Facts:
    """Number and types of the parameters, and a digest of their shapes: models with equal digests have the same layers.

    A parameter that is split over ranks counts with its full shape, if it has that.
    """
    total, trained, types, shapes = 0, 0, set(), hashlib.sha256()
    for parameter in parameters:
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # DeepSpeed keeps the full shape of ZeRO-3 there
        total += torch.Size(shape).numel()
        trained += torch.Size(shape).numel() if parameter.requires_grad else 0
        types.add(str(parameter.dtype).removeprefix("torch."))
        shapes.update(f"{shape} {parameter.dtype};".encode())
    if not types:
        return {}
    facts = {"parameters": total, "parameter_types": ", ".join(sorted(types)), "shapes": shapes.hexdigest()[:12]}
    return facts if trained == total else {**facts, "trained_parameters": trained}


def of_deepspeed(engine: Any) -> Facts:
    """The model, and the parts of ZeRO's configuration that determine its communication."""
    facts: Facts = {"model": type(engine.module).__name__, **of_parameters(engine.module.parameters())}
    with contextlib.suppress(Exception):
        facts |= _set_of(engine._config.zero_config, _ZERO, "zero_")
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        with contextlib.suppress(Exception):
            facts[name] = getattr(engine, name)()
    return facts


def of_megatron(chunks: Sequence[Any]) -> Facts:
    """The model, and the configuration of Megatron's DDP that determines its communication."""
    facts: Facts = {"model": type(_inner(chunks[0])).__name__, "model_chunks": len(chunks)}
    facts |= of_parameters(parameter for chunk in chunks for parameter in chunk.parameters())
    facts |= _set_of(getattr(chunks[0], "config", None), _MEGATRON_MODEL)
    return facts | _set_of(getattr(chunks[0], "ddp_config", None), _MEGATRON_DDP, "ddp_")


def _set_of(holder: Any, names: Iterable[str], prefix: str = "") -> Facts:
    """The attributes among these that an object has and that are not None."""
    return {f"{prefix}{name}": value for name in names if (value := getattr(holder, name, None)) is not None}


def _inner(model: Any) -> Any:
    """The model without its wrappers."""
    while isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)) or type(model).__name__ in (
        "DistributedDataParallel", "Float16Module", "OptimizedModule",
    ):  # fmt: skip
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            break
        model = inner
    return model


def _of_ddp(modules: Sequence[Any]) -> Facts:
    first = modules[0]
    facts: Facts = {"ddp_bucket_cap_bytes": first.bucket_bytes_cap}
    names = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "broadcast_buffers")
    facts |= {f"ddp_{name}": bool(getattr(first, name)) for name in names if hasattr(first, name)}
    hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in getattr(first, "_comm_hooks", ())]
    return {**facts, "ddp_comm_hook": ", ".join(hooks) or "none"}


def _of_fsdp1(units: Sequence[Any]) -> Facts:
    policy = units[0].mixed_precision
    return {
        "fsdp_units": len(units),
        "fsdp_sharding": units[0].sharding_strategy.name,
        "fsdp_param_dtype": str(getattr(policy, "param_dtype", None)),
        "fsdp_reduce_dtype": str(getattr(policy, "reduce_dtype", None)),
    }


def _of_fsdp2(units: Sequence[Any]) -> Facts:
    prefetched = [len(getattr(fsdp2_state(unit), name, ())) for unit in units for name in PREFETCH]
    facts: Facts = {"fsdp_units": len(units), "fsdp_prefetch": max(prefetched)}
    policy = getattr(fsdp2_state(units[0]), "_mp_policy", None)
    if policy is not None:
        facts |= {f"fsdp_{name}": str(getattr(policy, name, None)) for name in ("param_dtype", "reduce_dtype")}
    return facts
