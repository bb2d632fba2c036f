"""The strategies that torch has itself: DDP, FSDP2, tensor parallelism and pipelines."""

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

from overlap_callbacks.experiments.study.job.building import batches, build, draw_weights, loss_of
from overlap_callbacks.experiments.study.job.precision import half_type, loss_scale
from overlap_callbacks.experiments.study.job.training import LoopTraining, Place, Training
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
