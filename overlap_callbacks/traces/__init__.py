"""Reads trace files, analyses one or those of several ranks of a job, and compares two.

``read_trace`` gives a ``Trace``. ``analyze`` and ``compare`` compute figures from traces. ``find_traces`` finds the
files of folders, patterns and archives, and ``analyze_files`` analyses them one by one. The commands ``overlap
analyze`` and ``overlap compare`` show the figures. Nothing here imports torch.
"""

from overlap_callbacks.traces.analysis import analyze
from overlap_callbacks.traces.comparison import compare
from overlap_callbacks.traces.files import TraceError
from overlap_callbacks.traces.kineto import Trace
from overlap_callbacks.traces.many import analyze_files
from overlap_callbacks.traces.reading import read_trace
from overlap_callbacks.traces.sources import find_traces

__all__ = ["Trace", "TraceError", "analyze", "analyze_files", "compare", "find_traces", "read_trace"]
