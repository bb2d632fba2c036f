"""Predicted messages of each rank in a step, as its framework issues them.

Counts the calls of Megatron-core 0.16 for ``GPTModel`` with local layers, of torch's DDP and FSDP2, and of DeepSpeed
0.19 for Hugging Face's GPT-2 and LLaMA; ``docs/predict.md`` says what differs elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import (
    Parameter,
    elements,
    huggingface_parameters,
    megatron_parameters,
    padded_vocabulary,
)
from overlap_callbacks.analysis.equations import wire_factor
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.sums import grouped


class MessageRow(msgspec.Struct, frozen=True):
    """Messages of one rank and one step that have the same dimension, operator, size and number of ranks.

    Attributes:
        rank: global rank.
        dimension: of parallelism that the group serves: ``data``, ``tensor``, ``pipeline``, ``embedding``, ...
        operator: as the gate names it: ``allreduce_``, ``send``, ...
        messages: calls in a step.
        bytes_each: the larger of the bytes that one call reads and writes on this rank.
        bytes: ``messages`` times ``bytes_each``, as counted by the APNet '24 study.
        wire_bytes: bytes on the rank's link if the collective runs as a ring, as counted by nccl-tests.
        group_size: ranks of the group; 0 if unknown.
        peer: global rank of a send's or receive's counterpart; -1 for collectives.
    """

    rank: int
    dimension: str
    operator: str
    messages: int
    bytes_each: int
    bytes: int
    wire_bytes: float
    group_size: int = 0
    peer: int = -1


class _Calls(NamedTuple):
    """Equal calls of a rank, with the fields of ``MessageRow``."""

    dimension: str
    operator: str
    messages: int
    bytes_each: int
    group_size: int
    peer: int = -1


def rank_rows(job: JobShape, rank: int) -> tuple[MessageRow, ...]:
    """A rank's messages in a step, including calls on groups of one rank."""
    if job.layout == "megatron":
        calls = _megatron(job, rank)
    elif job.layout.startswith("zero"):
        calls = _zero(job)
    else:
        calls = _ddp(job) if job.layout == "ddp" else _fsdp2(job)
    counts: Counter[_Calls] = Counter()
    for call in calls:
        counts[call._replace(messages=0)] += call.messages
    rows = []
    for (dimension, operator, _, each, ranks, peer), messages in counts.items():
        if messages:
            wire_bytes = messages * each * wire_factor(collective_of(operator), ranks)
            rows.append(MessageRow(rank, dimension, operator, messages, each, messages * each, wire_bytes, ranks, peer))
    return tuple(rows)


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


# -- Megatron-core


# The loss and the gradient norm are computed in 32 bit, whatever the model uses.
_FLOAT_BYTES = 4
# Ranks exchange the number of tokens for each expert, in 64 bit.
_COUNT_BYTES = 8
# Per token, the vocabulary-parallel loss reduces the largest logit, the target's logit and the sum of exponentials.
_LOSS_MESSAGES = 3


def _megatron(job: JobShape, rank: int) -> Iterator[_Calls]:
    stage = job.stage_of(rank)
    yield from _tensor(job, stage)
    yield from _experts(job)
    yield from _pipeline(job, rank, stage)
    yield from _data(job, stage)
    yield from _embedding(job, stage)
    yield from _norm_of_gradients(job)


def chunk_parameters(job: JobShape, stage: int) -> list[list[Parameter]]:
    """The parameters of each model chunk of a stage, on one of its tensor-parallel ranks."""
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


