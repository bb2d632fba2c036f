"""Whether the messages of a record are plausible: a damaged or made-up record must not exhaust memory."""

from __future__ import annotations

from overlap_callbacks.analysis.communication.rank_grids import MAX_GRIDS, Grids, number_in
from overlap_callbacks.analysis.communication.sums import MAX_HEARD
from overlap_callbacks.analysis.results.messages import JobMessages, MessageGroup

# Ranks of a job, far above any.
MAX_RANKS = 1 << 20
_MAX_EXPONENT = 63
_MAX_AMOUNT = 1 << 63


def are_sound(messages: JobMessages, world_size: int) -> bool:
    """Whether ranks, hosts and amounts are possible in a job of this size."""
    if not 0 < world_size <= MAX_RANKS or len(messages.ranks) > MAX_HEARD:
        return False
    if not all(_are_ranks((grid,), world_size) for grid in messages.ranks) or number_in(messages.ranks) > world_size:
        return False
    for shape in messages.hosts:
        if not shape.firsts or not _are_ranks(shape.firsts, world_size) or not _fit(shape.offsets, world_size):
            return False
        if not 0 < number_in(shape.offsets) * number_in(shape.firsts) <= world_size:
            return False
    return all(_is_sound(group, world_size) for group in messages.groups)


def _is_sound(group: MessageGroup, world_size: int) -> bool:
    amounts = (group.messages, group.bytes, group.bytes_in, group.group_size)
    if group.num_members < 1 or min(amounts) < 0 or max(amounts) > _MAX_AMOUNT or group.group_size > world_size:
        return False
    for size, number, total in group.sizes:
        if not (-1 <= size <= _MAX_EXPONENT and 0 <= number <= _MAX_AMOUNT and 0 <= total <= _MAX_AMOUNT):
            return False
    if group.whole and (not group.firsts or not group.offsets):
        return False
    if number_in(group.firsts) * number_in(group.offsets) > max(group.num_members, 2) * world_size:
        return False
    return (
        _are_ranks(group.ranks, world_size)
        and _are_ranks(group.firsts, world_size)
        and _fit(group.offsets, world_size)
        and -2 <= group.stage < world_size
    )


def _are_ranks(grids: Grids, world_size: int) -> bool:
    return _fit(grids, world_size) and all(first >= 0 for first, _ in grids)


def _fit(grids: Grids, world_size: int) -> bool:
    """Whether no rank lies beyond the job, above or below, and no grid has more of them than it."""
    if len(grids) > MAX_GRIDS:
        return False
    for first, levels in grids:
        low = high = first
        total = 1
        for stride, count in levels:
            total *= count
            if count < 1 or total > world_size or abs(stride) > world_size:
                return False
            reach = stride * (count - 1)
            low, high = low + min(0, reach), high + max(0, reach)
        if low <= -world_size or high >= world_size:
            return False
    return number_in(grids) <= world_size
