"""Reads Kineto trace files, analyses one or those of several ranks of a job, and compares two.

``read_trace`` gives a ``Trace``. ``analyze`` and ``compare`` compute figures from traces, and the commands
``overlap analyze`` and ``overlap compare`` show them. Nothing here imports torch.
"""

from overlap_callbacks.traces.analysis import analyze
from overlap_callbacks.traces.comparison import compare
from overlap_callbacks.traces.files import TraceError
from overlap_callbacks.traces.kineto import Trace, read_trace

__all__ = ["Trace", "TraceError", "analyze", "compare", "read_trace"]
