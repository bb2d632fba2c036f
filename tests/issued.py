"""Collectives as the gate would have seen them, for tests of the analysis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlap_callbacks.gate.collectives import POINT_TO_POINT


@dataclass(frozen=True)
class FakeGroup:
    name: str
    backend: str = "nccl"
    ranks: tuple[int, ...] = (0, 1)


@dataclass(frozen=True)
class FakeCollective:
    """One collective, send or receive; by default an asynchronous one of two ranks on a device."""

    operator: str
    dimension: str
    bytes_in: int = 8
    bytes_out: int = 8
    group_size: int = 2
    asynchronous: bool = True
    on_device: bool = True
    coalesced: int = 0
    posted: int = 0
    backend: str = "nccl"
    peer: int = -1
    of: FakeGroup | None = None
    name: str = ""

    @property
    def group(self) -> FakeGroup:
        return self.of or FakeGroup(self.dimension, self.backend, tuple(range(self.group_size)))

    @property
    def point_to_point(self) -> bool:
        return self.operator in POINT_TO_POINT


def issue(operator: str, dimension: str, bytes_in: int = 8, **fields: Any) -> FakeCollective:
    """A collective of the group that serves this dimension."""
    return FakeCollective(operator, dimension, bytes_in, **fields)
