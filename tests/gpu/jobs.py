"""Jobs that overlap communication with compute, each by a framework's own means, large enough to keep a GPU busy.

On a CPU (``OVERLAP_GPU_TESTS_ON=cpu``) they are small. The tests of this folder train those of ``KINDS``, on two ranks;
those of ``tests/simulated_gpu`` train all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import OverlapMonitor
from tests.gpu.machine import ON_CPU, backend, take_device
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU

# One recorded step, 2 x OSSO timed ones and OSSO profiled ones: steps 4 to 16. DDP's buckets have settled by then.
ONE_WINDOW: dict[str, Any] = {
    "spread": False,
    "every_n_steps": 100,
    "first_step": 4,
    "repeats": 2,
    "steps_per_block": 1,
    "warmup_steps": 0,
    "profiled_steps": 2,
    "max_overhead": None,
    "strict": True,
}
KINDS = ("ddp", "fsdp2", "zero2", "zero3", "megatron")
_PACKAGES = {"zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed", "megatron": "megatron.core"}

# Much to compute for each weight: two ranks on one GPU talk by sockets.
WIDTH, LAYERS, BATCH = (64, 8, 16) if ON_CPU else (1024, 8, 32_768)
BUCKET_MIB = 0.03 if ON_CPU else 8  # of gradients: two layers'
BUCKET_NUMBERS = int(BUCKET_MIB * 2**20 / 4)
# Of Megatron's model: width, sequence, samples, vocabulary, layers, and parameters of a bucket of gradients.
HIDDEN, SEQUENCE, SAMPLES, VOCABULARY, BLOCKS = (32, 160, 2, 128, 4) if ON_CPU else (512, 512, 16, 8192, 4)
MEGATRON_BUCKET = 5_000 if ON_CPU else 4_000_000
# All of these where the simulated GPU computes, which the host does for it.
_TINY = {"WIDTH": 32, "LAYERS": 4, "BATCH": 8, "BUCKET_MIB": 0.006, "BUCKET_NUMBERS": 1500}
_TINY |= {"HIDDEN": 32, "SEQUENCE": 16, "SAMPLES": 2, "VOCABULARY": 64, "BLOCKS": 2, "MEGATRON_BUCKET": 5_000}


def make_tiny() -> None:
    """Let the jobs of this process be as small as can be."""
    globals().update(_TINY)


def need(kind: str) -> None:
    """Skip where a job's framework is not installed, or its collectives do not work."""
    package = _PACKAGES.get(kind)
    if package is not None and importlib.util.find_spec(package.split(".", maxsplit=1)[0]) is None:
        pytest.skip(f"{package} is missing")
    if kind != "ddp" and not ON_CPU and backend() == "gloo":
        pytest.skip("Gloo has not all collectives for tensors of a GPU, and NCCL does not work here")


@contextlib.contextmanager
def job(rank: int, kind: str) -> Iterator[Job]:
    """A new job of ``kind`` on this rank."""
    device = take_device(rank)
    torch.manual_seed(0)
    made = MAKERS[kind](rank, device)
    try:
        yield made
    finally:
        made.close()


class Job:
    """A model on its way; a step is ``forward_backward`` and ``update``.

    Attributes:
        model: whose parameters are trained.
        losses: of each step, where this rank has one.
    """

    model: nn.Module

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def forward_backward(self) -> None:
        raise NotImplementedError

    def update(self) -> None:
        raise NotImplementedError

    def attach(self, **options: Any) -> OverlapMonitor:
        raise NotImplementedError

    def weights(self) -> list[torch.Tensor]:
        """This rank's part."""
        return [_own_part(parameter) for parameter in self.model.parameters()]

    def digest(self) -> str:
        """Equal for bit-identical weights and losses of this rank."""
        found = hashlib.sha256()
        for tensor in (*self.losses, *self.weights()):
            found.update(tensor.detach().float().contiguous().cpu().numpy().tobytes())
        return found.hexdigest()

    def close(self) -> None: ...


def _own_part(parameter: Any) -> torch.Tensor:
    if hasattr(parameter, "to_local"):  # FSDP2
        parameter = parameter.to_local()
    shard: torch.Tensor = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3
    return shard


def _layers() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def _batch(rank: int, device: torch.device, rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, device=device, generator=torch.Generator(device).manual_seed(rank))


