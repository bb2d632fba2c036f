"""Whether somebody else communicated during a step: another thread, or code that the gate's kernels do not see.

Each process group counts what it issues, whoever asks for it. Where the count went up by more than the gate saw, there
was somebody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from overlap_callbacks.gate.collectives import POINT_TO_POINT, Collective, Group

# Operators that Gloo counts several times, some of them once for each tensor. Where one is among those seen, the count
# of its group tells nothing.
_COUNTED_SEVERAL_TIMES = frozenset({"monitored_barrier_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"})


class SequenceNumbers:
    """The counts of all process groups of this rank at the moment of construction.

    Attributes:
        complete: whether every group tells its count; not all backends do.
    """

    def __init__(self) -> None:
        groups = _groups()
        self.complete = groups is not None
        self._before: dict[dist.ProcessGroup, int] = {}
        for group in groups or ():
            number = _sequence_number(group)
            if number is None:
                self.complete = False
            else:
                self._before[group] = number

    def foreign_groups(self, seen: Iterable[Collective], dimensions: Mapping[str, str]) -> tuple[str, ...]:
        """The groups that have issued more since then than ``seen``, by their names for people.

        Never names a group without cause: where the count may go up by less than one for each call (members of a
        coalescing block on NCCL), somebody else may pass unnoticed.

        Args:
            seen: all collectives that the gate saw since then.
            dimensions: of groups whose dimension is known, by the group's name.
        """
        calls = Counter((collective.operator, collective.group.name) for collective in seen)
        foreign = []
        alive = _groups() or ()
        for group, before in self._before.items():
            if group not in alive:
                continue  # destroyed meanwhile
            after = _sequence_number(group)
            if after is None or after == before:
                continue
            described = Group.of(group, dimensions)
            # NCCL counts sends and receives apart; Gloo counts them together with collectives.
            apart = POINT_TO_POINT if "nccl" in described.backend else frozenset()
            own = {operator: n for (operator, name), n in calls.items() if name == described.name}
            accounted = sum(n for operator, n in own.items() if operator not in apart)
            if after - before > accounted and not _COUNTED_SEVERAL_TIMES.intersection(own):
                foreign.append(described.label)
        return tuple(foreign)


def _groups() -> tuple[dist.ProcessGroup, ...] | None:
    """The process groups that this rank is a member of; None if this torch keeps them elsewhere."""
    groups = getattr(c10d._world, "pg_map", None)
    return None if groups is None else tuple(groups)


def _sequence_number(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # the backend does not count
        return None
