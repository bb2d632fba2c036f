"""The shape of a kernel's launch, as Kineto writes it into the metadata of live events and of trace files."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec

_Triple = tuple[int, int, int]


class LaunchShape(msgspec.Struct, frozen=True):
    """How a kernel was launched.

    Attributes:
        grid: thread blocks in each direction.
        block: threads of a block in each direction.
        registers_per_thread, shared_memory_bytes: what a thread, and a block, holds; 0 if unknown.
        num_sms: SMs of the device, as far as the metadata tells; 0 if unknown.
    """

    grid: _Triple
    block: _Triple
    registers_per_thread: int = 0
    shared_memory_bytes: int = 0
    num_sms: int = 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> LaunchShape | None:
        """Read the shape from an event's metadata; None without a grid and a block, or if they make no sense."""
        try:
            grid, block = _triple(metadata["grid"]), _triple(metadata["block"])
            blocks_per_sm = float(metadata.get("blocks per SM", 0))
            return cls(
                grid,
                block,
                int(metadata.get("registers per thread", 0)),
                int(metadata.get("shared memory", 0)),
                # Kineto gives the blocks of the whole grid over the device's SMs.
                round(prod(grid) / blocks_per_sm) if blocks_per_sm > 0 else 0,
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    @property
    def num_blocks(self) -> int:
        """Thread blocks of the whole grid."""
        return prod(self.grid)

    @property
    def threads_per_block(self) -> int:
        """Threads of one block."""
        return prod(self.block)

    def __str__(self) -> str:
        """Grid and block, as the tables of kernels keep them."""
        return f"{list(self.grid)} {list(self.block)}"


def _triple(value: Any) -> _Triple:
    x, y, z = (int(part) for part in value)
    return x, y, z
