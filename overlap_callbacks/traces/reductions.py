"""Gradients that a file proves to be reduced in each micro-batch, rather than once per update.

Between two optimizer steps, the same reductions, size by size, follow each of several forward passes. Layers of equal
size would follow a single pass, as would reductions that wait for the last micro-batch, in a pipeline too. They are
reductions of gradients: FSDP launches them in a range of its own, DDP on autograd's thread, and in a forward pass its
group only broadcasts buffers. Gradients set to zero in between are not accumulated. Forward passes on another thread
than the optimizer's recompute activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.traces.collect import Numbers
from overlap_callbacks.traces.collectives import CollectiveInfo
from overlap_callbacks.traces.columns import Array

# Torch's ranges of forward passes, of FSDP's reductions, of optimizer steps, and of setting gradients to zero.
PASS, FSDP1, FSDP2, UPDATE, ZERO = range(5)
_RANGES = (
    (PASS, ("DistributedDataParallel.forward", "FSDP::root_pre_forward", "FullyShardedDataParallel.forward")),
    (FSDP1, ("FullyShardedDataParallel._post_backward_hook",)),
    (FSDP2, ("FSDP::post_backward_reduce",)),
    (UPDATE, ("Optimizer.step#",)),
    (ZERO, ("Optimizer.zero_grad#",)),
)
_REDUCTIONS = ("all_reduce", "reduce_scatter")


class RepeatedReductions(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients that are reduced several times per optimizer step.

    Attributes:
        times: forward passes per optimizer step that the same reductions follow.
        messages, bytes: number and size of the reductions that follow one pass.
        exposed_ms, update_ms: exposed time of all of them, and time from one optimizer step to the next.
        wrapper: what reduces them: ``ddp``, ``fsdp1`` or ``fsdp2``.
    """

    times: int
    messages: int
    bytes: int
    exposed_ms: float
    update_ms: float
    wrapper: str

    @property
    def saved_ms(self) -> float:
        """The exposed time that reducing them once could save."""
        return self.exposed_ms * (self.times - 1) / self.times


def mark_of(name: str | None) -> int:
    """The mark of a host range: ``PASS``, ``FSDP1``, ``FSDP2``, ``UPDATE``, ``ZERO``, or -1."""
    return next((mark for mark, names in _RANGES if (name or "").startswith(names)), -1)


def repeated_reductions(
    kernels: KernelTable,
    rows: Mapping[str, Array],
    marks: Mapping[str, Array],
    infos: Sequence[CollectiveInfo],
    steps: Sequence[tuple[int, int]],
) -> RepeatedReductions | None:
    """The repeated reductions of the group that reduces most; None without proof.

    ``rows`` are columns of the kernels, ``marks`` of the host ranges that ``mark_of`` knows, and ``steps`` start and
    end of each step.
    """
    mark, thread = marks["mark"], marks["thread"]
    counts = (mark != PASS) | np.isin(thread, thread[mark == UPDATE])
    marks = {name: column[counts] for name, column in marks.items()}
    passes, updates, zeros = (_outermost(marks, mark) for mark in (PASS, UPDATE, ZERO))
    if len(passes) < 2 or not len(updates):
        return None
    mine, wrapper = _of_gradients(kernels, rows, marks, infos, passes)
    mine = mine[~_inside(updates, rows["launched"][mine])]  # of the optimizer, or of a closure that it calls
    launched_ns = rows["launched"][mine]
    update, after, zeroed = (np.searchsorted(of.start_ns, launched_ns, side="right") for of in (updates, passes, zeros))
    by_update: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, number, size in zip(update.tolist(), after.tolist(), rows["num_bytes"][mine].tolist(), strict=True):
        by_update[place][number].append(size)
    by_update.pop(len(updates), None)  # ends after the file
    if len(by_update) > 1:
        by_update.pop(0, None)  # may begin before the file
    sequences = {tuple([tuple(sizes) for sizes in of_passes.values()]) for of_passes in by_update.values()}
    repeated = sequences.pop() if len(sequences) == 1 else ()
    if len(repeated) < 2 or len(set(repeated)) > 1:
        return None
    counted = np.isin(update, list(by_update))
    if len({*zip(update[counted].tolist(), zeroed[counted].tolist(), strict=True)}) > len(by_update):
        return None
    if len(by_update) > 1:
        first, last = min(by_update), max(by_update)
        update_ns = (int(updates.start_ns[last]) - int(updates.start_ns[first - 1])) / len(by_update)
    else:
        # A gradient scaler that skips the optimizer makes reductions of two steps look like one step's.
        from_ns, to_ns = launched_ns[counted].min(), launched_ns[counted].max()
        update_ns = next((end - start for start, end in steps if start <= from_ns and to_ns < end), 0)
        if not update_ns:
            return None
    ran = kernels.intervals[mine[counted]]
    exposed_ns = int((ran.durations_ns - ran.covered_ns(kernels.union_of(Kind.COMPUTE))).sum())
    return RepeatedReductions(
        times=len(repeated),
        messages=len(repeated[0]),
        bytes=sum(repeated[0]),
        exposed_ms=exposed_ns / len(by_update) / 1e6,
        update_ms=update_ns / 1e6,
        wrapper=wrapper,
    )


