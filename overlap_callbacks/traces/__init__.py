"""Reads trace files, analyses one or those of several ranks of a job, and compares two; without torch.

``read_trace`` returns a ``Trace``, from which ``analyze`` and ``compare`` compute figures. ``find_traces`` finds files
in folders, patterns and archives. ``analyze_files`` and ``compare_files`` take files of any length. The commands
``overlap analyze`` and ``overlap compare`` show the figures. A running job gives what it exports to ``analyze_export``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_callbacks.traces.analysis import analyze, analyze_files
    from overlap_callbacks.traces.comparison import compare, compare_files
    from overlap_callbacks.traces.exported import analyze_export
    from overlap_callbacks.traces.files import TraceError
    from overlap_callbacks.traces.reading import read_trace
    from overlap_callbacks.traces.sources import find_traces
    from overlap_callbacks.traces.trace import Trace

__all__ = [
    "Trace",
    "TraceError",
    "analyze",
    "analyze_export",
    "analyze_files",
    "compare",
    "compare_files",
    "find_traces",
    "read_trace",
]

# The module of each name, imported on first use: a small trace is read at once.
_HOMES = {
    "Trace": "trace", "TraceError": "files", "analyze": "analysis", "analyze_files": "analysis",
    "analyze_export": "exported", "compare": "comparison", "compare_files": "comparison", "find_traces": "sources",
    "read_trace": "reading",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
