"""What each rank of a Megatron-core job sends in a step, message by message.

Counted are Megatron-core 0.16's own calls for ``GPTModel`` with local layers; ``docs/predict.md`` says what differs
elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.parameters import (
    Parameter,
    elements,
    megatron_parameters,
    padded_vocabulary,
)
from overlap_callbacks.analysis.communication.row_sums import row
from overlap_callbacks.analysis.communication.rows import MessageRow

# The loss and the norm of the gradients are computed in 32 bit, whatever the model has.
_FLOAT_BYTES = 4
# Ranks tell each other how many tokens each expert gets, in 64 bit.
_COUNT_BYTES = 8
# Of a token, the vocabulary-parallel loss reduces the largest logit, the target's logit and the sum of exponentials.
_LOSS_MESSAGES = 3


def megatron_rows(job: JobShape, rank: int) -> Iterator[MessageRow]:
    """The messages of one rank, those of groups of one rank included.

    Args:
        job: checked.
        rank: global rank.
    """
    stage = job.stage_of(rank)
    yield from _tensor(job, rank, stage)
    yield from _experts(job, rank)
    yield from _pipeline(job, rank, stage)
    yield from _data(job, rank, stage)
    yield from _embedding(job, rank, stage)
    yield from _norm_of_gradients(job, rank)


def chunk_parameters(job: JobShape, stage: int) -> list[list[Parameter]]:
    """The parameters of each model chunk of a stage, as one of its tensor-parallel ranks has them."""
    return [
        megatron_parameters(
            job.model,
            job.t,
            job.layers_of_chunk(stage, chunk),
            first=stage == 0 and chunk == 0,
            last=stage == job.p - 1 and chunk == job.chunks - 1,
            multiple=job.vocabulary_multiple,
            alone=job.p == 1,
            ep=job.ep,
        )
        for chunk in range(job.chunks)
    ]


def _tensor(job: JobShape, rank: int, stage: int) -> Iterator[MessageRow]:
    model, m, t = job.model, job.micro_batches, job.t
    tokens = job.micro_batch * model.sequence
    activation = tokens * model.hidden * job.bytes_per_value
    layers = m * sum([len(job.layers_of_chunk(stage, chunk)) for chunk in range(job.chunks)])
    first, last = m * (stage == 0), m * (stage == job.p - 1)
    again = job.recompute == "full"
    if t > 1 and job.sequence_parallel:
        # A layer gathers its two inputs, forward and, for the weights' gradients, backward; and the gradients of its
        # two outputs. It scatters its two outputs, and the gradients of its two inputs. The output layer is half of
        # one half: one input, twice gathered, and the gradient of it. The embedding's gradient is gathered.
        gathers = layers * (8 if again else 6) + 2 * last + first
        scatters = layers * (6 if again else 4) + last
        if model.learned_positions:  # the sum of words and positions is cut afterwards, so words are reduced whole
            yield row(rank, "tensor", "allreduce_", first, activation, t)
        else:
            scatters += first
        yield row(rank, "tensor", "_allgather_base_", gathers, activation, t)
        yield row(rank, "tensor", "_reduce_scatter_base_", scatters, activation, t)
        whole = [parameter for chunk in chunk_parameters(job, stage) for parameter in chunk if parameter.whole]
        # Gradients of what all ranks have but see a part of the sequence through, in one message.
        yield row(rank, "tensor", "allreduce_", 1, elements(whole) * job.bytes_per_gradient, t)
    elif t > 1:
        # A layer sums its two outputs forward, and the gradients of its two inputs backward; recomputed, the outputs
        # once more. The embedding sums its output, the output layer the gradient of its input.
        yield row(rank, "tensor", "allreduce_", layers * (6 if again else 4) + first + last, activation, t)
    yield row(rank, "tensor", "allreduce_", _LOSS_MESSAGES * last, tokens * _FLOAT_BYTES, t)


def _experts(job: JobShape, rank: int) -> Iterator[MessageRow]:
    """The all-to-alls of a mixture of experts; what a rank gets depends on the routing, here it is balanced."""
    model, ep = job.model, job.ep
    if not model.experts or ep == 1:
        return
    layers = job.micro_batches * model.layers
    copies = job.micro_batch * model.sequence * model.experts_per_token
    yield row(rank, "expert", "_allgather_base_", layers, ep * model.experts * _COUNT_BYTES, ep)
    # Tokens go to the experts and come back, forward and backward; so do their weights, one way each.
    yield row(rank, "expert", "alltoall_base_", 4 * layers, copies * model.hidden * job.bytes_per_value, ep)
    yield row(rank, "expert", "alltoall_base_", 2 * layers, copies * job.bytes_per_value, ep)


def _pipeline(job: JobShape, rank: int, stage: int) -> Iterator[MessageRow]:
    if job.p == 1:
        return
    model, m = job.model, job.micro_batches
    cut = job.t if job.sequence_parallel else 1
    size = job.micro_batch * model.sequence * model.hidden * job.bytes_per_value // cut
    # Activations go to the next stage, gradients to the one before. The model's first chunk gets no activations, and
    # the last one sends none.
    stride = job.t * job.d
    following, before = (rank + stride) % job.world_size, (rank - stride) % job.world_size
    forward_in = m * (job.chunks - (stage == 0))
    forward_out = m * (job.chunks - (stage == job.p - 1))
    yield row(rank, "pipeline", "send", forward_out, size, job.p, following)
    yield row(rank, "pipeline", "send", forward_in, size, job.p, before)
    yield row(rank, "pipeline", "recv_", forward_in, size, job.p, before)
    yield row(rank, "pipeline", "recv_", forward_out, size, job.p, following)


def _data(job: JobShape, rank: int, stage: int) -> Iterator[MessageRow]:
    chosen = job.bucket or default_bucket(job.d)
    shared = job.model.tied and job.p > 1
    for number, parameters in enumerate(chunk_parameters(job, stage)):
        # Only the first stage's gradients are on the critical path; all others are reduced whole.
        bucket = chosen if job.overlap_grad_reduce and stage == 0 and number == 0 else None
        experts = [parameter for parameter in parameters if parameter.expert]
        for size in bucket_elements(experts, job.d // job.ep, bucket, distributed_optimizer=False, shared=False):
            yield row(rank, "data", "allreduce_coalesced_", 1, size * job.bytes_per_gradient, job.d // job.ep)
        dense = [parameter for parameter in parameters if not parameter.expert]
        sizes = bucket_elements(dense, job.d, bucket, distributed_optimizer=job.distributed_optimizer, shared=shared)
        if number > 0:
            sizes = [sum(sizes)]  # the buckets of further chunks are one message
        for size in sizes:
            if job.distributed_optimizer:
                reduced, gathered = size * job.bytes_per_gradient, size * job.bytes_per_value
                yield row(rank, "data", "reduce_scatter_tensor_coalesced_", 1, reduced, job.d)
                yield row(rank, "data", "allgather_into_tensor_coalesced_", 1, gathered, job.d)
            else:
                yield row(rank, "data", "allreduce_coalesced_", 1, size * job.bytes_per_gradient, job.d)


def _embedding(job: JobShape, rank: int, stage: int) -> Iterator[MessageRow]:
    if job.model.tied and job.p > 1 and stage in (0, job.p - 1):
        words = padded_vocabulary(job.model.vocabulary, job.t, job.vocabulary_multiple) // job.t
        yield row(rank, "embedding", "allreduce_", 1, words * job.model.hidden * job.bytes_per_gradient, 2)


def _norm_of_gradients(job: JobShape, rank: int) -> Iterator[MessageRow]:
    ranks = job.world_size if job.distributed_optimizer else job.p * job.t
    messages = 2 if job.dtype == "fp16" else 1  # the loss scale asks first whether a gradient is infinite
    yield row(rank, "model", "allreduce_", messages, _FLOAT_BYTES, ranks)
    if job.model.experts and job.ep > 1:
        yield row(rank, "model", "allreduce_", 1, _FLOAT_BYTES, job.ep)


# -- buckets


# The distributed optimizer begins each parameter at a multiple of 64, and ends each bucket at one of 128 and of d.
_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


def default_bucket(d: int) -> int:
    """Parameters of a bucket where the user chose none (``DistributedDataParallelConfig.bucket_size``)."""
    return max(40_000_000, 1_000_000 * d)


def bucket_elements(
    parameters: Sequence[Parameter], d: int, bucket: int | None, *, distributed_optimizer: bool, shared: bool
) -> list[int]:
    """Elements of each bucket of a model chunk, padding included.

    Args:
        parameters: of the chunk.
        d: data-parallel ranks.
        bucket: a bucket is full from so many parameters on; None for a single bucket.
        distributed_optimizer: whether buckets are padded, so that they divide by ``d``.
        shared: whether another stage has the word embeddings too; under the distributed optimizer they then have a
            bucket of their own.
    """
    multiple = math.lcm(d, _BUCKET_ALIGNMENT) if distributed_optimizer else 1
    alignment = _PARAMETER_ALIGNMENT if distributed_optimizer else 1
    sizes: list[int] = []
    start = position = 0  # of the bucket, and of what follows its last parameter
    for parameter in reversed(parameters):
        position = _up(position, alignment)
        own = shared and distributed_optimizer and parameter.word_embedding
        if own and position > start:
            sizes.append(_up(position, multiple) - start)
            start = position = start + sizes[-1]
        position += parameter.elements
        if own or (bucket is not None and position - start >= bucket):
            sizes.append(_up(position, multiple) - start)
            start = position = start + sizes[-1]
    if position > start:
        sizes.append(_up(position, multiple) - start)
    return sizes


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
