"""Checks a trace for doubtful content before figures are computed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.traces.collectives import CollectiveInfo

# Names that sound like a collective although no pattern knows them.
_LIKE_COMMUNICATION = re.compile(r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|[nr]ccl|shmem")
# NCCL runs all-to-alls, gathers and scatters as sends and receives; RCCL has one name for all its kernels.
_SEVERAL_COLLECTIVES = re.compile(r"(?i)[nr]ccl\w*(sendrecv|generic)")
# Training never pauses this long between kernels: a clock jumped, or files were joined.
_MAX_GAP_NS = 10 * 60 * 10**9

MAX_SUSPECTS = 10
_MAX_NAME = 60
# Words of communication, the most specific first. They are compiled on use: few traces need them.
_WORDS = (
    r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|[a-z]ccl|shmem|send_?recv|collective",
    r"(?i)broadcast|send|recv|p2p|peer|ring|nvlink|rdma|multimem|symm|one_?shot|two_?shot|exchange",
    r"(?i)gather|scatter|barrier|signal|dispatch|combine|comm(?!on)|ipc|remote",
)


def problems_of(kernels: KernelTable) -> Iterator[str]:
    """What is doubtful about the kernels of a file."""
    gap_ns = int(np.diff(np.sort(kernels.intervals.start_ns, kind="stable")).max(initial=0))
    if gap_ns > _MAX_GAP_NS:
        yield f"kernels lie {gap_ns / 1e9:.0f} s apart: the clock may have jumped, or files were joined [OC726]"
    placed = int((kernels.without_launch & (kernels.step >= 0)).sum())
    if placed:
        yield f"{placed} kernels have no launch in the file; they are placed by their start [OC727]"
    computing = np.bincount(kernels.name[kernels.kind == Kind.COMPUTE], minlength=len(kernels.names))
    computes = [kernels.names[i] for i in np.flatnonzero(computing)]
    doubtful = [name for name in computes if _LIKE_COMMUNICATION.search(name) and not name_rules.is_local(name)]
    if doubtful:
        yield (
            f"{len(doubtful)} kernels count as compute though their names sound like communication: "
            f"{doubtful[0][:80]} [OC728]"
        )


def ambiguous_collectives(
    name: Indices, info: Indices, texts: Sequence[str], infos: Sequence[CollectiveInfo]
) -> Iterator[str]:
    """Warns of kernels identified only by a name that several collectives share.

    ``name`` and ``info`` are indices into ``texts`` and ``infos``; shape (n,).
    """
    by_name = np.array([known.by_name for known in infos], dtype=bool)
    calls = np.bincount(name[by_name[info]], minlength=len(texts)) if len(name) else np.empty(0, dtype=np.int64)
    several = [i for i in np.flatnonzero(calls).tolist() if _SEVERAL_COLLECTIVES.search(texts[i])]
    if several:
        text = texts[several[0]]
        yield (
            f"the names of {int(calls[several].sum())} kernels fit several collectives, and nothing "
            f"else tells which: they count as {name_rules.collective_of(text)}: {text[:80]} [OC729]"
        )


def cut_splits(infos: Sequence[CollectiveInfo]) -> Iterator[str]:
    """Warns of all-to-alls whose split sizes torch cut off."""
    if any([info.cut for info in infos]):
        yield (
            "torch cuts off lists of more than 30 split sizes: how evenly such all-to-alls load the ranks is not known "
            "[OC730]"
        )


def copying_collectives(found: Counter[str]) -> Iterator[str]:
    """Collectives that copy engines may have run."""
    if found:
        yield (
            f"{count(found.total(), 'collective')} launched copies within the device and no kernel: "
            f"{found.most_common(1)[0][0][:80]}; their copies count as copies, in no overlap [OC731]"
        )


def foreign_events(found: Counter[str]) -> str:
    """Number and category of events of other devices."""
    category = safe_text.clean(found.most_common(1)[0][0])[:80]
    return f"{count(found.total(), 'event')} of other devices ({category})"


# -- communication that no rule matches


def likeness(name: str) -> int:
    """How much a name resembles communication; 0 for not at all."""
    return next((len(_WORDS) - place for place, words in enumerate(_WORDS) if re.search(words, name)), 0)


def likely_communication(kernels: KernelTable) -> list[str]:
    """The kernels whose names look most like communication, with their times; at most ten.

    Ties are broken by streams without matrix products, then by time.
    """
    names, size = kernels.names, len(kernels.names)
    compute = kernels.kind == Kind.COMPUTE
    name, num_lanes = kernels.name[compute], int(kernels.lane.max(initial=0)) + 1
    of_name_ns = np.bincount(name, weights=kernels.intervals.durations_ns[compute], minlength=size)
    name, lane = np.divmod(distinct_values(name * num_lanes + kernels.lane[compute]), num_lanes)
    gemm = np.array([name_rules.family_of(text) == "gemm" for text in names], dtype=bool)
    of_gemms = np.isin(lane, lane[gemm[name]])
    apart = np.bincount(name, weights=~of_gemms, minlength=size) > 0
    present = [i for i in distinct_values(name).tolist() if not gemm[i]]
    ranked = sorted(present, key=lambda i: (-likeness(names[i]), not apart[i], -of_name_ns[i]))
    return [f"{names[i][:_MAX_NAME]} ({of_name_ns[i] / 1e6:.3f} ms)" for i in ranked[:MAX_SUSPECTS]]
