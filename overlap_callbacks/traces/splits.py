"""How evenly all-to-alls with split sizes load ranks, from the files of some or all ranks.

What a rank receives in a step is the sum over its senders; a rank's file has what that rank sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.dimension_rules import dimension_of
from overlap_callbacks.analysis.kernels.table import Kind, is_copy
from overlap_callbacks.traces.collectives import UNKNOWN, numbers_in
from overlap_callbacks.traces.figures import SplitLoads
from overlap_callbacks.traces.trace import Trace

if TYPE_CHECKING:
    from overlap_callbacks.analysis.experts import AllToAll

_EXPERT = "expert"


class _Step(NamedTuple):
    """A group in one step of a cycle: its names as on all its ranks, its size, and the step's number."""

    cycle: str
    group: str
    description: str
    ranks: str
    size: int
    step: int | None


# What one or several ranks send to each rank of a group in a step; shape (ranks,).
Splits = dict[_Step, npt.NDArray[np.float64]]


def splits_of(trace: Trace) -> Splits:
    """What a trace's rank sends in each whole step, or in the whole file without steps.

    Tokens that return to their senders do not count again, as live.
    """
    known, kernels = trace.collectives, trace.kernels
    counts = np.array([len(info.sent) > 1 and info.size in (len(info.sent), None) for info in known.infos], dtype=bool)
    if not counts.any():
        return {}
    from overlap_callbacks.analysis.experts import AllToAll, dispatches  # few files have split sizes

    rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & np.append(counts, False)[known.info])
    step, (begins, _) = kernels.step[rows], known[rows].transfers_ns(rows)
    rows = rows[begins & trace.whole[step] & ((step >= 0) | (not trace.steps))]
    # Copy engines copy for each peer: copies in a row with the same splits are of one all-to-all.
    is_copied = kernels[rows].named(is_copy)
    same = (np.diff(known.info[rows]) == 0) & (np.diff(kernels.step[rows]) == 0) & is_copied[1:] & is_copied[:-1]
    rows = np.delete(rows, np.flatnonzero(same) + 1)
    calls: dict[int, list[AllToAll]] = defaultdict(list)
    for place, info, size in zip(
        *[of[rows].tolist() for of in (kernels.step, known.info, known.num_bytes)], strict=True
    ):
        about = known.infos[info]
        sent, received = sum(about.sent), sum(about.received)
        # If the size is unknown, an element counts as a byte.
        num_bytes = sent if size == UNKNOWN else size * sent // max(1, sent, received)
        group = f"{about.group} {about.ranks}"
        calls[place].append(AllToAll(group, "", (info,), about.sent, about.received, num_bytes, 0))
    found: dict[tuple[int, tuple[str, str, str], int], list[AllToAll]] = defaultdict(list)
    for place, of_step in calls.items():
        for call in dispatches(of_step):
            info = known.infos[call.ranks[0]]
            found[place, (info.group, info.description, info.ranks), len(call.sent)].append(call)
    return {
        _Step("", *names, size, trace.steps[place].number if trace.steps else None): _sum_of(of)
        for (place, names, size), of in found.items()
    }


def _sum_of(calls: Sequence[AllToAll]) -> npt.NDArray[np.float64]:
    """The bytes that all-to-alls of one group send to each rank."""
    rows = [call.bytes_in / max(1, sum(call.sent)) for call in calls]
    shares = np.array(rows)[:, None] * np.array([call.sent for call in calls], dtype=np.float64)
    total: npt.NDArray[np.float64] = np.cumsum(shares, axis=0)[-1]
    return total


def split_loads(ranks: Iterable[tuple[str, Splits]]) -> SplitLoads | None:
    """What ranks receive from those with files, each given with its file's cycle.

    Of several kinds of groups, the experts' count, else those that are sent most, as live. None without any.
    """
    by_step: dict[_Step, list[npt.NDArray[np.float64]]] = defaultdict(list)
    for cycle, splits in ranks:
        for step, of_rank in splits.items():
            by_step[step._replace(cycle=cycle)].append(of_rank)
    kinds: dict[tuple[bool, str, int], dict[_Step, list[npt.NDArray[np.float64]]]] = defaultdict(dict)
    for step, sent in by_step.items():
        if np.sum(sent) > 0:
            dimension = dimension_of(step.description)
            kinds[dimension == _EXPERT, dimension, step.size][step] = sent
    if not kinds:
        return None
    _, dimension, size = kind = max(
        kinds, key=lambda kind: (kind[0], sum([np.sum(sent) for sent in kinds[kind].values()]))
    )
    return _loads(dimension, size, kinds[kind])


def _loads(dimension: str, size: int, by_step: Mapping[_Step, list[npt.NDArray[np.float64]]]) -> SplitLoads:
    """In each step, the least evenly loaded group counts; groups with fewer files than others are ignored."""
    senders = max(map(len, by_step.values()))
    peaks: dict[tuple[str, int | None], float] = defaultdict(float)
    received: dict[tuple[str, str], npt.NDArray[np.float64]] = {}
    for step, sent in by_step.items():
        if len(sent) == senders:
            load, group = np.sum(sent, axis=0), (step.group, step.ranks)
            peaks[step.cycle, step.step] = max(peaks[step.cycle, step.step], float(load.max() / load.mean()))
            received[group] = received.get(group, 0.0) + load
    most = max(received, key=lambda group: received[group].max())
    place, numbers = int(received[most].argmax()), numbers_in(most[1])
    return SplitLoads(
        dimension=dimension,
        group_size=size,
        senders=min(senders, size),
        steps=len(peaks),
        load_max_over_mean=sum(peaks.values()) / len(peaks),
        highest_rank=numbers[place] if len(numbers) == size else place,
    )
