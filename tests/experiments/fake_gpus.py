"""A fake driver whose GPUs outlive processes, and what caps them; all else is real."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap_callbacks.analysis.results.env_overrides import SWITCH
from overlap_callbacks.instruments.caps.capped import capped
from overlap_callbacks.instruments.caps.settings import CapError, Caps
from tests.instruments.power.fakes import build

needs_driver = [
    pytest.mark.skipif(build.compiler() is None, reason="no C compiler to build the fake driver with"),
    pytest.mark.skipif(os.geteuid() != 0, reason="caps need root"),
]
BEFORE_W = 650.0
_STATE = struct.Struct("16d16dq64s")


class Device:
    """The fake driver's devices, and what sets their caps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        if not self.state.exists():
            self.state.write_bytes(_STATE.pack(*[BEFORE_W] * 16, *[0.0] * 16, 0, b""))
        self.seen: list[float] = []

    @property
    def limits_w(self) -> tuple[float, ...]:
        return _STATE.unpack(self.state.read_bytes())[:16]

    @property
    def power_limit_w(self) -> float:
        return self.limits_w[0]

    @contextlib.contextmanager
    def cap(self, wanted: Caps) -> Iterator[None]:
        with capped(wanted, folder=self.folder / "journal"):
            self.seen.append(self.power_limit_w)
            yield

    @contextlib.contextmanager
    def cap_and_fail(self, wanted: Caps) -> Iterator[None]:
        with self.cap(wanted):
            yield
        raise CapError("THE DEVICE GPU-0 IS NOT AS BEFORE")


def device_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build.nvml().parent))
    monkeypatch.setenv("FAKE_STATE", str(found.state))
    monkeypatch.delenv(SWITCH, raising=False)
    return found
