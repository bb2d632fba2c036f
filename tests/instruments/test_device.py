"""The one file that knows the device, asked about accelerators that are stand-ins for modules of torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_callbacks.instruments import device

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


def test_a_device_that_does_not_tell_whether_it_is_in_use_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert device.allocator_counters(of) is None
    assert device.free_bytes(of, 0.9) is None


def test_what_is_free_is_what_neither_this_process_at_its_peak_nor_another_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of 100 bytes 30 are free, and this process holds 50 of the rest: others have 20. Its tensors took 40 at most.
    has(monkeypatch, "toy", mem_get_info=lambda of: (30, 100), memory_reserved=lambda of: 50,
        max_memory_allocated=lambda of: 40)  # fmt: skip
    of: Any = TOY
    assert device.free_bytes(of, 0.9) == pytest.approx(90 - 20 - 40)


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
