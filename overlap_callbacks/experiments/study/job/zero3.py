"""ZeRO-3 by DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch

from overlap_callbacks.experiments.study.job.building import batches, build, count_weights, draw_weights, loss_of
from overlap_callbacks.experiments.study.job.training import Place, Training, optimizer_of
from overlap_callbacks.experiments.study.job_spec import JobSpec

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
