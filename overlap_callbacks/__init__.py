"""What overlapping computation with communication costs and saves, measured inside a live training job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlap_callbacks._version import __version__

if TYPE_CHECKING:
    from overlap_callbacks.analysis.results.catalogue import FIGURES
    from overlap_callbacks.analysis.results.estimate import Estimate
    from overlap_callbacks.analysis.results.mode import Mode
    from overlap_callbacks.analysis.results.report import OverlapReport
    from overlap_callbacks.monitor.monitor import MisuseError, OverlapMonitor
    from overlap_callbacks.monitor.schedule import Part, Plan, Schedule
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
    "analysis.results.catalogue": ("FIGURES",),
    "analysis.results.mode": ("Mode",),
    "analysis.results.estimate": ("Estimate",),
    "analysis.results.report": ("OverlapReport",),
    "monitor": ("MisuseError", "OverlapMonitor"),
    "monitor.schedule": ("Part", "Plan", "Schedule"),
    "sinks": ("JsonlSink", "Sink", "WandbSink"),
}
# Modules that users reach through the package, wherever they are.
_MODULES = {
    "arms": "gate.arms",
    "dimensions": "analysis.dimension_rules",
    "names": "analysis.name_rules",
    "record": "report.record",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    import importlib

    value: Any
    if name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
