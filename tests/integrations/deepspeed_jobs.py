"""Small DeepSpeed jobs for the adapter's tests; imported by ranks only, because it imports DeepSpeed."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is loaded

import deepspeed

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

MICRO_BATCH = 4
WIDTH = 16
LAYERS = 4


def set_up(rank: int) -> None:
    """Let DeepSpeed find the process group that the test has made."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    # DeepSpeed would compile a shared-memory all-reduce for inference, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It asks for fast fp16 kernels, which not every CPU has; slow ones do for a test.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo", verbose=False)


def config(stage: int, micro_batches: int = 1, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    """A configuration with several buckets of gradients, and parameters that ZeRO-3 gathers layer by layer."""
    zero = {"stage": stage, "reduce_bucket_size": 400, "allgather_bucket_size": 100_000}
    if stage in (1, 2):
        zero["overlap_comm"] = True
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": WIDTH * WIDTH}
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}  # let go after each use
    zero |= more.pop("zero", {})
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
        **more,
    }
    if dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if dtype == "fp16":
        # The scale doubles after every 4 steps that did not overflow, until one does, and is skipped.
        found["fp16"] = {"enabled": True, "initial_scale_power": 26, "loss_scale_window": 4, "hysteresis": 1}
    return found


def layers() -> list[nn.Module]:
    return [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]


class Training:
    """An engine and its data; ``step`` is one optimizer step, all its micro-batches."""

    def __init__(self, rank: int, settings: dict[str, Any], stages: int = 0) -> None:
        torch.manual_seed(0)
        if stages:
            from deepspeed.pipe import PipelineModule

            net: nn.Module = PipelineModule(
                layers=layers(), num_stages=stages, loss_fn=_loss, partition_method="uniform"
            )
        else:
            net = nn.Sequential(*layers())
        self.engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=settings)
        self.losses: list[float] = []
        self.dtype = torch.float32
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if name in settings:
                self.dtype = dtype
        self._pipeline = bool(stages)
        self._data = torch.Generator().manual_seed(100 + (0 if stages else rank))

    def batch(self) -> torch.Tensor:
        return torch.randn(MICRO_BATCH, WIDTH, generator=self._data).to(self.dtype)

    def step(self) -> None:
        if self._pipeline:
            loss = self.engine.train_batch(iter(lambda: (self.batch(), self.batch()), None))
            self.losses.append(float(loss))
            return
        for _ in range(self.engine.gradient_accumulation_steps()):
            self.micro_step()

    def micro_step(self) -> None:
        loss = self.engine(self.batch()).float().square().mean()
        self.engine.backward(loss)
        self.engine.step()
        self.losses.append(loss.item())

    def digest(self) -> str:
        """Equal for bit-identical weights and losses."""
        found = hashlib.sha256(repr(self.losses).encode())
        for parameter in self.engine.module.parameters():
            local = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3: this rank's shard
            found.update(local.detach().float().contiguous().numpy().tobytes())
        return found.hexdigest()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).float().square().mean()


def switch_of(engine: Any) -> Any:
    """The value that the native form flips."""
    if engine.zero_optimization_stage() == 3:
        coordinator = engine.optimizer.parameter_offload.param_coordinator
        return coordinator._PartitionedParameterCoordinator__prefetch_bucket_sz
    return getattr(engine.optimizer, "overlap_comm", None)


def limits_of(engine: Any) -> Any:
    """The values that arms change."""
    if engine.zero_optimization_stage() < 3:
        return switch_of(engine)
    coordinator = engine.optimizer.parameter_offload.param_coordinator
    return switch_of(engine), coordinator._PartitionedParameterCoordinator__max_n_available_params
