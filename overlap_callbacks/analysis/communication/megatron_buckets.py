"""The buckets in which Megatron-core reduces gradients and gathers parameters (its ``_ParamAndGradBuffer``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from overlap_callbacks.analysis.communication.parameters import Parameter

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
