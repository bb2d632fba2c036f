"""Small Megatron-core training jobs on the CPU, in every way in which Megatron parallelises."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks import Mode
from overlap_callbacks.gate.serialiser import CompletedWork
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.integrations.megatron import attach
from tests.monitor.jobs import KeptReports, kept_logs

SEQUENCE, BATCH, VOCABULARY = 16, 2, 128

# What ranks import when they train: a test module's RANKS_LOAD.
LOADS = (
    "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.pipeline_parallel",
    "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.gpt.gpt_model",
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """How a job is parallelised, and what its model has.

    Attributes:
        tp, pp, ep: ranks of tensor, pipeline and expert parallelism.
        chunks: model chunks of a rank, in the interleaved schedule.
        micro_batches: of a step.
        bucket: parameters in a bucket of gradients.
        sequence_parallel, distributed_optimizer, moe: as Megatron names them.
        overlap_grad_reduce, overlap_param_gather, overlap_p2p_comm: as Megatron names them.
        align: let pipeline stages start reductions and gathers together.
        fp16: half precision, with a loss scale of so much.
        vocabulary: rows of the word embeddings.
        sequence, batch: tokens of a sequence, and sequences of a micro-batch.
        tied: whether the output layer shares its weights with the word embeddings.
        config, ddp: further settings of Megatron's.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    chunks: int = 1
    micro_batches: int = 1
    layers: int = 4
    hidden: int = 32
    bucket: int = 5_000
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    moe: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    overlap_p2p_comm: bool = False
    align: bool = False
    fp16: float = 0.0
    vocabulary: int = VOCABULARY
    sequence: int = SEQUENCE
    batch: int = BATCH
    tied: bool = True
    config: tuple[tuple[str, Any], ...] = ()
    ddp: tuple[tuple[str, Any], ...] = ()