class TorchJob(Job):
    """A model that is trained with SGD.

    Args:
        rank, device: of this process.
        model: wrapped already.
        rows: of a batch.
    """

    def __init__(self, rank: int, device: torch.device, model: nn.Module, rows: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._data = _batch(rank, device, rows or BATCH)

    def forward_backward(self) -> None:
        loss = self.model(self._data).square().mean()
        loss.backward()
        self.losses.append(loss.detach())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def attach(self, **options: Any) -> OverlapMonitor:
        from overlap_callbacks.integrations.pytorch import attach

        return attach(self.optimizer, model=self.model, **options)


def _ddp(rank: int, device: torch.device) -> Job:
    return TorchJob(rank, device, DistributedDataParallel(_layers().to(device), bucket_cap_mb=BUCKET_MIB))


def _graphed_layers(rank: int, device: torch.device) -> Job:
    """Each layer's forward and backward is a graph; DDP's collectives are not."""
    rows, layers = 1024, list(_layers().to(device))
    pairs = tuple(nn.Sequential(*layers[at : at + 2]) for at in range(0, len(layers), 2))
    samples = tuple((torch.zeros(rows, WIDTH, device=device, requires_grad=at > 0),) for at in range(len(pairs)))
    graphed: Any = torch.cuda.make_graphed_callables(pairs, samples)  # type: ignore[no-untyped-call]
    return TorchJob(rank, device, DistributedDataParallel(nn.Sequential(*graphed), bucket_cap_mb=BUCKET_MIB), rows)


class _GraphedStep(TorchJob):
    """Forward, backward and DDP's collectives are one graph; the loss is summed and weights are updated outside."""

    def __init__(self, rank: int, device: torch.device) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # DDP keeps the stream that it is made on, and asks for its times in ten steps
            model = DistributedDataParallel(_layers().to(device), bucket_cap_mb=BUCKET_MIB)
            super().__init__(rank, device, model, rows=1024)
            for _ in range(11):
                self._forward_backward()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._forward_backward()

    def _forward_backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(self._data).square().mean()
        loss.backward()
        return loss.detach()

    def forward_backward(self) -> None:
        self._graph.replay()
        self.losses.append(self._loss.clone())
        dist.all_reduce(self.losses[-1])

    def update(self) -> None:
        self.optimizer.step()


def _fsdp1(rank: int, device: torch.device) -> Job:
    def wrapped(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=device)

    layers = [wrapped(layer) if isinstance(layer, nn.Linear) else layer for layer in _layers()]
    return TorchJob(rank, device, wrapped(nn.Sequential(*layers)))


def _fsdp2(rank: int, device: torch.device) -> Job:
    return _sharded(rank, device, dp=dist.get_world_size())


def _hsdp(rank: int, device: torch.device) -> Job:
    return _sharded(rank, device, replicas=2, shards=dist.get_world_size() // 2)


def _fsdp2_bf16(rank: int, device: torch.device) -> Job:
    return _sharded(rank, device, torch.bfloat16, dp=dist.get_world_size())


def _sharded(rank: int, device: torch.device, dtype: torch.dtype | None = None, **mesh_sizes: int) -> Job:
    """``dtype`` is that of gathered weights and activations; gradients are reduced in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, tuple(mesh_sizes.values()), mesh_dim_names=tuple(mesh_sizes))
    model = _layers().to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    job = TorchJob(rank, device, model)
    if dtype is not None:  # small changes of weights do not show
        job.optimizer.param_groups[0]["lr"] = 1.0
    return job


def _tensor_parallel(rank: int, device: torch.device) -> Job:
    """Pairs of layers, the first of which is split by columns and the second by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = _layers().to(device)
    linear = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    plan = {name: RowwiseParallel() if at % 2 else ColwiseParallel() for at, name in enumerate(linear)}
    # All ranks have the same batch. Activations are what they send, so it is small.
    return TorchJob(0, device, parallelize_module(model, mesh, plan), rows=min(BATCH, 1024))


class _Pipeline(TorchJob):
    """A stage on each rank, and four micro-batches."""

    def __init__(self, rank: int, device: torch.device) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        super().__init__(rank, device, _layers().to(device), rows=min(BATCH, 1024))
        self._first, self._last = rank == 0, rank == dist.get_world_size() - 1
        stage = PipelineStage(self.model, rank, dist.get_world_size(), device)
        self._schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)

    def forward_backward(self) -> None:
        inputs: list[torch.Tensor] = [self._data] if self._first else []
        losses: list[torch.Tensor] = []
        self._schedule.step(*inputs, **({"target": self._data, "losses": losses} if self._last else {}))
        self.losses += [loss.detach() for loss in losses]

    def attach(self, **options: Any) -> OverlapMonitor:
        return super().attach(pipeline=self._schedule, **options)


class _DeepSpeed(Job):
    def __init__(self, rank: int, device: torch.device, stage: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        deepspeed = _deepspeed(rank, device)
        zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": BUCKET_NUMBERS}
        if stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": WIDTH * WIDTH}
            zero |= {"stage3_max_reuse_distance": 0}  # let go after each use, and gathered again
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": zero,
            "bf16": {"enabled": dtype is torch.bfloat16},
            "steps_per_print": 1_000_000,
        }
        model = _layers()
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        self.model = self.engine.module
        self._data = _batch(rank, device, BATCH).to(dtype)

    def forward_backward(self) -> None:
        loss = self.engine(self._data).square().mean()
        self.engine.backward(loss)
        self.losses.append(loss.detach())

    def update(self) -> None:
        self.engine.step()

    def attach(self, **options: Any) -> OverlapMonitor:
        from overlap_callbacks.integrations.deepspeed import attach

        return attach(self.engine, **options)


def _deepspeed(rank: int, device: torch.device) -> Any:
    """DeepSpeed, on the process group that the test has made."""
    if ON_CPU:
        from tests.integrations import deepspeed_jobs

        deepspeed_jobs.set_up(rank)
        return deepspeed_jobs.deepspeed
    # LOCAL_RANK is the number of its GPU.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(device.index), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    import deepspeed

    deepspeed.init_distributed("nccl", verbose=False)
    return deepspeed


@functools.cache
def _shim_megatron() -> None:
    from tests.integrations import megatron_shims

    megatron_shims.install()


class _Megatron(Job):
    """Data parallel with the distributed optimizer, gradients and weights both overlapped; or split in another way.

    Args:
        rank, device: of this process.
        stages, tensor, experts: ranks of pipeline, tensor and expert parallelism.
        dtype: of weights and activations; the optimizer has its own weights in fp32.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        stages: int = 1,
        tensor: int = 1,
        experts: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if ON_CPU:
            _shim_megatron()
        if ON_SIMULATED_GPU:
            # Megatron's own switch comes too late: to import it imports what it switches.
            torch.compiler.set_stance("force_eager")
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        if experts > 1:
            from megatron.core.transformer.moe import moe_utils

            moe_utils.te_general_gemm = None  # without Transformer Engine the name is missing, and used all the same
        parallel_state.initialize_model_parallel(tensor, stages, expert_model_parallel_size=experts)
        if not ON_CPU:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        in_bf16 = dtype is torch.bfloat16
        of_experts: dict[str, Any] = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}
        of_experts |= {"add_bias_linear": False, "expert_model_parallel_size": experts}
        config = TransformerConfig(
            **(of_experts if experts > 1 else {}),
            num_layers=max(BLOCKS, stages),
            hidden_size=HIDDEN,
            num_attention_heads=4,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=stages,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=in_bf16,
            use_cpu_initialization=ON_CPU,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            deterministic_mode=not (ON_CPU or ON_SIMULATED_GPU),
            gradient_accumulation_fusion=False,  # these need Apex or Transformer Engine
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
        )
        gpt: nn.Module = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=4 if experts > 1 else None, moe_grouped_gemm=False),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        ).to(device)
        if in_bf16:
            gpt = Float16Module(config, gpt)
        self._distributed = distributed = dist.get_world_size() > stages * tensor
        overlapping = DistributedDataParallelConfig(
            overlap_grad_reduce=distributed,
            overlap_param_gather=distributed,
            use_distributed_optimizer=distributed,
            bucket_size=MEGATRON_BUCKET,
        )
        self.model = self.chunk = DistributedDataParallel(config, overlapping, gpt)
        self.chunk.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                bf16=in_bf16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
                overlap_param_gather=distributed,
            ),
            [self.chunk],
        )
        config.no_sync_func = self.chunk.no_sync if distributed else None
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        self._schedule = get_forward_backward_func()
        self._micro_batches = 4 if stages > 1 else 1
        self._mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
        self._positions = torch.arange(SEQUENCE, device=device).expand(SAMPLES, -1)
        draw = torch.Generator(device).manual_seed(parallel_state.get_data_parallel_rank())
        self._tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE), generator=draw, device=device)

    def forward_backward(self) -> None:
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._schedule(
            forward_step_func=self._forward,
            data_iterator=None,
            model=self.chunk,
            num_microbatches=self._micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=SAMPLES,
            forward_only=False,
        )
        self.losses += [loss["loss"] for loss in losses]

    def _forward(self, _: Any, model: Any) -> Any:
        def mean(losses: torch.Tensor) -> Any:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return model(self._tokens, self._positions, self._mask, labels=self._tokens.roll(-1, 1)), mean

    def update(self) -> None:
        self.optimizer.step()

    def attach(self, **options: Any) -> OverlapMonitor:
        from overlap_callbacks.integrations.megatron import attach

        return attach([self.chunk], self.optimizer, **options)

    def weights(self) -> list[torch.Tensor]:
        if self._distributed:
            self.chunk.start_param_sync(force_sync=True)  # the last step's update
        return super().weights()

    def close(self) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


MAKERS: dict[str, Callable[[int, torch.device], Job]] = {
    "ddp": _ddp,
    "ddp of graphed layers": _graphed_layers,
    "ddp in a graph": _GraphedStep,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "fsdp2 bf16": _fsdp2_bf16,
    "hsdp": _hsdp,
    "tensor": _tensor_parallel,
    "pipeline": _Pipeline,
    "zero1": lambda rank, device: _DeepSpeed(rank, device, 1),
    "zero2": lambda rank, device: _DeepSpeed(rank, device, 2),
    "zero3": lambda rank, device: _DeepSpeed(rank, device, 3),
    "zero2 bf16": lambda rank, device: _DeepSpeed(rank, device, 2, torch.bfloat16),
    "zero3 bf16": lambda rank, device: _DeepSpeed(rank, device, 3, torch.bfloat16),
    "megatron": _Megatron,
    "megatron bf16": lambda rank, device: _Megatron(rank, device, dtype=torch.bfloat16),
    "megatron tensor": lambda rank, device: _Megatron(rank, device, tensor=2),
    "megatron pipeline": lambda rank, device: _Megatron(rank, device, stages=2),
    "megatron experts": lambda rank, device: _Megatron(rank, device, experts=2),
}
