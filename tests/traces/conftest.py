from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from overlap_callbacks.traces.pieces import Device
from tests.traces.short_memory import hold


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
