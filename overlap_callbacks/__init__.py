"""What overlapping computation with communication costs and saves, measured inside a live training job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlap_callbacks._version import __version__

if TYPE_CHECKING:
    from overlap_callbacks.analysis.results.catalogue import FIGURES
    from overlap_callbacks.analysis.results.estimate import Estimate
    from overlap_callbacks.analysis.results.mode import Mode
    from overlap_callbacks.analysis.results.report import OverlapReport
    from overlap_callbacks.integrations.pytorch import attach
    from overlap_callbacks.monitor.attaching import close
    from overlap_callbacks.monitor.monitor import MisuseError, OverlapMonitor
    from overlap_callbacks.monitor.schedule import Part, Plan, Schedule
    from overlap_callbacks.report import record as record
    from overlap_callbacks.report import write_page as write_page
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
    "attach",
    "close",
]

# Loaded on first use: reading a trace or a record needs no torch, which takes seconds and hundreds of MB to load.
_HOMES = {
    "analysis.results.catalogue": ("FIGURES",),
    "analysis.results.mode": ("Mode",),
    "analysis.results.estimate": ("Estimate",),
    "analysis.results.report": ("OverlapReport",),
    "integrations.pytorch": ("attach",),
    "monitor": ("MisuseError", "OverlapMonitor"),
    "monitor.attaching": ("close",),
    "report": ("write_page",),
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
# The callbacks, and the modules of which a job with the framework has loaded one. Each needs its own package, so
# ``from ... import *`` leaves them out.
_CALLBACKS = {
    "LightningCallback": ("integrations.lightning", {"lightning.pytorch", "pytorch_lightning"}),
    "TransformersCallback": ("integrations.transformers", {"transformers"}),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    import importlib

    value: Any
    if name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    elif name in _CALLBACKS:
        value = importlib.import_module(f"{__name__}.{_CALLBACKS[name][0]}").OverlapCallback
    elif name == "OverlapCallback":
        return __getattr__(_callback_in_use())
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _callback_in_use() -> str:
    """The callback of the one framework that the program has loaded."""
    import sys

    found = [name for name, (_, modules) in _CALLBACKS.items() if not modules.isdisjoint(sys.modules)]
    if len(found) != 1:
        both, none = "Lightning and Transformers are both loaded", "neither Lightning nor Transformers is loaded"
        which = both if found else none
        names = " or ".join([f"{__name__}.{name}" for name in _CALLBACKS])
        raise AttributeError(f"which OverlapCallback is meant is not clear, since {which}: use {names}")
    return found[0]


def __dir__() -> list[str]:
    from importlib.util import find_spec

    def is_installed(package: str) -> bool:
        try:
            return find_spec(package) is not None
        except ValueError:  # something else stands in for it in sys.modules
            return False

    needed = {
        "LightningCallback": is_installed("lightning") or is_installed("pytorch_lightning"),
        "TransformersCallback": is_installed("transformers") and is_installed("accelerate"),
    }
    found = [name for name, is_there in needed.items() if is_there]
    return sorted({*globals(), *_HOME_OF, *_MODULES, *found})