def _of_gradients(
    kernels: KernelTable,
    rows: Mapping[str, Array],
    marks: Mapping[str, Array],
    infos: Sequence[CollectiveInfo],
    passes: Intervals,
) -> tuple[Indices, str]:
    """The kernels that reduce gradients, of the group that reduces most, by launch; and what launched them."""
    mine = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & (rows["info"] >= 0))
    mine = mine[rows["launched"][mine].argsort(kind="stable")]
    info, launched_ns, num_bytes = (rows[name][mine] for name in ("info", "launched", "num_bytes"))
    groups: Numbers[tuple[str, str]] = Numbers()
    group = np.array([groups[known.group, known.ranks] for known in infos], dtype=np.int64)[info]
    reduces = np.array([known.kind in _REDUCTIONS and known.size != 1 for known in infos], dtype=bool)[info]
    reduces &= (launched_ns >= 0) & (num_bytes > 0)
    if not reduces.any() or distinct_values(rows["device"][mine]).size > 1:
        return mine[:0], ""

    def with_most(reductions: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        most = int(np.bincount(group[reductions], weights=num_bytes[reductions]).argmax())
        return np.equal(group, most)

    for wrapper, mark in (("fsdp1", FSDP1), ("fsdp2", FSDP2)):
        sharded = reduces & _inside(_outermost(marks, mark), launched_ns)
        if sharded.any():
            return mine[sharded & with_most(sharded)], wrapper
    own = with_most(reduces)
    broadcasts = np.array([known.kind == "broadcast" for known in infos], dtype=bool)[info]
    if (own & ~broadcasts & _inside(passes, launched_ns)).any():
        return mine[:0], ""
    if distinct_values(rows["thread"]).size > 1:
        reduces &= ~np.isin(rows["thread"][mine], marks["thread"][marks["mark"] == PASS])
    return mine[reduces & own], "ddp"


def _outermost(marks: Mapping[str, Array], mark: int) -> Intervals:
    """The ranges of one kind that no other contains, ascending."""
    of_kind = np.flatnonzero(marks["mark"] == mark)
    start_ns, end_ns = (marks[name][of_kind] for name in ("start", "end"))
    order = np.lexsort((-end_ns, start_ns))
    start_ns, end_ns = start_ns[order], end_ns[order]
    before_ns = np.maximum.accumulate(end_ns)[:-1]
    outer = np.concatenate(([True], start_ns[1:] >= before_ns))[: len(order)]
    return Intervals(start_ns[outer], end_ns[outer])


def _inside(ranges: Intervals, time_ns: Indices) -> npt.NDArray[np.bool_]:
    """Whether each time lies in one of these ascending, disjoint ranges."""
    place = np.searchsorted(ranges.start_ns, time_ns, side="right")
    return time_ns < np.append(np.iinfo(np.int64).min, ranges.end_ns)[place]
