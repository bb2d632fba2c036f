"""What the ranks of a benchmark say to each other beside what is measured."""

from __future__ import annotations

import datetime
from typing import Any, Protocol

import torch.distributed as dist


class Ranks(Protocol):
    """The processes that measure.

    Attributes:
        rank: number of this one.
    """

    rank: int

    def agree(self, value: Any) -> Any:
        """What rank 0 says; on all ranks."""

    def gather(self, value: Any) -> list[Any]:
        """What all ranks say, in their order; on all ranks."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""


class OneProcess:
    """A benchmark of one process, as on a loopback link."""

    rank = 0

    def agree(self, value: Any) -> Any:
        """The value itself."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The value itself."""
        return [value]

    def barrier(self) -> None:
        """Nobody else is waited for."""


class GroupRanks:
    """Ranks of a process group. They talk over a Gloo group of their own, beside the one that is measured.

    Args:
        timeout: how long a rank waits for the others.
    """

    def __init__(self, timeout: datetime.timedelta) -> None:
        self.rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def agree(self, value: Any) -> Any:
        """What rank 0 says; on all ranks."""
        said = [value if self.rank == 0 else None]
        dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def gather(self, value: Any) -> list[Any]:
        """What all ranks say, in their order; on all ranks."""
        said: list[Any] = [None] * self._size
        dist.all_gather_object(said, value, group=self._group)
        return said

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        dist.barrier(group=self._group)
