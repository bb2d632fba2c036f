"""What process groups reveal about a step: coalescing blocks, and collectives that the gate missed.

**Coalescing blocks.** ``torch.distributed._coalescing_manager(group)`` collects collectives in ``pg_coalesce_state``,
and issues them with one ``*_coalesced_`` operator at its end. With ``device=`` it also opens an NCCL group, in which
nothing starts before the group ends: after that operator, when the state is gone. Waiting for the operator's work there
would wait for nothing, and free tensors that are still to be read.

**Foreign collectives.** Each process group counts what it issues, on any thread. If the count went up by more than the
gate saw, something else communicated: another thread, or code that the gate's kernels do not see.
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

# Operators that Gloo counts several times, some once per tensor. If the gate saw one, its group's count proves nothing.
_COUNTED_SEVERAL_TIMES = frozenset({"monitored_barrier_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"})


def _code_of(function: Any) -> CodeType | None:
    """The code of a torch function that other versions may lack, or replace by something else."""
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None


_MANAGER = _code_of(getattr(c10d, "_coalescing_manager", None))


class CoalescingBlocks:
    """The coalescing blocks of one step. ``open``: torch's own table of the open ones, by group."""

    def __init__(self) -> None:
        # Empty if this torch has none.
        self.open: dict[dist.ProcessGroup, list[Any]] = getattr(getattr(c10d, "_world", None), "pg_coalesce_state", {})
        # The latest block of each group and its number. Holding the block keeps its memory from being reused by
        # another.
        self._last: dict[dist.ProcessGroup, tuple[list[Any], int]] = {}
        self._count = 0

    def number_of(self, group: dist.ProcessGroup) -> int:
        """Number of the group's open block, from 1; 0 if it has none. Several groups may have open blocks."""
        block = self.open.get(group)
        if block is None:
            return 0
        last, number = self._last.get(group, (None, 0))
        if block is not last:
            self._count = number = self._count + 1
            self._last[group] = (block, number)
        return number

    def is_held_back(self, spec: OperatorSpec) -> bool:
        """Whether a collective issued now will only start when a block ends, of any group."""
        return bool(self.open) or (spec.ends_block and _within_manager_with_device())


def _within_manager_with_device() -> bool:
    """Whether a ``_coalescing_manager`` with a device issues the operator; True if this torch does not reveal it."""
    if _MANAGER is None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # While the block's body runs, the manager is suspended and has no frame on the stack.
        if frame.f_code is _MANAGER:
            return bool(frame.f_locals.get("device", True))
        frame = frame.f_back
    return False


class SequenceNumbers:
    """The counts of this rank's groups when created. ``complete``: every group has one; not all backends do."""

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
        """Labels of the groups that have since issued more than the gate saw (``seen``).

        Never names a group without evidence: if it is unknown by how much a call counts, foreign calls may go
        unnoticed. ``dimensions``: known dimensions, by group name.
        """
        by_group: dict[str, list[Collective]] = defaultdict(list)
        for collective in seen:
            by_group[collective.group.name].append(collective)
        foreign = []
        alive = groups_of_rank() or ()
        for group, before in self._before.items():
            if group not in alive:
                continue  # destroyed since
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
        """Collectives that all groups together have issued since; None if one of them does not count."""
        alive = groups_of_rank() or ()
        after = {group: _sequence_number(group) for group in self._before if group in alive}
        known = [number - self._before[group] for group, number in after.items() if number is not None]
        return sum(known) if self.complete and len(known) == len(after) else None

    def before(self, dimensions: Mapping[str, str], *, without: Iterable[str] = ()) -> dict[str, int]:
        """The counts at creation, by group name. ``without``: labels of groups to exclude."""
        alive, left_out = groups_of_rank() or (), set(without)
        return {
            group.group_name: count
            for group, count in self._before.items()
            if group in alive and not (left_out and Group.of(group, dimensions).label in left_out)
        }


def _most_counted(collective: Collective) -> int:
    """Maximum increase of a group's count for one call."""
    if "nccl" not in collective.group.backend:
        return 1
    # NCCL counts sends and receives separately. A coalescing block counts once: for its first member or, in some
    # versions of torch, when it opens.
    coalesced = bool(collective.coalesced) or "coalesced" in collective.operator
    return int(coalesced) + int(collective.operator not in POINT_TO_POINT)


def groups_of_rank() -> tuple[dist.ProcessGroup, ...] | None:
    """The process groups of this rank; None if this torch keeps them elsewhere."""
    groups = getattr(c10d._world, "pg_map", None)
    return None if groups is None else tuple(groups)


def _sequence_number(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # the backend does not count
        return None
