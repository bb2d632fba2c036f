"""Memory that holds few events of a trace."""

from __future__ import annotations

import pytest

from overlap_callbacks.traces import spilling
from overlap_callbacks.traces.long import columns


def hold(monkeypatch: pytest.MonkeyPatch, events: int) -> None:
    """Have memory hold so many events."""
    monkeypatch.setattr(spilling, "MAX_IN_MEMORY", events)
    monkeypatch.setattr(spilling, "MAX_SPILLING", events)
    monkeypatch.setattr(columns, "AT_ONCE", events)
