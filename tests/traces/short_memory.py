"""Memory that holds few events of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from overlap_callbacks.traces import columns
from overlap_callbacks.traces.pieces import Device

_MUCH = columns.MAX_IN_MEMORY, columns.AT_ONCE
_PIECES = Device.pieces

_Found = TypeVar("_Found")


def hold(monkeypatch: pytest.MonkeyPatch, events: int) -> None:
    """Have memory hold so many events: the columns of longer traces are mapped, and looked at in pieces."""
    monkeypatch.setattr(columns, "MAX_IN_MEMORY", events)
    monkeypatch.setattr(columns, "AT_ONCE", events)


def with_much_memory(function: Callable[[], _Found]) -> _Found:
    """What a function returns where memory holds as much as always, and pieces are not counted."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(columns, "MAX_IN_MEMORY", _MUCH[0])
        monkeypatch.setattr(columns, "AT_ONCE", _MUCH[1])
        monkeypatch.setattr(Device, "pieces", _PIECES)
        return function()
