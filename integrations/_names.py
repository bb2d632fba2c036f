"""Where frameworks hold the names of what they communicate: the variables of the functions that issue collectives.

Functions that a version lacks name nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import OverlapMonitor
from overlap_callbacks.gate.names import Buckets, Reader, StepNames, plain, span

_FSDP1, _FSDP2 = "torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
_PIPELINING = "torch.distributed.pipelining.schedules"
_MEGATRON = "megatron.core"
_ZERO, _PIPE = "deepspeed.runtime.zero", "deepspeed.runtime.pipe.engine:PipelineEngine"

# The variables of a function.
_Variables = Mapping[str, Any]


def tell_names(monitor: OverlapMonitor, models: Iterable[nn.Module]) -> None:
    """Let the monitor name the collectives of these models: all that the job trains."""
    models = list(models)

    def names() -> StepNames:
        ddp = [part for model in models for part in model.modules() if isinstance(part, DistributedDataParallel)]
        return StepNames(READERS, models, [found for model in ddp if (found := ddp_buckets(model)) is not None])

    monitor.name_collectives(names)


def ddp_buckets(model: DistributedDataParallel) -> Buckets | None:
    """The buckets of a DDP model, from what its reducer logs; None until it has ordered them."""
    logger: Any = getattr(model, "logger", None)
    if logger is None:
        return None
    logged = logger._get_ddp_logging_data()
    parameters: dict[nn.Parameter, str] = {}
    for prefix, module in model.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and f"{prefix}.{name}" not in model.parameters_to_ignore:
                parameters.setdefault(parameter, plain(f"{prefix}.{name}"))
    in_order = list(parameters)  # as the reducer numbers them
    text = logged.strs_map.get("rebuilt_per_bucket_param_indices", "")
    buckets = [[int(index) for index in indices.split()] for indices in text.split(",") if indices]
    if not buckets and model.find_unused_parameters:
        buckets = _first_buckets(in_order, logged)
    found = []
    for number, indices in enumerate(buckets):
        own = [in_order[index] for index in indices]
        elements = sum([parameter.numel() for parameter in own])
        found.append((elements, f"bucket {number}: {span([parameters[parameter] for parameter in own])}"))
    group: Any = model.process_group
    return Buckets(group.group_name, found)


def _first_buckets(parameters: list[nn.Parameter], logged: Any) -> list[list[int]]:
    """Those that a reducer keeps where parameters may be unused, as it made them; none if they are others."""
    torch_dist: Any = dist
    cap, sizes = logged.ints_map["bucket_cap_bytes"], logged.strs_map["bucket_sizes"].split(",")
    for limits in ([torch_dist._DEFAULT_FIRST_BUCKET_BYTES, cap], [cap]):
        buckets, _ = torch_dist._compute_bucket_assignment_by_size(parameters, limits, [False] * len(parameters))
        own = [sum([parameters[index].nbytes for index in bucket]) for bucket in buckets]
        if sorted(own) == sorted(map(int, sizes)):
            return list(reversed(buckets))
    return []


def _fsdp2_unit(_: StepNames, variables: _Variables) -> str:
    return variables["self"]._module_fqn or "root"


def _fsdp1_unit(names: StepNames, variables: _Variables) -> str:
    handle = variables.get("handle", variables.get("self"))
    return names.name_of(handle._fully_sharded_module) or "root"


def _module(names: StepNames, variables: _Variables) -> str:
    return names.name_of(variables["self"])


def _weight(names: StepNames, variables: _Variables) -> str:
    return names.name_of(variables["weight"]).removesuffix(".weight")


def _megatron_bucket(names: StepNames, variables: _Variables) -> str:
    buckets = variables["self"].buckets
    return names.bucket([one for bucket in buckets for one in bucket.params_list], buckets[0].bucket_id)


def _zero_bucket(names: StepNames, variables: _Variables) -> str:
    groups, bucket = variables["self"].bit16_groups, variables["bucket"]
    return names.bucket([groups[group][place] for group, place, *_ in bucket.params])


def _zero3_bucket(names: StepNames, variables: _Variables) -> str:
    return names.bucket(variables["params_in_bucket"])


def _zero3_parameters(names: StepNames, variables: _Variables) -> str:
    # A set, whose order differs between ranks: DeepSpeed gathers them by number.
    in_order = sorted(variables["param_group"], key=lambda parameter: parameter.ds_id)
    return span([names.name_of(parameter) for parameter in in_order])


def _of_group(names: StepNames, variables: _Variables) -> str:
    """Tells the optimizer which group of parameters is gathered after its step."""
    names.inner = names.inner or str(variables.get("group_id", ""))  # one of the two functions calls the other
    return ""


def _zero_gather(names: StepNames, variables: _Variables) -> str:
    if not names.inner:
        return ""
    own = variables["self"].bit16_groups[int(names.inner)]
    return f"group {names.inner}: {span([names.name_of(parameter) for parameter in own])}"


# -- pipelines


def _batch(names: StepNames, variables: _Variables) -> str:
    """Tells the schedule what a batch is of: its direction, and how many tensors a micro-batch sends."""
    side = "send" if names.sends else "recv"
    direction = next((one for one in ("fwd", "bwd") if f"{one}_{side}" in (variables["desc"] or "")), "")
    each = sum([side in operation.op.__name__ for operation in variables["p2p_ops"]])
    names.inner = f"{direction} {each}" if direction else ""
    return ""


def _single_stage(names: StepNames, variables: _Variables) -> str:
    direction, _, each = names.inner.partition(" ")
    if not direction:
        return ""
    stage, kind = variables["self"]._stage.stage_index, _message("forward" if direction == "fwd" else "backward", names)
    return f"stage {stage}, {kind} of micro-batch {names.count(kind) // max(1, int(each))}"


def _action(names: StepNames, variables: _Variables) -> str:
    action = variables["action"]
    direction = "forward" if str(action.computation_type).endswith("_F") else "backward"
    return f"stage {action.stage_index}, {_message(direction, names)} of micro-batch {action.microbatch_index}"


def _message(direction: str, names: StepNames) -> str:
    return f"{direction} {'send' if names.sends else 'receive'}"


def _megatron_message(function: str) -> Reader:
    """Of one of Megatron's functions, whose names tell what they send and receive."""
    words = function.split("_")

    def reader(names: StepNames, variables: _Variables) -> str:
        side = "send" if names.sends else "recv"
        direction = words[words.index(side) + 1]
        kind, communicator = _message(direction, names), variables["self"]
        number = names.count(kind)
        if communicator.virtual_pipeline_model_parallel_size is not None:  # chunks take turns
            return f"{kind} {number}"
        return f"stage {communicator.pp_group.rank()}, {kind} of micro-batch {number}"

    return reader