def _tensor(job: JobShape, stage: int) -> Iterator[_Calls]:
    model, m, t = job.model, job.micro_batches, job.t
    tokens = job.micro_batch * model.sequence
    activation = tokens * model.hidden * job.bytes_per_value
    layers = m * job.layers_of_stages[stage]
    first, last = m * (stage == 0), m * (stage == job.p - 1)
    again = job.recompute == "full"
    if t > 1 and job.sequence_parallel:
        # A layer gathers its two inputs in the forward pass and, for the weights' gradients, in the backward pass; and
        # the gradients of its two outputs. It scatters its two outputs, and the gradients of its two inputs. The output
        # layer is half of one half: one input, gathered twice, and its gradient. The embedding's gradient is gathered.
        gathers = layers * (8 if again else 6) + 2 * last + first
        scatters = layers * (6 if again else 4) + last
        if model.learned_positions:  # words and positions are summed before splitting, so words are all-reduced in full
            yield _Calls("tensor", "allreduce_", first, activation, t)
        else:
            scatters += first
        yield _Calls("tensor", "_allgather_base_", gathers, activation, t)
        yield _Calls("tensor", "_reduce_scatter_base_", scatters, activation, t)
        whole = [parameter for chunk in chunk_parameters(job, stage) for parameter in chunk if parameter.whole]
        # Gradients of parameters that all ranks have but that see part of the sequence, in one message.
        yield _Calls("tensor", "allreduce_", 1, elements(whole) * job.bytes_per_gradient, t)
    elif t > 1:
        # A layer sums its two outputs in the forward pass, and the gradients of its two inputs in the backward pass;
        # with recomputation, the outputs again. The embedding sums its output, the output layer the gradient of its
        # input.
        yield _Calls("tensor", "allreduce_", layers * (6 if again else 4) + first + last, activation, t)
    yield _Calls("tensor", "allreduce_", _LOSS_MESSAGES * last, tokens * _FLOAT_BYTES, t)


def _experts(job: JobShape) -> Iterator[_Calls]:
    """The all-to-alls of a mixture of experts. A rank's share depends on the routing; balanced here."""
    model, ep = job.model, job.ep
    if not model.experts or ep == 1:
        return
    layers = job.micro_batches * model.layers
    copies = job.micro_batch * model.sequence * model.experts_per_token
    yield _Calls("expert", "_allgather_base_", layers, ep * model.experts * _COUNT_BYTES, ep)
    # Tokens go to the experts and come back, forward and backward; their routing weights go one way each.
    yield _Calls("expert", "alltoall_base_", 4 * layers, copies * model.hidden * job.bytes_per_value, ep)
    yield _Calls("expert", "alltoall_base_", 2 * layers, copies * job.bytes_per_value, ep)


def _pipeline(job: JobShape, rank: int, stage: int) -> Iterator[_Calls]:
    if job.p == 1:
        return
    model, m = job.model, job.micro_batches
    cut = job.t if job.sequence_parallel else 1
    size = job.micro_batch * model.sequence * model.hidden * job.bytes_per_value // cut
    # Activations go to the next stage, gradients to the previous one. The model's first chunk receives no activations,
    # and the last one sends none.
    following, before = [(rank + stride) % job.world_size for stride in (job.ranks_per_stage, -job.ranks_per_stage)]
    forward_in = m * (job.chunks - (stage == 0))
    forward_out = m * (job.chunks - (stage == job.p - 1))
    yield _Calls("pipeline", "send", forward_out, size, job.p, following)
    yield _Calls("pipeline", "send", forward_in, size, job.p, before)
    yield _Calls("pipeline", "recv_", forward_in, size, job.p, before)
    yield _Calls("pipeline", "recv_", forward_out, size, job.p, following)


