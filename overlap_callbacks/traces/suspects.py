"""Finds what looks most like communication in the trace of a job of several ranks that has none by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import Indices

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


def suspects(names: Sequence[str], name: Indices, lane: Indices, time_ns: Indices) -> list[str]:
    """The names of the kernels that look most like communication, each with its time, at most ten.

    By name first. Among names that tell nothing, kernels of streams without matrix products come first, then those with
    the most time: a stream of its own and long kernels are what collectives have.

    Args:
        names: names of kernels.
        name: index into ``names`` of each kernel that computes, or of several on one stream; shape (n,).
        lane: its stream; shape (n,).
        time_ns: its time, or theirs together; shape (n,).
    """
    if not len(name):
        return []
    gemm = np.array([name_rules.family_of(text) == "gemm" for text in names], dtype=bool)
    of_gemms = np.isin(lane, distinct_values(lane[gemm[name]]))
    size = len(names)
    of_name_ns = np.bincount(name, weights=time_ns, minlength=size)
    apart = np.bincount(name, weights=~of_gemms, minlength=size) > 0
    present = [int(number) for number in distinct_values(name) if not gemm[number]]
    ranked = sorted(present, key=lambda i: (-likeness(names[i]), not apart[i], -of_name_ns[i]))
    return [f"{names[i][:_MAX_NAME]} ({of_name_ns[i] / 1e6:.3f} ms)" for i in ranked[:MAX_SUSPECTS]]
