"""The module for the device, with stand-ins for accelerators' modules of torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from overlap_callbacks.analysis.kernels.sm_loss import Chip
from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.device import MemoryReader, chip_of, reading_of

TOY = SimpleNamespace(type="toy", index=1)  # torch knows no such type here


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    device.accelerator.cache_clear()
    yield
    device.accelerator.cache_clear()


def has(monkeypatch: pytest.MonkeyPatch, kind: str, **functions: Any) -> None:
    """Have torch be built for a type of device, whose module has these functions."""
    monkeypatch.setattr(device, "kind", lambda: kind)
    monkeypatch.setattr(torch, kind, SimpleNamespace(**functions), raising=False)


def refuse(*_: Any) -> Any:
    raise AssertionError("this would create a context")


def test_a_device_is_in_use_once_the_job_has_initialised_it(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "xpu", is_initialized=lambda: False, current_device=refuse)
    assert device.in_use() is None
    has(monkeypatch, "xpu", is_initialized=lambda: True, current_device=lambda: 3)
    assert device.in_use() == torch.device("xpu", 3)


def test_a_device_that_cannot_say_whether_it_is_in_use_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "mps", current_device=refuse)
    assert device.in_use() is None
    assert not device.is_timed(torch.device("mps"))
    assert "'mps'" in device.refusal("mps")


def test_a_torch_without_an_accelerator_has_none_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert (device.kind(), device.in_use()) == ("", None)
    assert not device.accelerator().is_initialized()
    assert not device.is_timed(torch.device("xla", 0))


def test_only_the_type_that_torch_is_built_for_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "xpu", is_initialized=lambda: True)
    assert device.is_timed(torch.device("xpu", 0))
    assert not device.is_timed(torch.device("xla", 0))
    assert not device.is_profiled(torch.device("xpu", 0))
    assert device.is_profiled(torch.device("cuda", 0))


class Event:
    def __init__(self, enable_timing: bool) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: Any) -> None:
        self.stream = stream


def test_streams_events_and_captures_are_those_of_the_devices_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "xpu", Event=Event, current_stream=lambda of: ("current of", of),
        is_current_stream_capturing=lambda: True)  # fmt: skip
    own = device.accelerator()
    stream: Any = own.current_stream(torch.device("xpu", 2))
    assert stream == ("current of", torch.device("xpu", 2))
    mark: Any = own.mark(stream)
    assert (type(mark), mark.enable_timing, mark.stream) == (Event, True, stream)
    assert own.is_capturing()


def test_what_a_module_lacks_is_torchs_own_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "toy")
    own = device.accelerator()
    assert (own.event, own.current_stream) == (torch.Event, torch.accelerator.current_stream)
    assert not own.is_capturing()
    of: Any = TOY
    assert device.name(of) == "toy"
    stream: Any = SimpleNamespace(device=of)
    assert MemoryReader(stream).read() is None
    assert device.free_bytes(of, 0.9) is None


def test_what_is_free_is_what_neither_this_process_at_its_peak_nor_another_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of 100 bytes 30 are free, and this process holds 50 of the rest: others have 20. Its tensors took 40 at most.
    has(monkeypatch, "toy", mem_get_info=lambda of: (30, 100), memory_reserved=lambda of: 50,
        max_memory_allocated=lambda of: 40)  # fmt: skip
    of: Any = TOY
    assert device.free_bytes(of, 0.9) == pytest.approx(90 - 20 - 40)
    # The job lets its allocator take 60 of the 100.
    has(monkeypatch, "toy", mem_get_info=lambda of: (30, 100), memory_reserved=lambda of: 50,
        max_memory_allocated=lambda of: 40, get_per_process_memory_fraction=lambda of: 0.6)  # fmt: skip
    assert device.free_bytes(of, 0.9) == pytest.approx(0.9 * 60 - 40)


def test_importing_the_library_asks_no_device() -> None:
    code = (
        "import sys, torch\n"
        "def refuse(*_): raise AssertionError('asked')\n"
        "for module, names in ((torch.accelerator, ('current_accelerator', 'is_available', 'device_count')),\n"
        "                      (torch.cuda, ('is_available', 'is_initialized', 'device_count', '_lazy_init'))):\n"
        "    for name in names: setattr(module, name, refuse)\n"
        "import overlap_callbacks.monitor.monitor, overlap_callbacks.integrations.pytorch\n"
        "from overlap_callbacks.instruments import device\n"
        "print(device.accelerator.cache_info().currsize)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_a_library_is_taken_only_if_torch_has_loaded_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device._loaded("no_such_library.so", "libc.so.6").getpid() == os.getpid()
    asked: list[tuple[str, int]] = []

    def refuse(name: str, mode: int = 0) -> None:
        asked.append((name, mode))
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(torch.version, "hip", "6.2.41134")
    device._leave_captures_alone()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    device._leave_captures_alone()
    assert [name for name, _ in asked] == ["libamdhip64.so", "libamdhip64.so.6", "libcudart.so.12"]
    assert all(mode & os.RTLD_NOLOAD for _, mode in asked)


STREAM = cast(Any, SimpleNamespace(device=torch.device("cuda", 1)))


@pytest.fixture(autouse=True)
def properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties that torch gives of device 1."""
    known = {torch.device("cuda", 1): SimpleNamespace(multi_processor_count=132, major=9, minor=0)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", known.__getitem__)


def test_the_chip_is_that_of_the_streams_device() -> None:
    assert chip_of(STREAM) == Chip(132, (9, 0))


def test_a_cpu_has_none() -> None:
    assert chip_of(None) is None


def test_a_device_of_amd_is_not_taken_for_one_of_nvidia_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert chip_of(STREAM) is None


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
    assert MemoryReader(stream).read() == stats(1, 2)
    assert asked == [3]


def test_on_cpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: pytest.fail("asked"))
    assert MemoryReader(None).read() is None


def test_an_allocator_without_counters_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(device: int) -> Any:
        asked.append(device)
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuse)
    stream: Any = SimpleNamespace(device=torch.device("cuda", 0))
    reader = MemoryReader(stream)
    assert [reader.read() for _ in range(3)] == [None] * 3
    assert asked == [0]


@pytest.mark.parametrize("raw", [{}, {"allocated_bytes": {}}, {"allocated_bytes": {"all": {"current": None}}}])
def test_counters_that_are_not_there_are_unknown(raw: dict[str, Any]) -> None:
    assert reading_of(raw) is None
