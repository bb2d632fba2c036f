"""What process groups tell of a step: coalescing blocks, and collectives that the gate did not see.

**Coalescing blocks.** ``torch.distributed._coalescing_manager(group)`` collects collectives in ``pg_coalesce_state``,
and issues them with one ``*_coalesced_`` operator at its end. With ``device=`` it also opens a group of NCCL, in which
nothing starts before the group ends: after that operator, when the state is gone. Whoever waited for the operator's
work there would wait for nothing, and would free tensors that are still to be read.

**Collectives of others.** Each process group counts what it issues, on any thread. If the count went up by more than
the gate saw, somebody else communicated: another thread, or code that the gate's kernels do not see.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from overlap_callbacks.gate.collectives import POINT_TO_POINT, Collective, Group, OperatorSpec

# Operators that Gloo counts several times, some of them once for each tensor. If the gate saw one of them, the count of
# its group proves nothing.
_COUNTED_SEVERAL_TIMES = frozenset({"monitored_barrier_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"})


def _code_of(function: Any) -> CodeType | None:
    """The code of a function of torch's that may be missing, or be something else, in another torch."""
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None


_MANAGER = _code_of(getattr(c10d, "_coalescing_manager", None))


class CoalescingBlocks:
    """The coalescing blocks of one step; ``open`` is torch's own table of those that are open, by group."""

    def __init__(self) -> None:
        # An empty one where this torch has none.
        self.open: dict[dist.ProcessGroup, list[Any]] = getattr(getattr(c10d, "_world", None), "pg_coalesce_state", {})
        # By group, the block seen last and its number. The block is held, so that no other takes its place in memory.
        self._last: dict[dist.ProcessGroup, tuple[list[Any], int]] = {}
        self._count = 0

    def number_of(self, group: dist.ProcessGroup) -> int:
        """The number of the group's open block, from 1; 0 if it has none. Blocks of several groups may be open."""
        block = self.open.get(group)
        if block is None:
            return 0
        last, number = self._last.get(group, (None, 0))
        if block is not last:
            self._count = number = self._count + 1
            self._last[group] = (block, number)
        return number

    def hold_back(self, spec: OperatorSpec) -> bool:
        """Whether a collective that is issued now starts only when a block ends, of whatever group."""
        return bool(self.open) or (spec.ends_block and _within_manager_with_device())


def _within_manager_with_device() -> bool:
    """Whether a ``_coalescing_manager`` with a device issues the operator; where this torch does not tell, it may."""
    if _MANAGER is None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # While the manager's block runs, the manager itself is suspended, and is no frame of the stack.
        if frame.f_code is _MANAGER:
            return bool(frame.f_locals.get("device", True))
        frame = frame.f_back
    return False


class SequenceNumbers:
    """The counts of this rank's groups when it is made; ``complete`` if every group has one: not all backends do."""

    def __init__(self) -> None:
        groups = groups_of_rank()
        self.complete = groups is not None
        self._before: dict[dist.ProcessGroup, int] = {}
        for group in groups or ():
            number = _sequence_number(group)
            if number is None:
                self.complete = False
            else:
                self._before[group] = number

    def foreign_groups(self, seen: Iterable[Collective], dimensions: Mapping[str, str]) -> tuple[str, ...]:
        """The labels of the groups that have issued more since then than the gate saw (``seen``).

        Never names a group without cause: where it is not known by how much a call counts, others may pass unnoticed.
        ``dimensions`` are those of groups whose dimension is known, by the group's name.
        """
        by_group: dict[str, list[Collective]] = defaultdict(list)
        for collective in seen:
            by_group[collective.group.name].append(collective)
        foreign = []
        alive = groups_of_rank() or ()
        for group, before in self._before.items():
            if group not in alive:
                continue  # destroyed meanwhile
            after = _sequence_number(group)
            if after is None or after == before:
                continue
            described = Group.of(group, dimensions)
            own = by_group[described.name]
            accounted = sum(_most_counted(collective) for collective in own)
            if after - before > accounted and not any(c.operator in _COUNTED_SEVERAL_TIMES for c in own):
                foreign.append(described.label)
        return tuple(foreign)

    @property
    def issued(self) -> int | None:
        """Collectives that all groups together have issued since then; None if one of them does not count."""
        alive = groups_of_rank() or ()
        after = {group: _sequence_number(group) for group in self._before if group in alive}
        known = [number - self._before[group] for group, number in after.items() if number is not None]
        return sum(known) if self.complete and len(known) == len(after) else None

    def before(self, dimensions: Mapping[str, str], *, without: Iterable[str] = ()) -> dict[str, int]:
        """The counts when this was made, by the group's name; ``without`` are labels of groups to leave out."""
        alive, left_out = groups_of_rank() or (), set(without)
        return {
            group.group_name: count
            for group, count in self._before.items()
            if group in alive and not (left_out and Group.of(group, dimensions).label in left_out)
        }


def _most_counted(collective: Collective) -> int:
    """By how much a group's count goes up for one call, at most."""
    if "nccl" not in collective.group.backend:
        return 1
    # NCCL counts sends and receives apart. A coalescing block counts once: for its first member, or, in some versions
    # of torch, when it opens.
    coalesced = bool(collective.coalesced) or "coalesced" in collective.operator
    return int(coalesced) + int(collective.operator not in POINT_TO_POINT)


def groups_of_rank() -> tuple[dist.ProcessGroup, ...] | None:
    """The process groups that this rank is a member of; None if this torch keeps them elsewhere."""
    groups = getattr(c10d._world, "pg_map", None)
    return None if groups is None else tuple(groups)


def _sequence_number(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # the backend does not count
        return None
