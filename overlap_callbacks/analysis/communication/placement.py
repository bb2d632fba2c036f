"""Placement of a job's ranks: which ones share a host, and the layout of the dimensions of parallelism.

In another layout ranks keep their work, and move. An order names dimensions, innermost first, like Megatron-core's
``order``: in ``tp-dp-pp`` the ranks of a tensor group are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from overlap_callbacks.analysis.communication.rank_grids import Ranks, ranks_in
from overlap_callbacks.analysis.results.messages import JobMessages, MessageGroup

# The host of a rank that shares it with no other, or did not report one.
UNKNOWN = -1

# The users' short names for dimensions.
_SHORT = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
_LAID_OUT = tuple(_SHORT.values())


# The messages of a window usually equal those of the previous one, and several parts of a report need this.
@lru_cache(maxsize=2)
def host_numbers(messages: JobMessages, world_size: int) -> Ranks:
    """The number of each rank's host, by the order of their lowest ranks; ``UNKNOWN`` if not known. A shared array."""
    hosts = np.full(world_size, UNKNOWN, dtype=np.int64)
    found = [
        (int(first), first + offsets)
        for shape in messages.hosts
        for offsets in [ranks_in(shape.offsets)]
        for first in ranks_in(shape.firsts)
    ]
    for number, (_, members) in enumerate(sorted(found, key=lambda host: host[0])):
        hosts[members[members < world_size]] = number
    hosts.flags.writeable = False
    return hosts


def equal_hosts(world_size: int, ranks_per_host: int) -> Ranks:
    """The number of each rank's host, of consecutive ranks; the last host may have fewer."""
    return np.arange(world_size, dtype=np.int64) // ranks_per_host


class MappingError(ValueError):
    """The job cannot be laid out as asked; the message says why."""


class Dimension(NamedTuple):
    """A dimension of parallelism in the layout of a job: the distance between neighbours, and the ranks of a group."""

    name: str
    stride: int
    size: int


def layout_of(messages: JobMessages, world_size: int) -> tuple[Dimension, ...]:
    """The dimensions of a job, from its groups, innermost first; MappingError if they do not make up the job."""
    found: dict[str, Dimension] = {}
    for dimension in filter(None, map(_dimension, messages.groups)):
        if dimension.name not in found or dimension.size > found[dimension.name].size:
            found[dimension.name] = dimension
    if "context" in found and "data" in found:
        found["data"] = _without_context(found["data"], found["context"])
    ordered = sorted([d for d in found.values() if d.size > 1], key=lambda d: d.stride)
    strides = np.cumprod([1, *[d.size for d in ordered]]).tolist()
    if not ordered or [*[d.stride for d in ordered], world_size] != strides:
        shown = ", ".join(f"{d.name} {d.size} (distance {d.stride})" for d in ordered) or "none"
        raise MappingError(
            f"the groups of the job do not show a layout of its {world_size} ranks, so no other one can be compared; "
            f"dimensions found: {shown}"
        )
    return tuple(ordered)


def _dimension(group: MessageGroup) -> Dimension | None:
    """The dimension of a group with equal distances between ranks; a pipeline's send gives that to the next stage."""
    name, size, offsets = group.dimension, group.group_size, group.offsets
    if name not in _LAID_OUT or size < 2 or len(offsets) != 1 or len(offsets[0][1]) != 1:
        return None
    stride, count = offsets[0][1][0]
    # A send goes to the next stage, or from the last back to the first.
    is_send = name == "pipeline" and count == 2 < size
    return Dimension(name, stride, size) if stride > 0 and (count == size or is_send) else None


def _without_context(data: Dimension, context: Dimension) -> Dimension:
    """Megatron-core reduces gradients over data and context at once; this gives the data dimension alone."""
    if data.stride == context.stride and data.size % context.size == 0:
        return Dimension("data", context.stride * context.size, data.size // context.size)
    return data


def parse_order(text: str, layout: Sequence[Dimension]) -> tuple[str, ...]:
    """An order of a layout's dimensions, innermost first, from text such as ``tp-dp-pp``.

    MappingError unless it names each dimension of the job once; it may also name dimensions of one rank.
    """
    names = [_SHORT.get(part, part) for part in text.lower().split("-")]
    has = {dimension.name for dimension in layout}
    order = tuple([name for name in names if name in has])
    if not set(names) <= set(_LAID_OUT) or len(set(names)) != len(names) or set(order) != has:
        given = ", ".join(f"{d.name} ({d.size})" for d in layout)
        raise MappingError(
            f"mapping must name each dimension of the job once, the innermost first, such as tp-dp-pp; the job has "
            f"{given}; got {text!r}"
        )
    return order


def placed(layout: Sequence[Dimension], order: Sequence[str]) -> Ranks:
    """The slot of each rank under another order."""
    by_name = {d.name: d for d in layout}
    ranks = np.arange(int(np.prod([d.size for d in layout])), dtype=np.int64)
    slots = np.zeros_like(ranks)
    stride = 1
    for name in order:
        dimension = by_name[name]
        slots += ranks // dimension.stride % dimension.size * stride
        stride *= dimension.size
    return slots


def order_of(names: Sequence[str]) -> str:
    """Short text for an order of dimensions, e.g. ``tp-dp-pp``."""
    short = {name: text for text, name in _SHORT.items()}
    return "-".join(short[name] for name in names)
