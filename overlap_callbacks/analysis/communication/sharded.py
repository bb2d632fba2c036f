"""What each rank sends in a step under DDP, FSDP2 and HSDP, message by message.

The models are Hugging Face's GPT-2 and LLaMA. DDP reduces after the last micro-batch, FSDP2 after each;
``docs/predict.md`` says what differs elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.parameters import Parameter, huggingface_parameters
from overlap_callbacks.analysis.communication.row_sums import row
from overlap_callbacks.analysis.communication.rows import MessageRow

# DDP's own limits of its first bucket and of all others (torch.nn.parallel.distributed), in bytes.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20


def sharded_rows(job: JobShape, rank: int) -> Iterator[MessageRow]:
    """The messages of one rank; all ranks send alike.

    Args:
        job: checked.
        rank: global rank.
    """
    if job.layout == "ddp":
        yield from _ddp(job, rank)
    else:
        yield from _fsdp2(job, rank)


def _ddp(job: JobShape, rank: int) -> Iterator[MessageRow]:
    # Gradients are ready in reverse order of the parameters. A bucket ends once it has reached its limit.
    limit = job.bucket or _FIRST_BUCKET_BYTES
    size = 0
    for parameter in reversed(huggingface_parameters(job.model)):
        size += parameter.elements * job.bytes_per_gradient
        if size >= limit:
            yield row(rank, "data", "allreduce_", 1, size, job.d)
            limit, size = job.bucket or _BUCKET_BYTES, 0
    if size:
        yield row(rank, "data", "allreduce_", 1, size, job.d)
    if not job.model.learned_positions:
        # Rotary positions have two buffers of half a head's width in 32 bit; DDP makes buffers alike once a step.
        yield row(rank, "data", "broadcast_", 1, 2 * job.model.head_width // 2 * 4, job.d)


def _fsdp2(job: JobShape, rank: int) -> Iterator[MessageRow]:
    """Units are the layers, and the root with the rest; each is gathered whole, and its gradients are reduced whole."""
    shards, m = job.d // job.replicas, job.micro_batches
    for unit, parameters in _units(huggingface_parameters(job.model)):
        elements = _padded_elements(parameters, shards)
        # A layer is let go after the forward pass and gathered again; the root is kept until the backward pass ends.
        gathers = m * (1 if unit < 0 else 2)
        yield row(rank, "data", "_allgather_base_", gathers, elements * job.bytes_per_value, shards)
        yield row(rank, "data", "_reduce_scatter_base_", m, elements * job.bytes_per_gradient, shards)
        if job.replicas > 1:
            shard = elements * job.bytes_per_gradient // shards
            yield row(rank, "data", "allreduce_", m, shard, job.replicas)


def _units(parameters: Iterable[Parameter]) -> Iterator[tuple[int, list[Parameter]]]:
    found: dict[int, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.unit, []).append(parameter)
    yield from found.items()


def _padded_elements(parameters: Iterable[Parameter], shards: int) -> int:
    """Elements of parameters once the first size of each divides by the shards."""
    return sum(
        [math.ceil(parameter.shape[0] / shards) * shards * math.prod(parameter.shape[1:]) for parameter in parameters]
    )