def _megatron_shapes(_: StepNames, variables: _Variables) -> str:
    return f"stage {variables['self'].pp_group.rank()}, shapes"


def _deepspeed_message(kind: str) -> Reader:
    """Of one of a DeepSpeed pipeline's instructions, which may send several tensors of a micro-batch."""

    def reader(names: StepNames, variables: _Variables) -> str:
        number = names.count(kind, again=bool(variables.get("idx")))
        return f"stage {variables['self'].stage_id}, {kind} of micro-batch {number}"

    return reader


def _deepspeed_shapes(_: StepNames, variables: _Variables) -> str:
    return f"stage {variables['self'].stage_id}, shapes"


_MEGATRON_MESSAGES = (
    "recv_forward", "recv_backward", "send_forward", "send_backward", "send_forward_recv_backward",
    "send_backward_recv_forward", "send_forward_recv_forward", "send_backward_recv_backward",
)  # fmt: skip

READERS: dict[str, Reader] = {
    f"{_FSDP2}.unshard": _fsdp2_unit,
    f"{_FSDP2}.post_backward": _fsdp2_unit,
    f"{_FSDP1}._flat_param:FlatParamHandle._all_gather_flat_param": _fsdp1_unit,
    f"{_FSDP1}._runtime_utils:_reduce_grad": _fsdp1_unit,
    f"{_PIPELINING}:_batch_p2p": _batch,
    f"{_PIPELINING}:ScheduleGPipe._step_microbatches": _single_stage,
    f"{_PIPELINING}:Schedule1F1B._step_microbatches": _single_stage,
    f"{_PIPELINING}:_PipelineScheduleRuntime._step_microbatches.<locals>._perform_action": _action,
    f"{_MEGATRON}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync": _megatron_bucket,
    f"{_MEGATRON}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync": _megatron_bucket,
    f"{_MEGATRON}.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward": _weight,
    f"{_ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer.reduce_ipg_grads": _zero_bucket,
    f"{_ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3.__reduce_and_partition_ipg_grads": _zero3_bucket,
    f"{_ZERO}.partitioned_param_coordinator:PartitionedParameterCoordinator.__all_gather_params_": _zero3_parameters,
    "deepspeed.runtime.utils:all_gather_into_tensor_dp_groups": _of_group,
    "deepspeed.runtime.utils:all_gather_dp_groups": _of_group,
    f"{_ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer.step": _zero_gather,
    f"{_PIPE}._exec_send_activations": _deepspeed_message("forward send"),
    f"{_PIPE}._exec_recv_activations": _deepspeed_message("forward receive"),
    f"{_PIPE}._exec_send_grads": _deepspeed_message("backward send"),
    f"{_PIPE}._exec_recv_grads": _deepspeed_message("backward receive"),
    f"{_PIPE}._send_tensor_meta": _deepspeed_shapes,
    f"{_PIPE}._recv_tensor_meta": _deepspeed_shapes,
    f"{_MEGATRON}.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes": _megatron_shapes,
    "torch.nn.modules.module:Module._call_impl": _module,
    **{
        f"{_MEGATRON}.pipeline_parallel.p2p_communication:P2PCommunicator.{name}": _megatron_message(name)
        for name in _MEGATRON_MESSAGES
    },
}
