"""Says what is doubtful about the kernels of a trace file, in words."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import KernelTable, KernelTableBuilder, Kind
from overlap_callbacks.traces.collectives import Collectives
from overlap_callbacks.traces.steps import TraceStep
from overlap_callbacks.traces.suspects import suspects

# Names that sound like a collective although no pattern knows them.
_LIKE_COMMUNICATION = re.compile(r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|[nr]ccl|shmem")
# NCCL runs all-to-alls, gathers and scatters as sends and receives; RCCL has one name for all its kernels.
_SEVERAL_COLLECTIVES = re.compile(r"(?i)[nr]ccl\w*(sendrecv|generic)")
# No training has a gap of this length between kernels: a clock jumped, or files were joined.
_MAX_GAP_NS = 10 * 60 * 10**9


class KernelFacts(msgspec.Struct, frozen=True):
    """What must be known of the kernels of a file to tell what is doubtful about it.

    Attributes:
        longest_gap_ns: longest time from one kernel's start to the next one's.
        num_placed: kernels without a launch that were placed in a step.
        computing: names of the kernels that compute.
        steps: indices of the steps that have kernels.
        communicates: whether any kernel communicates.
        suspects: the names that look most like communication, see ``suspects``.
    """

    longest_gap_ns: int
    num_placed: int
    computing: Sequence[str]
    steps: frozenset[int]
    communicates: bool
    suspects: Callable[[], Sequence[str]]

    @classmethod
    def of(cls, kernels: KernelTable) -> KernelFacts:
        """The facts of a table."""
        compute = np.flatnonzero(kernels.kind == Kind.COMPUTE)
        name, lane, ran = kernels.name[compute], kernels.lane[compute], kernels.intervals[compute]
        return cls(
            longest_gap_ns=int(np.diff(np.sort(kernels.intervals.start_ns)).max(initial=0)),
            num_placed=int((kernels.without_launch & (kernels.step >= 0)).sum()),
            computing=[kernels.names[i] for i in distinct_values(name)],
            steps=frozenset(distinct_values(kernels.step).tolist()),
            communicates=bool((kernels.kind == Kind.COMMUNICATION).any()),
            suspects=lambda: suspects(kernels.names, name, lane, ran.durations_ns),
        )


def doubts_of(facts: KernelFacts, steps: tuple[TraceStep, ...]) -> Iterator[str]:
    """What is doubtful about a trace, in words."""
    if facts.longest_gap_ns > _MAX_GAP_NS:
        yield (f"kernels lie {facts.longest_gap_ns / 1e9:.0f} s apart: the clock may have jumped, or files were joined")
    if facts.num_placed:
        yield f"{facts.num_placed} kernels have no launch in the file; they are placed by their start"
    doubtful = [name for name in facts.computing if _LIKE_COMMUNICATION.search(name)]
    if doubtful:
        yield (
            f"{len(doubtful)} kernels count as compute though their names sound like communication: {doubtful[0][:80]}"
        )
    if any(after.start_ns < before.end_ns for before, after in itertools.pairwise(steps)):
        yield "some steps overlap: each ends where the next begins"


def untold(rows: KernelTableBuilder, collectives: Collectives) -> Iterator[str]:
    """Which kernels' names stand for several collectives while nothing else tells theirs, in words."""
    by_name = np.array([info.by_name for info in collectives.infos], dtype=bool)
    if not by_name.any():
        return
    names = np.array(rows.name, dtype=np.int64)[collectives.rows[by_name[collectives.info]]]
    distinct, first, number = np.unique(names, return_index=True, return_counts=True)
    order = np.argsort(first)
    texts = rows.names.texts
    yield from untold_names([(texts[i], n) for i, n in zip(distinct[order], number[order].tolist(), strict=True)])


def untold_names(found: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Which names stand for several collectives, in words.

    Args:
        found: names that alone tell the collectives of kernels, and of how many.
    """
    several = [(name, number) for name, number in found if _SEVERAL_COLLECTIVES.search(name)]
    if several:
        name = several[0][0]
        yield (
            f"the names of {sum(number for _, number in several)} kernels stand for several collectives, and nothing "
            f"else tells which: they count as {name_rules.collective_of(name)}: {name[:80]}"
        )


def copied(found: Counter[str]) -> Iterator[str]:
    """Which collectives may be the work of copy engines, in words."""
    if found:
        yield (
            f"{count(found.total(), 'collective')} launched copies within the device and no kernel: "
            f"{found.most_common(1)[0][0][:80]}; their copies count as copies, in no overlap"
        )


def foreign_events(found: Counter[str]) -> str:
    """Events of other devices, in words."""
    category = safe_text.clean(found.most_common(1)[0][0])[:80]
    return f"{count(found.total(), 'event')} of other devices ({category})"
