"""Drives the steps of a job: which mode each step runs in, and what is measured meanwhile.

Start at ``monitor.py`` (``OverlapMonitor``). ``background/`` holds everything that runs on the library's own threads;
the rest runs on the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_callbacks.monitor.monitor import EXCEPTION_CLOSE_TIMEOUT_S, MisuseError, OverlapMonitor

__all__ = ["EXCEPTION_CLOSE_TIMEOUT_S", "MisuseError", "OverlapMonitor"]


# Lazy: the schedule is pure, and importing it must not import torch.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from overlap_callbacks.monitor import monitor

    return getattr(monitor, name)
