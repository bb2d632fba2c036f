"""Kineto trace files: read, analysed one by one or as the ranks of a job, and compared pairwise.

``read_trace`` gives a ``Trace``; ``analyze`` and ``compare`` turn traces into figures; the command line shows them.
Nothing here needs torch.
"""

from overlap_callbacks.traces.analysis import analyze
from overlap_callbacks.traces.comparison import compare
from overlap_callbacks.traces.files import TraceError
from overlap_callbacks.traces.kineto import Trace, read_trace

__all__ = ["Trace", "TraceError", "analyze", "compare", "read_trace"]
