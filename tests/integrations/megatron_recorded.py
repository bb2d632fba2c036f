"""What the gate records of a step of Megatron-core jobs, and the same jobs as the prediction sees them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import ModelShape
from overlap_callbacks.integrations.megatron import attach
from tests.integrations import megatron_shims
from tests.integrations.megatron_jobs import BATCH, LOADS, SEQUENCE, TOGGLING, Setup, job
from tests.monitor.jobs import kept_logs

RANKS_LOAD = LOADS

# Dimension, operator, bytes of a message, global ranks of its group, global rank of the peer (-1 without one).
Message = tuple[str, str, int, tuple[int, ...], int]
# Bytes of the tokens of a micro-batch, each for two experts, and of their weights.
_OWN_SIDE = (BATCH * SEQUENCE * 2 * Setup.hidden * 4, BATCH * SEQUENCE * 2 * 4)
NUM_STEPS = 4  # the second is the window's recorded step
_FULL = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
_LLAMA = (("gated_linear_unit", True), ("add_bias_linear", False), ("num_query_groups", 2), ("ffn_hidden_size", 96))

TWO_RANKS = {
    "data": Setup(micro_batches=2),
    "data, untied, all at once": Setup(tied=False, overlap_grad_reduce=False),
    "data, distributed optimizer": Setup(distributed_optimizer=True, overlap_param_gather=True),
    "data, gradients in 16 bit": Setup(fp16=16.0, ddp=(("grad_reduce_in_fp32", False),)),
    "data, distributed optimizer in 16 bit": Setup(distributed_optimizer=True, fp16=16.0),
    "tensor": Setup(tp=2, micro_batches=2),
    "tensor, untied, gated, grouped queries": Setup(tp=2, tied=False, config=_LLAMA),
    "tensor in 16 bit": Setup(tp=2, fp16=16.0),
    "tensor, full recomputation": Setup(tp=2, micro_batches=2, config=_FULL),
    "tensor, selective recomputation": Setup(tp=2, config=(("recompute_granularity", "selective"),)),
    "sequence": Setup(tp=2, sequence_parallel=True, micro_batches=2),
    "sequence, full recomputation": Setup(tp=2, sequence_parallel=True, config=_FULL),
    "pipeline": Setup(pp=2, micro_batches=4),
    "pipeline, untied": Setup(pp=2, micro_batches=4, tied=False),
    "pipeline, uneven": Setup(pp=2, micro_batches=4, config=(("num_layers_in_first_pipeline_stage", 3),)),
    "pipeline in 16 bit": Setup(pp=2, micro_batches=2, fp16=16.0),
    "pipeline, interleaved": Setup(pp=2, chunks=2, micro_batches=4, overlap_p2p_comm=True),
    "experts": Setup(ep=2, moe=True, micro_batches=2),
}
FOUR_RANKS = {
    "tensor and pipeline, sequence": Setup(tp=2, pp=2, micro_batches=2, sequence_parallel=True),
    "tensor and data": Setup(tp=2, micro_batches=2),
    "pipeline and data, distributed optimizer": Setup(pp=2, micro_batches=2, distributed_optimizer=True),
    "experts and data": Setup(ep=2, moe=True),
    "pipeline of four, uneven": Setup(
        pp=4, layers=6, micro_batches=4, config=(("pipeline_model_parallel_layout", "Ett|tt|t|tL"),)
    ),
    "pipeline of four, interleaved": Setup(pp=4, chunks=2, layers=8, micro_batches=8, overlap_p2p_comm=True),
}


def shape_of(setup: Setup, world_size: int, stages: tuple[int, ...] = ()) -> JobShape:
    """A setup of ``megatron_jobs`` in the prediction's words."""
    config = dict(setup.config)
    first = config.get("num_layers_in_first_pipeline_stage")
    d = world_size // (setup.tp * setup.pp)
    shape = JobShape(
        model=ModelShape(
            layers=setup.layers, hidden=setup.hidden, heads=4, sequence=setup.sequence, vocabulary=setup.vocabulary,
            kv_heads=config.get("num_query_groups", 0), ffn=config.get("ffn_hidden_size", 0), tied=setup.tied,
            gated=config.get("gated_linear_unit", False), biases=config.get("add_bias_linear", not setup.moe),
            experts=4 if setup.moe else 0, experts_per_token=2 if setup.moe else 1,
        ),
        p=setup.pp, t=setup.tp, d=d, ep=setup.ep,
        micro_batch=setup.batch, global_batch=setup.batch * setup.micro_batches * d,
        stages=(first, setup.layers - first) if first else stages, chunks=setup.chunks,
        sequence_parallel=setup.sequence_parallel, distributed_optimizer=setup.distributed_optimizer,
        recompute=config.get("recompute_granularity", "none"), dtype="fp16" if setup.fp16 else "fp32",
        gradient_dtype="fp32" if dict(setup.ddp).get("grad_reduce_in_fp32", True) else "",
        vocabulary_multiple=1, bucket=setup.bucket, overlap_grad_reduce=setup.overlap_grad_reduce,
    )  # fmt: skip
    shape.check()
    return shape


def record_all(rank: int, setups: dict[str, Setup]) -> dict[str, Counter[Message]]:
    """What this rank sends in a step of each job; Megatron is loaded once for all."""
    megatron_shims.install()
    return {name: _record(setup) for name, setup in setups.items()}


def _record(setup: Setup) -> Counter[Message]:
    with job(setup) as training, kept_logs() as logs:
        monitor = attach(training.model, training.optimizer, sinks=[], **TOGGLING)
        try:
            for _ in range(NUM_STEPS):
                training.step()
        finally:
            monitor.close()
    return Counter([_message(collective) for collective in logs[0].collectives])


def _message(collective: Any) -> Message:
    group = collective.group
    peer = group.ranks[collective.peer] if collective.point_to_point else -1
    size = max(collective.bytes_in, collective.bytes_out)
    if collective.operator == "alltoall_base_":
        # What comes from a rank's own tokens, or returns to them; the other side depends on the routing.
        size = next((own for own in (collective.bytes_in, collective.bytes_out) if own in _OWN_SIDE), size)
    return (group.dimension, collective.operator, size, group.ranks, peer)
