from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from overlap_callbacks.traces import reading
from overlap_callbacks.traces.pieces import Device
from overlap_callbacks.traces.trace import Trace
from tests.traces import alarms
from tests.traces.short_memory import hold

# Files of any content, which a plain count does not take.
_RANDOM = ("test_broken", "test_fuzz", "test_mutations")


@pytest.fixture(autouse=True)
def alarms_are_true(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of each file that a test reads, what the library says cannot be or is missing is what a plain count finds."""
    wrong: list[Any] = []

    def checked(read: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Trace:
            trace: Trace = read(*args, **options)
            said = alarms.said(trace.warnings)
            events = alarms.events_of(trace.path) if said and trace.path.is_file() else None
            if events is not None:
                counted = alarms.counted(events)
                if any(counted[kind] != number for kind, number in said.items()):
                    wrong.append((trace.warnings, counted))
            return trace

        return noted

    for name in ("trace_of_device", "trace_of_host") if request.path.stem not in _RANDOM else ():
        monkeypatch.setattr(reading, name, checked(getattr(reading, name)))
    yield
    assert not wrong


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As if memory held few events. Gives the numbers of rows of the pieces that were looked at."""
    sizes: list[int] = []
    pieces = Device.pieces

    def counted(device: Device) -> Iterator[Any]:
        for piece in pieces(device):
            sizes.append(len(piece.trace.kernels))
            yield piece

    monkeypatch.setattr(Device, "pieces", counted)
    hold(monkeypatch, 40)
    return sizes
