"""The strategies: DDP, FSDP2, tensor parallelism and pipelines of torch, and DeepSpeed's ZeRO-3."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.experiments.study.job.building import batches, build, count_weights, draw_weights, loss_of
from overlap_callbacks.experiments.study.job.training import (
    LoopTraining,
    Place,
    Training,
    half_type,
    loss_scale,
    optimizer_of,
)
from overlap_callbacks.experiments.study.job_spec import JobSpec

# DDP's own bucket, and the number of buckets that a model has at least: a shrunk one would have a single bucket, which
# nothing overlaps with.
_BUCKET_BYTES, _BUCKETS = 25 * 2**20, 8
# Micro-batches of a step for each stage of a pipeline: with one, stages would stand idle most of the time.
MICRO_BATCHES_PER_STAGE = 2


def ddp(spec: JobSpec, place: Place) -> Training:
    """Distributed data parallel: gradients are all-reduced in buckets during the backward pass."""
    module = _on_device(spec, place)
    size = sum([parameter.numel() * parameter.element_size() for parameter in module.parameters()])
    wrapped = DistributedDataParallel(module, bucket_cap_mb=min(_BUCKET_BYTES, size / _BUCKETS) / 2**20)
    return LoopTraining(spec, place, wrapped, _own_data(spec, place))


def fsdp2(spec: JobSpec, place: Place) -> Training:
    """Fully sharded: weights are gathered block by block, gradients reduced and scattered."""
    mesh = init_device_mesh(place.device.type, (place.ranks,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=half_type(spec.configuration.precision))
    with torch.device("meta"):  # no rank ever holds the whole model
        module = build(spec.model)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    _allocate(module, place)
    return _Fsdp2(spec, place, module, _own_data(spec, place))


class _Fsdp2(LoopTraining):
    """Its policy casts: there is no autocast beside it."""

    def casting(self) -> Any:
        return nullcontext()


def tensor_parallel(spec: JobSpec, place: Place) -> Training:
    """Tensor parallel: attention is split by heads, the MLP by its width; all ranks see the same batch."""
    mesh = init_device_mesh(place.device.type, (place.ranks,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        module = build(spec.model)
    columns, rows = ("attention.query", "attention.key", "attention.value", "mlp.up"), ("attention.out", "mlp.down")
    for block in module.blocks:
        gated = getattr(block.mlp, "gate", None) is not None
        plan: dict[str, Any] = {name: ColwiseParallel() for name in (*columns, *(["mlp.gate"] if gated else []))}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in rows})
    _allocate(module, place)
    training = LoopTraining(spec, place, module, batches(spec.model, spec.configuration.batch, 0, place.device))
    training.samples_per_step = spec.configuration.batch
    return training


def pipeline(spec: JobSpec, place: Place) -> Training:
    """Pipeline parallel: each rank has a stage of the blocks, and runs one forward and one backward pass in turn."""
    return _Pipeline(spec, place)


class _Pipeline(LoopTraining):
    def __init__(self, spec: JobSpec, place: Place) -> None:
        blocks, rank, ranks = spec.model.num_blocks, place.rank, place.ranks
        with torch.device("meta"):
            module = build(spec.model, range(rank * blocks // ranks, (rank + 1) * blocks // ranks))
        _allocate(module, place)
        micro_batches = MICRO_BATCHES_PER_STAGE * ranks
        samples = spec.configuration.batch * micro_batches
        super().__init__(spec, place, module, batches(spec.model, samples, 0, place.device))
        self.samples_per_step = samples
        stage = PipelineStage(module, rank, ranks, place.device)
        scale = loss_scale(spec.configuration.precision)
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda out, target: loss_of(out, target) * scale)
        self._scale = scale

    def step(self) -> None:
        inputs, targets = next(self.data)
        first, last = self.place.rank == 0, self.place.rank == self.place.ranks - 1
        losses: list[torch.Tensor] = []
        with self.casting():
            if last:
                self._schedule.step(*([inputs] if first else []), target=targets, losses=losses)
            else:
                self._schedule.step(*([inputs] if first else []))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if losses:
            self.losses.append(torch.stack([loss.detach() for loss in losses]).mean() / self._scale)

    def attach(self, steps_done: int, **options: Any) -> Any:
        from overlap_callbacks.integrations.pytorch import attach

        return attach(self.optimizer, pipeline=self._schedule, start_step=steps_done, **options)


def _on_device(spec: JobSpec, place: Place) -> nn.Module:
    with place.device:
        module = build(spec.model)
    draw_weights(module, place.rank)
    return module


def _allocate(module: nn.Module, place: Place) -> None:
    module.to_empty(device=place.device)
    draw_weights(module, place.rank)


def _own_data(spec: JobSpec, place: Place) -> Any:
    return batches(spec.model, spec.configuration.batch, place.rank, place.device)


# -- ZeRO-3

# DeepSpeed's own sizes, in elements, and the part of a shrunk model that takes their place.
_BUCKET, _PREFETCH, _PERSISTENT = 500_000_000, 50_000_000, 100_000
_SMALL_MODEL = 50_000_000


class Zero3(Training):
    """An engine.

    Args:
        spec: the job.
        place: of this rank.
    """

    def __init__(self, spec: JobSpec, place: Place) -> None:
        super().__init__(spec, place)
        import deepspeed

        on_host = place.device.type == "cpu"
        if on_host:
            # It would compile a shared-memory all-reduce for inference, for a minute.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(verbose=False)
        config = _config(spec)
        with deepspeed.zero.Init(config_dict_or_path=config):  # no rank ever holds the whole model
            module = build(spec.model)
        draw_weights(module, place.rank)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer_of(spec, list(module.parameters())), config=config
        )
        self._type = next(module.parameters()).dtype
        self._data = batches(spec.model, spec.configuration.batch, place.rank, place.device)

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
        # With the usual sizes, all of a small model would be one bucket, and stay gathered.
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


def zero3(spec: JobSpec, place: Place) -> Training:
    """ZeRO-3: weights, gradients and moments are split over ranks; weights are gathered ahead of use."""
    torch.cuda.empty_cache()
    return Zero3(spec, place)


STRATEGIES = {"ddp": ddp, "fsdp2": fsdp2, "tp": tensor_parallel, "pp": pipeline, "zero3": zero3}
