"""Reads the counters of torch's allocator on the device. Never resets them: they are the user's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from overlap_callbacks.analysis.memory import AllocatorReading
from overlap_callbacks.instruments import device

# As the allocator gives it: numbers, and counters of numbers, by name.
RawReading = dict[str, Any]


class MemoryReader:
    """Reads the allocator of one device, at a few ten microseconds a time. It neither waits nor synchronises.

    Args:
        of: the device; None on CPU, where there is nothing to read.
    """

    def __init__(self, of: torch.device | None) -> None:
        self._device = of

    @classmethod
    def of(cls, stream: device.Stream | None) -> MemoryReader:
        """Reads the allocator of a stream's device."""
        return cls(None if stream is None else stream.device)

    def read(self) -> RawReading | None:
        """The counters now; None where there are none. What they mean is worked out later, by ``reading_of``."""
        if self._device is None:
            return None
        try:
            return device.allocator_counters(self._device)
        except Exception:  # an allocator of the user's own has no counters
            self._device = None
            return None


def reading_of(raw: RawReading) -> AllocatorReading | None:
    """The counters that are used; None if the allocator does not have them."""
    try:
        allocated = raw["allocated_bytes"]["all"]
        return AllocatorReading(int(allocated["current"]), int(allocated["peak"]), tuple(list(_peaks(raw))))
    except (KeyError, TypeError):
        return None


def _peaks(raw: RawReading) -> Iterator[int]:
    for name in sorted(raw):
        value = raw[name]
        if isinstance(value, dict):
            if "peak" in value:
                yield int(value["peak"])
            else:
                yield from _peaks(value)
