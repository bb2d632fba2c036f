"""What each rank sends in a step under DeepSpeed's ZeRO, message by message.

Counted are DeepSpeed 0.19's own calls for Hugging Face's GPT-2 and LLaMA; ``docs/predict.md`` says what differs
elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.parameters import Parameter, elements, huggingface_parameters
from overlap_callbacks.analysis.communication.row_sums import row
from overlap_callbacks.analysis.communication.rows import MessageRow

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
