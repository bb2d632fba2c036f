"""What if the dimensions of parallelism were laid out on the same hosts in another order?

Ranks keep what they do; where each stands changes. The order names dimensions, the innermost first, as Megatron-core's
``order`` does: in ``tp-dp-pp`` the ranks of a tensor group are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlap_callbacks.analysis.communication.rank_grids import Ranks
from overlap_callbacks.analysis.results.messages import JobMessages

# Short names of dimensions that users write.
SHORT = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
_LAID_OUT = tuple(SHORT.values())


class MappingError(ValueError):
    """Why no other layout can be told."""


@dataclass(frozen=True)
class Dimension:
    """A dimension of parallelism in the layout of a job.

    Attributes:
        name: of the dimension.
        stride: distance between neighbours in it.
        size: how many ranks a group of it has.
    """

    name: str
    stride: int
    size: int


def layout_of(messages: JobMessages, world_size: int) -> tuple[Dimension, ...]:
    """The dimensions of a job as its groups show them, the innermost first.

    Raises:
        MappingError: they do not make up the job.
    """
    found: dict[str, Dimension] = {}
    for group in messages.groups:
        if group.dimension not in _LAID_OUT or group.group_size < 2:
            continue
        dimension = _dimension(group.dimension, group.group_size, group.offsets)
        if dimension is not None and dimension.size > getattr(found.get(group.dimension), "size", 1):
            found[group.dimension] = dimension
    if "context" in found and "data" in found:
        found["data"] = _without_context(found["data"], found["context"])
    ordered = sorted([d for d in found.values() if d.size > 1], key=lambda d: d.stride)
    expected = 1
    for dimension in ordered:
        if dimension.stride != expected:
            raise MappingError(_no_layout(ordered, world_size))
        expected *= dimension.size
    if expected != world_size or not ordered:
        raise MappingError(_no_layout(ordered, world_size))
    return tuple(ordered)


def _dimension(name: str, size: int, offsets: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> Dimension | None:
    """Of a group whose ranks stand at equal distances; of a pipeline's send, from its distance to the next stage."""
    if len(offsets) == 1 and len(offsets[0][1]) == 1:
        stride, count = offsets[0][1][0]
        if count == size and stride > 0:
            return Dimension(name, stride, size)
        if name == "pipeline" and count == 2 < size:
            # To the next stage, or from the last back to the first.
            return Dimension(name, stride, size) if stride > 0 else None
    return None


def _without_context(data: Dimension, context: Dimension) -> Dimension:
    """Megatron-core reduces gradients over data and context at once; what is left is data alone."""
    if data.stride == context.stride and data.size % context.size == 0:
        return Dimension("data", context.stride * context.size, data.size // context.size)
    return data


def _no_layout(found: Sequence[Dimension], world_size: int) -> str:
    shown = ", ".join(f"{d.name} {d.size} (distance {d.stride})" for d in found) or "none"
    return (
        f"the groups of the job do not show a layout of its {world_size} ranks, so no other one can be compared; "
        f"dimensions found: {shown}"
    )


def parse_order(text: str, layout: Sequence[Dimension]) -> tuple[str, ...]:
    """An order of the dimensions of a layout, the innermost first, from text such as ``tp-dp-pp``.

    Dimensions of one rank may be named; those that the job has must be.

    Raises:
        MappingError: it is no order of them.
    """
    names = [SHORT.get(part, part) for part in text.lower().split("-")]
    has = {dimension.name for dimension in layout}
    unknown = [name for name in names if name not in _LAID_OUT]
    order = tuple([name for name in names if name in has])
    if unknown or len(set(names)) != len(names) or set(order) != has:
        given = ", ".join(f"{d.name} ({d.size})" for d in layout)
        raise MappingError(
            f"mapping must name each dimension of the job once, the innermost first, such as tp-dp-pp; the job has "
            f"{given}; got {text!r}"
        )
    return order


def placed(layout: Sequence[Dimension], order: Sequence[str]) -> Ranks:
    """Where each rank stands under another order: the slot of each rank."""
    sizes = {d.name: d.size for d in layout}
    ranks = np.arange(int(np.prod([d.size for d in layout])), dtype=np.int64)
    slots = np.zeros_like(ranks)
    stride = 1
    by_name = {d.name: d for d in layout}
    for name in order:
        dimension = by_name[name]
        slots += ranks // dimension.stride % dimension.size * stride
        stride *= sizes[name]
    return slots


def order_of(names: Sequence[str]) -> str:
    """An order of dimensions in short, e.g. ``tp-dp-pp``."""
    short = {name: text for text, name in SHORT.items()}
    return "-".join(short[name] for name in names)
