"""What overlapping computation with communication costs and saves, measured inside a live training job."""

from overlap_callbacks.estimates import Estimate
from overlap_callbacks.metrics import FIGURES, OverlapReport
from overlap_callbacks.monitor import MisuseError, OverlapMonitor
from overlap_callbacks.schedule import Mode, Part, Plan, Schedule
from overlap_callbacks.sinks import JsonlSink, Sink, WandbSink
from overlap_callbacks.version import __version__

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
