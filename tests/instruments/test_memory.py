"""The allocator's statistics, as torch gives them for a CUDA device; the device is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_callbacks.instruments.device import MemoryReader, reading_of

COUNTERS = (
    "allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes", "inactive_split_bytes",
    "allocation", "active", "segment", "inactive_split",
)  # fmt: skip


def stats(current: int, peak: int) -> dict[str, Any]:
    """As ``torch._C._cuda_memoryStats`` of torch 2.13 gives them: by counter, pool and kind."""
    pools = ("all", "small_pool", "large_pool")
    nested = {
        name: {pool: {"current": current, "peak": peak, "allocated": 9, "freed": 9} for pool in pools}
        for name in COUNTERS
    }
    largest = {"current": 1, "peak": 2, "allocated": 0, "freed": 0}
    return {**nested, "oversize_segments": largest, "num_ooms": 0, "num_alloc_retries": 0, "max_split_size": -1}


def test_all_peaks_are_read_and_the_one_of_tensors_apart() -> None:
    reading = reading_of(stats(300, 500))
    assert reading is not None
    assert (reading.allocated_bytes, reading.peak_bytes) == (300, 500)
    assert sorted(reading.peaks) == [2] + [500] * 3 * len(COUNTERS)


def test_the_device_of_the_compute_stream_is_read_and_never_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def read(device: int) -> dict[str, Any]:
        asked.append(device)
        return stats(1, 2)

    def refuse(*_: Any) -> None:
        raise AssertionError("the peaks are the user's")

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", read)
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    stream: Any = SimpleNamespace(device=torch.device("cuda", 3))
    assert MemoryReader.of(stream).read() == stats(1, 2)
    assert asked == [3]


def test_on_cpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: pytest.fail("asked"))
    assert MemoryReader.of(None).read() is None


def test_an_allocator_without_counters_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(device: int) -> Any:
        asked.append(device)
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuse)
    reader = MemoryReader(torch.device("cuda", 0))
    assert [reader.read() for _ in range(3)] == [None] * 3
    assert asked == [0]


@pytest.mark.parametrize("raw", [{}, {"allocated_bytes": {}}, {"allocated_bytes": {"all": {"current": None}}}])
def test_counters_that_are_not_there_are_unknown(raw: dict[str, Any]) -> None:
    assert reading_of(raw) is None
