"""The messages of a job's ranks, whatever its layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.megatron import megatron_rows
from overlap_callbacks.analysis.communication.parameters import Parameter, elements, huggingface_parameters
from overlap_callbacks.analysis.communication.row_sums import merged, row
from overlap_callbacks.analysis.communication.rows import MessageRow


def rank_rows(job: JobShape, rank: int) -> tuple[MessageRow, ...]:
    """What one rank sends and receives in a step, those calls that groups of one rank issue included.

    Args:
        job: checked.
        rank: global rank.
    """
    if job.layout == "megatron":
        return merged(megatron_rows(job, rank))
    return merged(zero_rows(job, rank) if job.layout.startswith("zero") else sharded_rows(job, rank))


def representative_ranks(job: JobShape) -> tuple[int, ...]:
    """The lowest rank of each kind: of stages that send alike, the first."""
    found: dict[tuple[MessageRow, ...], int] = {}
    for rank in range(0, job.world_size, job.t * job.d):
        alike = tuple([msgspec.structs.replace(row, rank=0, peer=-1) for row in rank_rows(job, rank)])
        found.setdefault(alike, rank)
    return tuple(found.values())


def sent_rows(job: JobShape, *, all_ranks: bool = False) -> tuple[MessageRow, ...]:
    """The messages of a rank of each kind, or of all ranks; groups of one rank send nothing and are left out.

    Args:
        job: checked.
        all_ranks: of all ranks.
    """
    stride = job.t * job.d
    if not all_ranks:
        return tuple([row for rank in representative_ranks(job) for row in rank_rows(job, rank) if row.group_size != 1])
    found: list[MessageRow] = []
    for first in range(0, job.world_size, stride):
        rows = [row for row in rank_rows(job, first) if row.group_size != 1]
        # The ranks of a stage send alike, to the ranks of equal place in other stages.
        for place in range(stride):
            found += [
                msgspec.structs.replace(row, rank=first + place, peer=row.peer + place if row.peer >= 0 else -1)
                for row in rows
            ]
    return tuple(found)


# -- sharded data parallelism
# What each rank sends in a step under DDP, FSDP2 and HSDP, message by message.
#
# The models are Hugging Face's GPT-2 and LLaMA. DDP reduces after the last micro-batch, FSDP2 after each;
# ``docs/predict.md`` says what differs elsewhere.


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


# -- ZeRO
# What each rank sends in a step under DeepSpeed's ZeRO, message by message.
#
# Counted are DeepSpeed 0.19's own calls for Hugging Face's GPT-2 and LLaMA; ``docs/predict.md`` says what differs
# elsewhere.


# DeepSpeed's default of ``reduce_bucket_size``, in elements.
_BUCKET = 500_000_000
# ZeRO-1 and 2 pad their flat parameters to this many elements on each rank.
_ALIGNMENT = 2


def zero_rows(job: JobShape, rank: int) -> Iterator[MessageRow]:
    """The messages of one rank; all ranks send alike.

    Args:
        job: checked, of layout ``zero1``, ``zero2`` or ``zero3``.
        rank: global rank.
    """
    parameters, d, m = huggingface_parameters(job.model), job.d, job.micro_batches
    if job.layout == "zero3":
        for size in _bucket_elements(parameters, job.bucket or _BUCKET, d):
            yield row(rank, "data", "_reduce_scatter_base_", m, size * job.bytes_per_gradient, d)
        yield from _gathers(job, rank, parameters)
        yield row(rank, "data", "allreduce_", 1, 8, d)  # the norm of the gradients, and whether one is infinite
        return
    reductions = m if job.layout == "zero2" else 1
    for size in _bucket_elements(parameters, job.bucket or _BUCKET, 1):
        yield row(rank, "data", "allreduce_", reductions, size * job.bytes_per_gradient, d)
    if job.dtype != "fp32":
        yield row(rank, "data", "allreduce_", 1, 1, d)  # whether a gradient is infinite
    yield row(rank, "data", "allreduce_", 1, 4, d)  # the norm of the gradients
    whole = _up(elements(parameters), _ALIGNMENT * d)
    yield row(rank, "data", "_allgather_base_", 1, whole * job.bytes_per_value, d)


def _bucket_elements(parameters: Sequence[Parameter], bucket: int, multiple: int) -> Iterator[int]:
    """Elements of each message of gradients, which are ready in reverse order.

    Args:
        parameters: of the model.
        bucket: a bucket is sent before it would grow beyond so many elements.
        multiple: each gradient is padded to a multiple of it.
    """
    held = padded = 0
    for parameter in reversed(parameters):
        if held and held + parameter.elements > bucket:
            yield padded
            held = padded = 0
        held += parameter.elements
        padded += _up(parameter.elements, multiple)
    yield padded


def _gathers(job: JobShape, rank: int, parameters: Sequence[Parameter]) -> Iterator[MessageRow]:
    """ZeRO-3 gathers a module's parameters before its forward and before its backward pass.

    Small parameters stay whole, and are gathered once, after the optimizer has changed them.
    """
    d, m, width = job.d, job.micro_batches, job.bytes_per_value
    for module in _modules(job, parameters):
        size = sum([_up(parameter.elements, d) for parameter in module if parameter.elements > job.persistence])
        # Tied words are gathered as embeddings and as output layer.
        uses = 2 if job.model.tied and module[0].word_embedding else 1
        if size:
            yield row(rank, "data", "_allgather_base_", 2 * uses * m, size * width, d)
    for parameter in parameters:
        if parameter.elements <= job.persistence:
            yield row(rank, "data", "_allgather_base_", 1, _up(parameter.elements, d) * width, d)


def _modules(job: JobShape, parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters by module: a vector belongs to the matrix before it, and a norm has two where it has a bias."""
    found: list[Parameter] = []
    for parameter in parameters:
        bias = len(parameter.shape) == 1 and len(found) == 1 and _biased(job, found[0])
        if found and not bias:
            yield found
            found = []
        found.append(parameter)
    if found:
        yield found


def _biased(job: JobShape, parameter: Parameter) -> bool:
    """Whether the module of this first parameter has a bias too."""
    if len(parameter.shape) == 1:
        return job.model.norm_biases
    return job.model.biases and parameter.unit >= 0


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
