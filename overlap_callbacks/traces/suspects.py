"""Finds what looks most like communication in the trace of a job of several ranks that has none by name."""

from __future__ import annotations

import re

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.distinct import distinct_values
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind

MAX_SUSPECTS = 10
_MAX_NAME = 60

# Words of communication, those that say most first. Those of a row weigh alike. They are
# patterns, compiled where they are used: few traces need them.
_WORDS = (
    r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|[a-z]ccl|shmem|send_?recv|collective",
    r"(?i)broadcast|send|recv|p2p|peer|ring|nvlink|rdma|multimem|symm|one_?shot|two_?shot|exchange",
    r"(?i)gather|scatter|barrier|signal|dispatch|combine|comm(?!on)|ipc|remote",
)


def likeness(name: str) -> int:
    """How much a name sounds like communication; 0 for not at all."""
    return next((len(_WORDS) - place for place, words in enumerate(_WORDS) if re.search(words, name)), 0)


def suspects(kernels: KernelTable) -> list[str]:
    """The names of the kernels that look most like communication, each with its time, at most ten.

    By name first. Among names that tell nothing, kernels of streams without matrix products come first, then those with
    the most time: a stream of its own and long kernels are what collectives have.
    """
    compute = np.flatnonzero(kernels.kind == Kind.COMPUTE)
    if not len(compute):
        return []
    name, lane = kernels.name[compute], kernels.lane[compute]
    gemm = np.array([name_rules.family_of(text) == "gemm" for text in kernels.names], dtype=bool)
    of_gemms = np.isin(lane, distinct_values(lane[gemm[name]]))
    size = len(kernels.names)
    time_ns = np.bincount(name, weights=kernels.intervals.durations_ns[compute], minlength=size)
    apart = np.bincount(name, weights=~of_gemms, minlength=size) > 0
    present = [int(number) for number in distinct_values(name) if not gemm[number]]
    ranked = sorted(present, key=lambda i: (-likeness(kernels.names[i]), not apart[i], -time_ns[i]))
    return [f"{kernels.names[i][:_MAX_NAME]} ({time_ns[i] / 1e6:.3f} ms)" for i in ranked[:MAX_SUSPECTS]]
