"""Coalescing blocks: which collectives have not started yet when their operator returns.

``torch.distributed._coalescing_manager(group)`` collects the collectives within it in ``pg_coalesce_state``, and issues
them with one ``*_coalesced_`` operator at its end. With ``device=`` it also opens a group of NCCL, in which nothing
starts before the group ends. torch removes the state before it issues that operator, and ends NCCL's group after it
(``torch/distributed/distributed_c10d.py``). So the state alone does not tell that the group is still open: whoever
waited for the operator's work there would wait for nothing, and would free tensors that are still to be read.
"""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from overlap_callbacks.gate.collectives import OperatorSpec


def _code_of(function: Any) -> CodeType | None:
    """The code of a function of torch's that may be missing, or be something else, in another torch."""
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None


_MANAGER = _code_of(getattr(c10d, "_coalescing_manager", None))


class CoalescingBlocks:
    """The coalescing blocks of one step.

    Attributes:
        open: torch's own table of those that are open, by group.
    """

    def __init__(self) -> None:
        self.open: dict[dist.ProcessGroup, list[Any]] = _blocks_of_torch()
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
        """Whether a collective that is issued now starts only when a block ends.

        Any group's block counts: a group of NCCL that is open on a thread holds back what the thread issues on others
        too.
        """
        return bool(self.open) or (spec.ends_block and _within_manager_with_device())


def _blocks_of_torch() -> dict[dist.ProcessGroup, list[Any]]:
    """The table that torch has of open blocks; an empty one where this torch has none."""
    return getattr(getattr(c10d, "_world", None), "pg_coalesce_state", {})


def _within_manager_with_device() -> bool:
    """Whether a ``_coalescing_manager`` that was given a device is what issues the operator.

    Where this torch does not tell, it may be one: what has not started must not be waited for.
    """
    if _MANAGER is None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # While the manager's block runs, the manager itself is suspended, and is no frame of the stack.
        if frame.f_code is _MANAGER:
            return bool(frame.f_locals.get("device", True))
        frame = frame.f_back
    return False