class Job:
    """A model, its optimizer and its steps; one at a time in a process, ended by ``close``.

    Attributes:
        model: the list of model chunks.
        optimizer: Megatron's.
        losses: of each step; empty where the rank has no last stage.
    """

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.setup = setup
        self.losses: list[float] = []
        self._seed = seed
        self._groups_before = set(dist.distributed_c10d._world.pg_map)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=setup.tp,
            pipeline_model_parallel_size=setup.pp,
            virtual_pipeline_model_parallel_size=setup.chunks if setup.chunks > 1 else None,
            expert_model_parallel_size=setup.ep,
        )
        torch.manual_seed(1)
        self.config = self._config()
        ddp = DistributedDataParallelConfig(
            overlap_grad_reduce=setup.overlap_grad_reduce,
            overlap_param_gather=setup.overlap_param_gather,
            use_distributed_optimizer=setup.distributed_optimizer,
            bucket_size=setup.bucket,
            **{"grad_reduce_in_fp32": True, **dict(setup.ddp)},
        )
        self.model = [
            DistributedDataParallel(self.config, ddp, self._chunk(index), disable_bucketing=index > 0)
            for index in range(setup.chunks)
        ]
        for chunk in self.model:
            chunk.broadcast_params()
        dtype = torch.float16 if setup.fp16 else torch.float32
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                clip_grad=1.0,
                use_distributed_optimizer=setup.distributed_optimizer,
                overlap_param_gather=setup.overlap_param_gather,
                params_dtype=dtype,
                fp16=bool(setup.fp16),
                initial_loss_scale=setup.fp16 or 1.0,
                hysteresis=1,
            ),
            self.model,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if setup.overlap_grad_reduce:
            self.config.no_sync_func = _one([chunk.no_sync for chunk in self.model])
        if setup.align:
            self.config.grad_sync_func = _one([chunk.start_grad_sync for chunk in self.model])
            if setup.overlap_param_gather:
                self.config.param_sync_func = _one([chunk.start_param_sync for chunk in self.model])
        self._schedule = get_forward_backward_func()
        self._mask = torch.ones(1, 1, setup.sequence, setup.sequence, dtype=torch.bool).triu(1)
        self._positions = torch.arange(setup.sequence)[None].expand(setup.batch, -1)

    def _config(self) -> Any:
        from megatron.core.transformer.transformer_config import TransformerConfig

        setup = self.setup
        dtype = torch.float16 if setup.fp16 else torch.float32
        special: dict[str, Any] = {}
        if setup.moe:
            special |= {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "moe_router_topk": 2}
            special |= {"add_bias_linear": False}
        if setup.overlap_p2p_comm:
            special |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        return TransformerConfig(
            num_layers=setup.layers,
            hidden_size=setup.hidden,
            num_attention_heads=4,
            tensor_model_parallel_size=setup.tp,
            pipeline_model_parallel_size=setup.pp,
            virtual_pipeline_model_parallel_size=setup.chunks if setup.chunks > 1 else None,
            expert_model_parallel_size=setup.ep,
            sequence_parallel=setup.sequence_parallel,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            fp16=bool(setup.fp16),
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            **{**special, **dict(setup.config)},
        )

    def _chunk(self, index: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        stage = {"vp_stage": index} if self.setup.chunks > 1 else {}
        where = {"ignore_virtual": False, "vp_stage": stage.get("vp_stage")}
        model = GPTModel(
            self.config,
            get_gpt_layer_local_spec(num_experts=4 if self.setup.moe else None, moe_grouped_gemm=False),
            vocab_size=self.setup.vocabulary,
            max_sequence_length=self.setup.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=self.setup.tied,
            **stage,
        )
        return model.half() if self.setup.fp16 else model

    def forward_backward(self, step: int) -> None:
        """All micro-batches of a step."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = [self._data(step) for _ in self.model]
        interleaved = len(self.model) > 1
        losses = self._schedule(
            forward_step_func=self._forward,
            data_iterator=data if interleaved else data[0],
            model=self.model if interleaved else self.model[0],
            num_microbatches=self.setup.micro_batches,
            seq_length=self.setup.sequence,
            micro_batch_size=self.setup.batch,
            decoder_seq_length=self.setup.sequence,
            forward_only=False,
        )
        self.losses += [float(loss["loss"]) for loss in losses]

    def step(self) -> Any:
        """One training step; what the optimizer says of it."""
        step, self._seed = self._seed, self._seed + 1
        self.forward_backward(step)
        return self.optimizer.step()

    def _data(self, step: int) -> Any:
        from megatron.core import parallel_state

        generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
        for _ in itertools.count():
            yield torch.randint(0, self.setup.vocabulary, (self.setup.batch, self.setup.sequence), generator=generator)

    def _forward(self, data: Any, model: Any) -> Any:
        tokens = next(data)

        def loss_of(output: torch.Tensor) -> Any:
            loss = output.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return model(tokens, self._positions, self._mask, labels=tokens.roll(-1, 1)), loss_of

    def digest(self) -> str:
        """Equal for bit-identical weights and losses."""
        for chunk in self.model:
            if self.setup.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)  # the last step's update
        found = hashlib.sha256(repr(self.losses).encode())
        for chunk in self.model:
            for name, parameter in chunk.module.named_parameters():
                found.update(name.encode() + parameter.detach().float().contiguous().numpy().tobytes())
        return found.hexdigest()

    def close(self) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()

    def destroy_groups(self) -> None:
        """End the job's process groups, on all ranks, once it is closed.

        Megatron only forgets them. Each of its some twenty groups has a thread of Gloo's that wakes every 10 ms: after
        a few jobs these took half of the processor.
        """
        dist.barrier()  # nobody still receives
        for group in set(dist.distributed_c10d._world.pg_map) - self._groups_before:
            dist.destroy_process_group(group)


@contextlib.contextmanager
def job(setup: Setup) -> Any:
    gc.collect()  # groups of the job before, of which its model holds some
    made = Job(setup)
    try:
        yield made
    finally:
        made.close()
    made.destroy_groups()


def _one(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


NUM_STEPS = 20
# One recorded step, then the mode changes at every step: 17 steps from step 2 on.
TOGGLING: dict[str, Any] = {
    "spread": False,
    "every_n_steps": 100,
    "first_step": 2,
    "blocks": "OS",
    "repeats": 8,
    "steps_per_block": 1,
}
TOGGLING |= {"warmup_steps": 0, "profiled_steps": 0, "max_overhead": None, "strict": True}

TWO_RANKS = {
    "dp": Setup(),
    "dp_distributed_optimizer": Setup(distributed_optimizer=True, overlap_param_gather=True),
    "tp": Setup(tp=2),
    "tp_sequence_parallel": Setup(tp=2, sequence_parallel=True),
    "pp": Setup(pp=2, micro_batches=4),
    "pp_interleaved": Setup(pp=2, chunks=2, micro_batches=4, overlap_p2p_comm=True),
    "ep": Setup(ep=2, moe=True),
}
FOUR_RANKS = {
    "tp_pp": Setup(tp=2, pp=2, micro_batches=2),
    "tp_dp": Setup(tp=2, sequence_parallel=True, distributed_optimizer=True, overlap_param_gather=True),
    "pp_interleaved_4_stages": Setup(pp=4, chunks=2, layers=8, micro_batches=8, overlap_p2p_comm=True),
}


def messages_of(log: StepLog) -> dict[tuple[str, str, int], tuple[int, int, int]]:
    found: dict[tuple[str, str, int], tuple[int, int, int]] = {}
    for c in log.collectives:
        key = (c.operator, c.group.dimension, len(c.group.ranks))
        messages, bytes_in, bytes_out = found.get(key, (0, 0, 0))
        found[key] = (messages + 1, bytes_in + c.bytes_in, bytes_out + c.bytes_out)
    return found


def train_absent(setup: Setup, steps: int = NUM_STEPS) -> str:
    with job(setup) as training:
        for _ in range(steps):
            training.step()
        return training.digest()


def train_attached(setup: Setup, force: bool = False, steps: int = NUM_STEPS, **options: Any) -> dict[str, Any]:
    """Train with the library; returns what it did."""
    sink, modes, waits = KeptReports(), [], Counter()
    wait = CompletedWork.wait

    def counted_wait(work: CompletedWork, timeout: Any = None) -> bool:
        waits["done"] += 1
        return wait(work, timeout)

    with job(setup) as training, kept_logs() as logs:
        CompletedWork.wait = counted_wait
        monitor = attach(training.model, training.optimizer, sinks=[sink], **{**TOGGLING, **options})
        if force:
            monitor.force(Mode.SEQUENTIAL)
        for _ in range(steps):
            modes.append(monitor.mode)
            training.step()
        monitor.close()
        CompletedWork.wait = wait
        return {
            "digest": training.digest(),
            "modes": modes,
            "reports": sink.facts(),
            "dimensions": {(c.operator, c.dimension) for r in sink.reports for c in r.collectives},
            "messages": [messages_of(log) for log in logs],
            "left_out": [str(log.divergence) for log in logs if log.divergence is not None],
            "waited_for": sum(c.start is not None for log in logs for c in log.collectives),
            "done_works": waits["done"],
        }


NATIVE_TWO_RANKS = {
    "dp": Setup(),
    "dp_accumulating": Setup(micro_batches=3),
    "dp_distributed_optimizer": Setup(distributed_optimizer=True, overlap_param_gather=True, align=True),
    "pp_interleaved": TWO_RANKS["pp_interleaved"],
}
# Stages that reduce together: here the flag alone, without the function beside it, would reduce twice and say nothing.
NATIVE_FOUR_RANKS = {
    "pp_dp": Setup(pp=2, micro_batches=4, distributed_optimizer=True, overlap_param_gather=True, align=True),
    "pp_interleaved_dp": Setup(
        pp=2,
        chunks=2,
        micro_batches=4,
        distributed_optimizer=True,
        overlap_param_gather=True,
        overlap_p2p_comm=True,
        align=True,
    ),
}
