"""The strategies: DDP, FSDP2, tensor parallelism and pipelines of torch, and DeepSpeed's ZeRO-3."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.experiments.study.job.building import batches, build, count_weights, draw_weights, loss_of
from overlap_callbacks.experiments.study.job.training import HALF, LoopTraining, Training, optimizer_of
from overlap_callbacks.experiments.study.models import JobSpec

# DDP's own bucket size, and the minimum number of buckets of a model: a shrunk one would have a single bucket, which
# nothing overlaps.
_BUCKET_BYTES, _BUCKETS = 25 * 2**20, 8
# Micro-batches of a step per pipeline stage: with one, stages would be idle most of the time.
MICRO_BATCHES_PER_STAGE = 2


def ddp(spec: JobSpec, device: torch.device) -> Training:
    """Distributed data parallel: gradients are all-reduced in buckets during the backward pass."""
    with device:
        module = build(spec.model)
    draw_weights(module, dist.get_rank())
    size = sum([parameter.numel() * parameter.element_size() for parameter in module.parameters()])
    wrapped = DistributedDataParallel(module, bucket_cap_mb=min(_BUCKET_BYTES, size / _BUCKETS) / 2**20)
    return LoopTraining(spec, device, wrapped, _own_data(spec, device))


def fsdp2(spec: JobSpec, device: torch.device) -> Training:
    """Fully sharded: weights are gathered block by block, gradients reduced and scattered."""
    mesh = init_device_mesh(device.type, (spec.ranks,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=HALF.get(spec.configuration.precision))
    with torch.device("meta"):  # no rank ever holds the whole model
        module = build(spec.model)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    _allocate(module, device)
    return LoopTraining(spec, device, module, _own_data(spec, device), casts=False)  # the policy casts


def tensor_parallel(spec: JobSpec, device: torch.device) -> Training:
    """Tensor parallel: attention is split by heads, the MLP by its width; all ranks see the same batch."""
    mesh = init_device_mesh(device.type, (spec.ranks,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        module = build(spec.model)
    columns, rows = ("attention.query", "attention.key", "attention.value", "mlp.up"), ("attention.out", "mlp.down")
    for block in module.blocks:
        gated = getattr(block.mlp, "gate", None) is not None
        plan: dict[str, Any] = {name: ColwiseParallel() for name in (*columns, *(["mlp.gate"] if gated else []))}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in rows})
    _allocate(module, device)
    training = LoopTraining(spec, device, module, batches(spec.model, spec.configuration.batch, 0, device))
    training.samples_per_step = spec.configuration.batch
    return training


class Pipeline(LoopTraining):
    """Pipeline parallel: each rank has a stage of the blocks, and alternates forward and backward passes."""

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        blocks, rank, ranks = spec.model.num_blocks, dist.get_rank(), spec.ranks
        with torch.device("meta"):
            module = build(spec.model, range(rank * blocks // ranks, (rank + 1) * blocks // ranks))
        _allocate(module, device)
        micro_batches = MICRO_BATCHES_PER_STAGE * ranks
        samples = spec.configuration.batch * micro_batches
        super().__init__(spec, device, module, batches(spec.model, samples, 0, device))
        self.samples_per_step = samples
        stage, scale = PipelineStage(module, rank, ranks, device), self._scale
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda out, target: loss_of(out, target) * scale)

    def step(self) -> None:
        inputs, targets = next(self.data)
        first, last = self.rank == 0, self.rank == self.spec.ranks - 1
        losses: list[torch.Tensor] = []
        with self.casting():
            self._schedule.step(
                *([inputs] if first else []), target=targets if last else None, losses=losses if last else None
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        if losses:
            self.losses.append(torch.stack([loss.detach() for loss in losses]).mean() / self._scale)

    def attach(self, steps_done: int, **options: Any) -> Any:
        from overlap_callbacks.integrations.pytorch import attach

        return attach(self.optimizer, pipeline=self._schedule, start_step=steps_done, **options)


def _allocate(module: nn.Module, device: torch.device) -> None:
    module.to_empty(device=device)
    draw_weights(module, dist.get_rank())


def _own_data(spec: JobSpec, device: torch.device) -> Any:
    return batches(spec.model, spec.configuration.batch, dist.get_rank(), device)


# -- ZeRO-3

# DeepSpeed's default sizes, in elements, and the share of a shrunk model that replaces them.
_BUCKET, _PREFETCH, _PERSISTENT = 500_000_000, 50_000_000, 100_000
_SMALL_MODEL = 50_000_000


class Zero3(Training):
    """ZeRO-3: weights, gradients and moments are split over ranks; weights are gathered before use."""

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        torch.cuda.empty_cache()
        import deepspeed

        if device.type == "cpu":
            # Otherwise it compiles a shared-memory all-reduce for inference, for a minute.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(verbose=False)
        config = _config(spec)
        with deepspeed.zero.Init(config_dict_or_path=config):  # no rank ever holds the whole model
            module = build(spec.model)
        draw_weights(module, self.rank)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer_of(spec, list(module.parameters())), config=config
        )
        self._type = next(module.parameters()).dtype
        self._data = _own_data(spec, device)

    def step(self) -> None:
        inputs, targets = next(self._data)
        if inputs.is_floating_point():
            inputs = inputs.to(self._type)
        loss = loss_of(self._engine(inputs), targets)
        self._engine.backward(loss)
        self._engine.step()
        self.losses.append(loss.detach())

    def attach(self, steps_done: int, **options: Any) -> Any:
        from overlap_callbacks.integrations.deepspeed import attach

        return attach(self._engine, **options)


def _config(spec: JobSpec) -> dict[str, Any]:
    weights = count_weights(spec.model)
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": True}
    if weights < _SMALL_MODEL:
        # With the default sizes, a small model would be one bucket, and stay gathered.
        zero |= {
            "reduce_bucket_size": max(1, weights // 8),
            "stage3_prefetch_bucket_size": max(1, weights // 8),
            "stage3_param_persistence_threshold": min(_PERSISTENT, max(1, weights // 1000)),
            "stage3_max_live_parameters": max(1, weights // 2),
            "stage3_max_reuse_distance": max(1, weights // 4),
        }
    else:
        zero |= {"reduce_bucket_size": _BUCKET, "stage3_prefetch_bucket_size": _PREFETCH}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.configuration.batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
    }
    if spec.configuration.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if spec.configuration.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 1024.0}
    return config


STRATEGIES = {"ddp": ddp, "fsdp2": fsdp2, "tp": tensor_parallel, "pp": Pipeline, "zero3": Zero3}
