"""Says what is doubtful about the kernels of a trace file, in words."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.distinct import distinct_values
from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.kernels.table import KernelTable, KernelTableBuilder, Kind
from overlap_callbacks.traces.collectives import Collectives
from overlap_callbacks.traces.steps import TraceStep

# Names that sound like a collective although no pattern knows them.
_LIKE_COMMUNICATION = re.compile(r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|[nr]ccl|shmem")
# NCCL runs all-to-alls, gathers and scatters as sends and receives; RCCL has one name for all its kernels.
_SEVERAL_COLLECTIVES = re.compile(r"(?i)[nr]ccl\w*(sendrecv|generic)")
# No training has a gap of this length between kernels: a clock jumped, or files were joined.
_MAX_GAP_NS = 10 * 60 * 10**9


def doubts_of(kernels: KernelTable, steps: tuple[TraceStep, ...]) -> Iterator[str]:
    """What is doubtful about a trace, in words."""
    start = np.sort(kernels.intervals.start_ns)
    if len(start) > 1 and int(np.diff(start).max()) > _MAX_GAP_NS:
        longest_s = int(np.diff(start).max()) / 1e9
        yield f"kernels lie {longest_s:.0f} s apart: the clock may have jumped, or files were joined"
    num_placed = int((kernels.without_launch & (kernels.step >= 0)).sum())
    if num_placed:
        yield f"{num_placed} kernels have no launch in the file; they are placed by their start"
    doubtful = [
        kernels.names[i]
        for i in distinct_values(kernels.name[kernels.kind == Kind.COMPUTE])
        if _LIKE_COMMUNICATION.search(kernels.names[i])
    ]
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
    texts = rows.names.texts
    distinct, first, number = np.unique(names, return_index=True, return_counts=True)
    several = [i for i in np.argsort(first).tolist() if _SEVERAL_COLLECTIVES.search(texts[distinct[i]])]
    if several:
        name = texts[distinct[several[0]]]
        yield (
            f"the names of {int(number[several].sum())} kernels stand for several collectives, and nothing else tells "
            f"which: they count as {name_rules.collective_of(name)}: {name[:80]}"
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
