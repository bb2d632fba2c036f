"""Small jobs in every way in which PyTorch parallelises by itself, and what tests ask of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import OverlapMonitor
from overlap_callbacks.integrations._pytorch_fsdp import FSDP1_STREAMS, FSDP2_STREAMS, SEPARATE_GROUP
from overlap_callbacks.integrations.pytorch import attach, switchable

WIDTH = 16
WIDE = 384
BATCH = 8
MICRO_BATCHES = 4


@dataclass
class Job:
    """What a training loop steps.

    Attributes:
        models: modules whose parameters this rank trains.
        loss: runs forward and backward on a batch; the loss, where this rank has it.
        pipeline: its schedule, for pipelines.
        data_rank: ranks of equal number see the same data.
        width: of the data.
    """

    models: list[nn.Module]
    loss: Callable[[torch.Tensor], float]
    pipeline: Any = None
    data_rank: int = 0
    width: int = WIDTH
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def backward_of(model: nn.Module) -> Callable[[torch.Tensor], float]:
    def loss(batch: torch.Tensor) -> float:
        found = model(batch).square().mean()
        found.backward()
        return found.item()

    return loss


def layers(number: int, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(number) for layer in (nn.Linear(width, width), nn.Tanh())])


# -- data parallel


def ddp(rank: int, hook: Any = None, **options: Any) -> Job:
    model = DistributedDataParallel(layers(4), bucket_cap_mb=0.002, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return Job([model], backward_of(model), data_rank=rank)


def ddp_with_switchable_hook(rank: int) -> Job:
    return ddp(rank, switchable(fp16_compress_hook))


def compiled_ddp(rank: int) -> Job:
    torch._dynamo.reset()
    # The compiler asks that the first bucket, of 1 MiB, be no larger than the others.
    model = DistributedDataParallel(layers(4, WIDE), bucket_cap_mb=1)
    return Job([model], backward_of(torch.compile(model, backend="aot_eager")), data_rank=rank, width=WIDE)


def sharded(model: nn.Sequential, mesh: DeviceMesh | None, **options: Any) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2(rank: int) -> Job:
    model = sharded(layers(3), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    return Job([model], backward_of(model), data_rank=rank)


def fsdp2_kept(rank: int) -> Job:
    """FSDP2 that keeps gathered parameters until the backward pass."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = sharded(layers(3), mesh=mesh, reshard_after_forward=False)
    return Job([model], backward_of(model), data_rank=rank)


def fsdp2_prefetching(rank: int) -> Job:
    """FSDP2 whose job prefetches two modules ahead."""
    job = fsdp2(rank)
    modules = [module for module in job.models[0].modules() if isinstance(module, FSDPModule)]
    for place, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[place + 1 : place + 3])
    return job


def fsdp2_two_groups(rank: int) -> Job:
    """FSDP2 that reduces gradients in a group of their own."""
    job = fsdp2(rank)
    job.models[0].set_separate_reduce_scatter_group()
    return job


def hsdp(rank: int) -> Job:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = sharded(layers(3), mesh=mesh)
    return Job([model], backward_of(model), data_rank=rank)


def fsdp1(rank: int) -> Job:
    # Without a device of its own FSDP1 asks for an accelerator.
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.FULL_SHARD}
    wrapped = [FullyShardedDataParallel(m, **options) if isinstance(m, nn.Linear) else m for m in layers(3)]
    model = FullyShardedDataParallel(nn.Sequential(*wrapped), **options)
    return Job([model], backward_of(model), data_rank=rank)


# -- tensor parallel


