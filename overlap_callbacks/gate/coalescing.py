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
from types import FrameType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from overlap_callbacks.gate.collectives import OperatorSpec

_MANAGER = inspect.unwrap(c10d._coalescing_manager).__code__


class CoalescingBlocks:
    """The coalescing blocks of one step.

    Attributes:
        open: torch's own table of those that are open, by group.
    """

    def __init__(self) -> None:
        self.open: dict[dist.ProcessGroup, list[Any]] = c10d._world.pg_coalesce_state
        self._last: list[Any] | None = None  # the block seen last; held, so that no other takes its place
        self._count = 0

    def number_of(self, group: dist.ProcessGroup) -> int:
        """The number of the group's open block, from 1; 0 if it has none."""
        block = self.open.get(group)
        if block is None:
            return 0
        if block is not self._last:
            self._last = block
            self._count += 1
        return self._count

    def hold_back(self, spec: OperatorSpec) -> bool:
        """Whether a collective that is issued now starts only when a block ends.

        Any group's block counts: a group of NCCL that is open on a thread holds back what the thread issues on others
        too.
        """
        return bool(self.open) or (spec.ends_block and _within_manager_with_device())


def _within_manager_with_device() -> bool:
    """Whether a ``_coalescing_manager`` that was given a device is what issues the operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # While the manager's block runs, the manager itself is suspended, and is no frame of the stack.
        if frame.f_code is _MANAGER:
            return bool(frame.f_locals.get("device", True))
        frame = frame.f_back
    return False
