"""Times of collectives alone, in the form that inductor's profile-guided estimation reads: a Kineto trace.

They are those of sequential steps, without waiting for late ranks: of each collective the least time over its ranks.
``torch/_inductor/fx_passes/profile_guided_estimation.py`` (torch 2.13) looks a collective up by its kind, the ranks of
its group, its element type and the elements of its result. A group that it does not find has the times of the one group
with as many ranks at the same distance. So one group of each form is enough.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from overlap_callbacks.analysis.communication.rank_grids import number_in, ranks_in
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.arrivals import SizedTransfer, are_plausible
from overlap_callbacks.analysis.results.messages import JobMessages
from overlap_callbacks.analysis.results.report import OverlapReport

# torch's names of element types, as in a profile of NCCL.
_TYPES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte",
}  # fmt: skip
# No group is larger, nor are there more of one form; damaged records may claim so.
_MAX_RANKS = 2**14


def inductor_trace(windows: Sequence[OverlapReport], messages: JobMessages | None) -> dict[str, Any]:
    """The times of all windows, which have their details; an event for each kind, group form, type and size.

    Raises:
        ValueError: the windows have no such times, or the ranks of no group are known.
    """
    sums: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0, 0.0])
    for row in [row for window in windows for row in window.sized_transfers if _is_valid(row)]:
        of_size = sums[row.operator, row.dimension, row.group_size, row.dtype, row.size_bytes]
        of_size[0] += row.calls
        of_size[1] += row.transfer_ms
    if not sums:
        raise ValueError("the record has no times of single collectives in sequential steps")
    events: list[dict[str, Any]] = []
    of_key = {} if messages is None else _groups_of(messages)
    groups = dict[tuple[int, ...], str]()
    for (operator, dimension, size, dtype, size_bytes), (calls, transfer_ms) in sorted(sums.items()):
        for ranks in sorted(of_key.get((operator, dimension, size), ())):
            name = groups.setdefault(ranks, str(len(groups)))
            events.append(_event(collective_of(operator), ranks, name, dtype, size_bytes, transfer_ms / calls))
    if not events:
        raise ValueError("the record does not tell which ranks are in a group")
    start_us = 0.0
    for event in events:
        event["ts"] = start_us
        start_us += event["dur"] + 1
    config = [{"pg_name": name, "ranks": list(ranks)} for ranks, name in groups.items()]
    return {"traceEvents": events, "distributedInfo": {"pg_config": config}}


def _is_valid(row: SizedTransfer) -> bool:
    known = re.fullmatch(r"[a-z]+\d{1,3}(_\w*)?", row.dtype) is not None
    return known and min(row.calls, row.size_bytes) > 0 < row.transfer_ms and are_plausible(row.calls, row.transfer_ms)


def _groups_of(messages: JobMessages) -> dict[tuple[str, str, int], set[tuple[int, ...]]]:
    """The groups of each operator, dimension and size: of each form the lowest ranks; all, if distances vary in it."""
    lowest: dict[tuple[int, ...], int] = {}
    found = defaultdict(set)
    for row in messages.groups:
        known = row.whole and 1 < number_in(row.offsets) == row.group_size <= _MAX_RANKS
        if not known or not 0 < number_in(row.firsts) <= _MAX_RANKS:
            continue
        firsts, offsets = sorted(ranks_in(row.firsts).tolist()), tuple(sorted(ranks_in(row.offsets).tolist()))
        if not firsts or len(offsets) != row.group_size:
            continue  # damaged
        if len({after - before for before, after in pairwise(offsets)}) == 1:
            lowest[offsets] = min(firsts[0], lowest.get(offsets, firsts[0]))
            firsts = firsts[:1]
        found[row.operator, row.dimension, row.group_size].update([(first, offsets) for first in firsts])
    return {
        key: {tuple([lowest.get(offsets, first) + at for at in offsets]) for first, offsets in of_key}
        for key, of_key in found.items()
    }


def _event(
    kind: str, ranks: tuple[int, ...], group: str, dtype: str, size_bytes: int, time_ms: float
) -> dict[str, Any]:
    """A kernel with what a profile of NCCL has. The size is that of a gather's result, or of a scatter's input."""
    whole = size_bytes // max(1, int(re.findall(r"\d+", dtype)[0]) // 8)
    part = whole // len(ranks)
    return {
        "ph": "X",
        "cat": "kernel",
        "name": f"{kind}, alone",
        "pid": 0,
        "tid": 0,
        "dur": time_ms * 1e3,
        "args": {
            "Collective name": kind,
            "Process Group Name": group,
            "Process Group Ranks": json.dumps(ranks),
            "Group size": len(ranks),
            "In msg nelems": part if kind == "all_gather" else whole,
            "Out msg nelems": part if kind == "reduce_scatter" else whole,
            "dtype": _TYPES.get(dtype, dtype.capitalize()),
        },
    }