def _data(job: JobShape, stage: int) -> Iterator[_Calls]:
    chosen = job.bucket or _default_bucket(job.d)
    shared = job.model.tied and job.p > 1
    for number, parameters in enumerate(chunk_parameters(job, stage)):
        # Only the first stage's gradients are on the critical path; all others are reduced in one piece.
        bucket = chosen if job.overlap_grad_reduce and stage == 0 and number == 0 else None
        experts = [parameter for parameter in parameters if parameter.expert]
        for size in _megatron_buckets(experts, job.d // job.ep, bucket, distributed_optimizer=False, shared=False):
            yield _Calls("data", "allreduce_coalesced_", 1, size * job.bytes_per_gradient, job.d // job.ep)
        dense = [parameter for parameter in parameters if not parameter.expert]
        sizes = _megatron_buckets(dense, job.d, bucket, distributed_optimizer=job.distributed_optimizer, shared=shared)
        if number > 0:
            sizes = [sum(sizes)]  # the buckets of further chunks are one message
        for size in sizes:
            if job.distributed_optimizer:
                reduced, gathered = size * job.bytes_per_gradient, size * job.bytes_per_value
                yield _Calls("data", "reduce_scatter_tensor_coalesced_", 1, reduced, job.d)
                yield _Calls("data", "allgather_into_tensor_coalesced_", 1, gathered, job.d)
            else:
                yield _Calls("data", "allreduce_coalesced_", 1, size * job.bytes_per_gradient, job.d)


def _embedding(job: JobShape, stage: int) -> Iterator[_Calls]:
    if job.model.tied and job.p > 1 and stage in (0, job.p - 1):
        words = padded_vocabulary(job.model.vocabulary, job.t, job.vocabulary_multiple) // job.t
        yield _Calls("embedding", "allreduce_", 1, words * job.model.hidden * job.bytes_per_gradient, 2)


def _norm_of_gradients(job: JobShape) -> Iterator[_Calls]:
    ranks = job.world_size if job.distributed_optimizer else job.p * job.t
    messages = 2 if job.dtype == "fp16" else 1  # the loss scaler first checks whether a gradient is infinite
    yield _Calls("model", "allreduce_", messages, _FLOAT_BYTES, ranks)
    if job.model.experts and job.ep > 1:
        yield _Calls("model", "allreduce_", 1, _FLOAT_BYTES, job.ep)


# -- buckets


# The distributed optimizer aligns each parameter to a multiple of 64, and the end of each bucket to one of 128 and of
# d.
_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


def _default_bucket(d: int) -> int:
    """Default bucket size in parameters (``DistributedDataParallelConfig.bucket_size``)."""
    return max(40_000_000, 1_000_000 * d)


def _megatron_buckets(
    parameters: Sequence[Parameter], d: int, bucket: int | None, *, distributed_optimizer: bool, shared: bool
) -> list[int]:
    """Elements of each bucket of a model chunk, including padding.

    A bucket is full once it has ``bucket`` parameters; None for a single one. The distributed optimizer pads buckets to
    a multiple of ``d``, and gives word embeddings that another stage shares (``shared``) their own bucket.
    """
    multiple = math.lcm(d, _BUCKET_ALIGNMENT) if distributed_optimizer else 1
    alignment = _PARAMETER_ALIGNMENT if distributed_optimizer else 1
    ends, position = [0], 0  # of the buckets, and of the last parameter
    for parameter in reversed(parameters):
        position = _up(position, alignment)
        own = shared and distributed_optimizer and parameter.word_embedding
        if own and position > ends[-1]:
            position = _up(position, multiple)
            ends.append(position)
        position += parameter.elements
        if own or (bucket is not None and position - ends[-1] >= bucket):
            position = _up(position, multiple)
            ends.append(position)
    if position > ends[-1]:
        ends.append(_up(position, multiple))
    return [end - start for start, end in itertools.pairwise(ends)]


# -- DDP, FSDP2 and HSDP: DDP reduces after the last micro-batch, FSDP2 after each


# DDP's limits, in bytes, of its first bucket and of all others (torch.nn.parallel.distributed).
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20


def _ddp(job: JobShape) -> Iterator[_Calls]:
    # Gradients become ready in reverse order of the parameters. A bucket ends once it reaches its limit.
    limit = job.bucket or _FIRST_BUCKET_BYTES
    size = 0
    for parameter in reversed(huggingface_parameters(job.model)):
        size += parameter.elements * job.bytes_per_gradient
        if size >= limit:
            yield _Calls("data", "allreduce_", 1, size, job.d)
            limit, size = job.bucket or _BUCKET_BYTES, 0
    if size:
        yield _Calls("data", "allreduce_", 1, size, job.d)
    if not job.model.learned_positions:
        # Rotary positions have two buffers of half a head's width in 32 bit; DDP broadcasts them once a step.
        yield _Calls("data", "broadcast_", 1, 2 * job.model.head_width // 2 * 4, job.d)


def _fsdp2(job: JobShape) -> Iterator[_Calls]:
    """Units are the layers, and the root with the rest; each is gathered, and its gradients reduced, in one piece."""
    shards, m = job.d // job.replicas, job.micro_batches
    for unit, parameters in grouped(huggingface_parameters(job.model), lambda parameter: parameter.unit).items():
        elements = _padded_elements(parameters, shards)
        # A layer is freed after the forward pass and gathered again; the root is kept until the backward pass ends.
        gathers = m * (1 if unit < 0 else 2)
        yield _Calls("data", "_allgather_base_", gathers, elements * job.bytes_per_value, shards)
        yield _Calls("data", "_reduce_scatter_base_", m, elements * job.bytes_per_gradient, shards)
        if job.replicas > 1:
            shard = elements * job.bytes_per_gradient // shards
            yield _Calls("data", "allreduce_", m, shard, job.replicas)


def _padded_elements(parameters: Iterable[Parameter], shards: int) -> int:
    """Elements of the parameters, with the first dimension of each padded to a multiple of the shards."""
    return sum(
        [math.ceil(parameter.shape[0] / shards) * shards * math.prod(parameter.shape[1:]) for parameter in parameters]
    )


# -- DeepSpeed's ZeRO


# DeepSpeed's default of ``reduce_bucket_size``, in elements.
_BUCKET = 500_000_000
# ZeRO-1 and 2 pad their flat parameters to this many elements on each rank.
_ALIGNMENT = 2


def _zero(job: JobShape) -> Iterator[_Calls]:
    parameters, d, m = huggingface_parameters(job.model), job.d, job.micro_batches
    if job.layout == "zero3":
        for size in _bucket_elements(parameters, job.bucket or _BUCKET, d):
            yield _Calls("data", "_reduce_scatter_base_", m, size * job.bytes_per_gradient, d)
        yield from _gathers(job, parameters)
        yield _Calls("data", "allreduce_", 1, 8, d)  # the gradient norm, and whether a gradient is infinite
        return
    reductions = m if job.layout == "zero2" else 1
    for size in _bucket_elements(parameters, job.bucket or _BUCKET, 1):
        yield _Calls("data", "allreduce_", reductions, size * job.bytes_per_gradient, d)
    if job.dtype != "fp32":
        yield _Calls("data", "allreduce_", 1, 1, d)  # whether a gradient is infinite
    yield _Calls("data", "allreduce_", 1, 4, d)  # the gradient norm
    whole = _up(elements(parameters), _ALIGNMENT * d)
    yield _Calls("data", "_allgather_base_", 1, whole * job.bytes_per_value, d)


def _bucket_elements(parameters: Sequence[Parameter], bucket: int, multiple: int) -> Iterator[int]:
    """Elements of each gradient message, in reverse order, each gradient padded to a multiple of ``multiple``.

    A bucket has at most ``bucket`` elements; a larger parameter has its own.
    """
    held = padded = 0
    for parameter in reversed(parameters):
        if held and held + parameter.elements > bucket:
            yield padded
            held = padded = 0
        held += parameter.elements
        padded += _up(parameter.elements, multiple)
    yield padded


def _gathers(job: JobShape, parameters: Sequence[Parameter]) -> Iterator[_Calls]:
    """ZeRO-3 gathers a module's parameters before its forward and before its backward pass.

    Small parameters stay whole, and are gathered once, after the optimizer step.
    """
    d, m, width = job.d, job.micro_batches, job.bytes_per_value
    for module in _modules(job, parameters):
        size = sum([_up(parameter.elements, d) for parameter in module if parameter.elements > job.persistence])
        # Tied word embeddings are gathered as embeddings and as output layer.
        uses = 2 if job.model.tied and module[0].word_embedding else 1
        if size:
            yield _Calls("data", "_allgather_base_", 2 * uses * m, size * width, d)
    for parameter in parameters:
        if parameter.elements <= job.persistence:
            yield _Calls("data", "_allgather_base_", 1, _up(parameter.elements, d) * width, d)


def _modules(job: JobShape, parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters by module: a vector belongs to the preceding matrix, and a norm has two if it has a bias."""
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
    """Whether the module of this first parameter also has a bias."""
    if len(parameter.shape) == 1:
        return job.model.norm_biases
    return job.model.biases and parameter.unit >= 0
