"""What overlapping computation with communication costs and saves, measured inside a live training job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlap_callbacks.version import __version__

if TYPE_CHECKING:
    from overlap_callbacks.estimates import Estimate
    from overlap_callbacks.metrics import FIGURES, OverlapReport
    from overlap_callbacks.monitor import MisuseError, OverlapMonitor
    from overlap_callbacks.schedule import Mode, Part, Plan, Schedule
    from overlap_callbacks.sinks import JsonlSink, Sink, WandbSink

__all__ = [
    "FIGURES",
    "Estimate",
    "JsonlSink",
    "MisuseError",
    "Mode",
    "OverlapMonitor",
    "OverlapReport",
    "Part",
    "Plan",
    "Schedule",
    "Sink",
    "WandbSink",
    "__version__",
]

# Loaded on first use: reading a trace or a record needs no torch, which takes seconds and hundreds of MB to load.
_HOMES = {
    "estimates": ("Estimate",),
    "metrics": ("FIGURES", "OverlapReport"),
    "monitor": ("MisuseError", "OverlapMonitor"),
    "schedule": ("Mode", "Part", "Plan", "Schedule"),
    "sinks": ("JsonlSink", "Sink", "WandbSink"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
