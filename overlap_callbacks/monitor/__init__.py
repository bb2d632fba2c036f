"""Decides and drives, step by step: which step runs in which mode, and what is read meanwhile.

Start at ``monitor.py`` (``OverlapMonitor``). ``background/`` is all that runs on threads of our own; everything else
here runs on the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_callbacks.monitor.monitor import EXCEPTION_CLOSE_TIMEOUT_S, MisuseError, OverlapMonitor

__all__ = ["EXCEPTION_CLOSE_TIMEOUT_S", "MisuseError", "OverlapMonitor"]


# On first use: the schedule is pure, and reading it needs no torch.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from overlap_callbacks.monitor import monitor

    return getattr(monitor, name)