def parallelized(mesh: DeviceMesh) -> nn.Sequential:
    """Two blocks of two linear layers each, split by columns and then by rows."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    model: Any = parallelize_module(layers(4), mesh, plan)
    return model


def tensor_parallel(rank: int) -> Job:
    model = parallelized(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return Job([model], backward_of(model))


def compiled_tensor_parallel(rank: int) -> Job:
    torch._dynamo.reset()
    model = parallelized(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return Job([model], backward_of(torch.compile(model, backend="aot_eager")))


def fsdp2_and_tensor_parallel(rank: int) -> Job:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(parallelized(mesh["tp"]), mesh=mesh["dp"])
    return Job([model], backward_of(model), data_rank=mesh.get_local_rank("dp"))


# -- pipelines


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def pipelined(rank: int, schedule: Any, stages_per_rank: int = 1, **options: Any) -> Job:
    ranks = dist.get_world_size()
    number = ranks * stages_per_rank
    device = torch.device("cpu")
    all_layers = layers(number)
    own = range(rank, number, ranks)
    modules = [all_layers[2 * index : 2 * index + 2] for index in own]
    stages = [PipelineStage(module, index, number, device) for module, index in zip(modules, own, strict=True)]
    several = issubclass(schedule, schedules.PipelineScheduleMulti)
    pipeline = schedule(stages if several else stages[0], MICRO_BATCHES, loss_fn=mean_square, **options)

    def loss(batch: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        first = [batch] if rank == 0 else []
        if rank == ranks - 1:
            pipeline.step(*first, target=torch.zeros_like(batch), losses=losses)
        else:
            pipeline.step(*first)
        return sum(found.item() for found in losses)

    return Job(modules, loss, pipeline=pipeline)


def gpipe(rank: int) -> Job:
    return pipelined(rank, ScheduleGPipe)


def one_f_one_b(rank: int) -> Job:
    return pipelined(rank, Schedule1F1B)


def interleaved(rank: int) -> Job:
    return pipelined(rank, ScheduleInterleaved1F1B, stages_per_rank=2)


# -- training


class Training:
    """A job on its way.

    Args:
        rank: of this process.
        make: the job.
    """

    def __init__(self, rank: int, make: Callable[..., Job], **options: Any) -> None:
        self.job = make(rank, **options)
        self.losses: list[float] = []
        self._data = torch.Generator().manual_seed(100 + self.job.data_rank)

    def step(self) -> None:
        self.job.optimizer.zero_grad()
        self.losses.append(self.job.loss(torch.randn(BATCH, self.job.width, generator=self._data)))
        self.job.optimizer.step()

    def attach(self, **options: Any) -> OverlapMonitor:
        options = {"max_overhead": None, "strict": True, "sinks": [], "model": self.job.models, **options}
        return attach(self.job.optimizer, pipeline=self.job.pipeline, **options)

    def digest(self) -> str:
        """Equal for bit-identical weights and losses."""
        found = hashlib.sha256(repr(self.losses).encode())
        for model in self.job.models:
            for parameter in model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                found.update(local.detach().contiguous().numpy().tobytes())
        return found.hexdigest()


def belongings(job: Job) -> dict[str, Any]:
    """What a job must find as it left it: attributes and hooks of models, optimizer, communication and schedule.

    Attributes are compared by name, and by identity where they are functions, modules, groups or streams; counters and
    buffers change in training anyway.
    """
    found: dict[str, Any] = {"_batch_p2p": schedules._batch_p2p}
    holders: dict[str, Any] = {"optimizer": job.optimizer, "schedule": job.pipeline}
    for number, model in enumerate(job.models):
        for name, module in model.named_modules():
            holders[f"model {number} {name}"] = module
            if hasattr(module, "_get_fsdp_state"):
                holders[f"communication {number} {name}"] = module._get_fsdp_state()._comm_ctx
        if isinstance(model, DistributedDataParallel):
            found["communication hooks"] = list(model._comm_hooks)
            found["logger"] = {**model.logger._get_ddp_logging_data().strs_map}
    for name, holder in holders.items():
        if holder is not None:
            found.update({f"{name}: {attribute}": value for attribute, value in _kept(vars(holder))})
    return found


def _kept(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items():
        if "hook" in name and isinstance(value, dict):
            yield name, dict(value)
        elif callable(value) or isinstance(value, (dist.ProcessGroup, torch.cpu.Stream)):
            yield name, value
        else:
            yield name, None


def fsdp_options(model: nn.Module) -> list[Any]:
    """What arms turn of FSDP1 or FSDP2, in a form that can be compared."""
    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            found.append([id(getattr(module, name, None)) for name in FSDP1_STREAMS])
        elif hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()
            found.append(
                (
                    list(state._states_to_forward_prefetch),
                    list(state._states_to_backward_prefetch),
                    state._auto_reshard_after_forward,
                    [group.post_forward_mesh_info for group in state._fsdp_param_groups],
                    [id(getattr(group.mesh_info, SEPARATE_GROUP, None)) for group in state._fsdp_param_groups],
                    [id(getattr(state._comm_ctx, name)) for name in FSDP2_STREAMS],
                )
            )
    return found
