"""Kernels from rows written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.calls import Calls
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.name_rules import collective_of

# Events carry nanoseconds since 1970; the tests count from here.
EPOCH_NS = 1_755_000_000_123_456_789
MS = 1_000_000
GEMM, NORM, MINE = "ampere_sgemm", "layer_norm_kernel", "my_own"
REDUCE, GATHER, P2P = "ncclDevKernel_AllReduce", "ncclDevKernel_AllGather", "ncclDevKernel_SendRecv"


def columns(rows: Sequence[Any]) -> KernelTable:
    """From rows of (name, kind, step, start in ms, end in ms[, 1]).

    A 0 at the end says that the row is a further piece of the last call of that name. A name may end in ``@`` and a
    launch shape.
    """
    labels, shapes = zip(*(row[0].partition("@")[::2] for row in rows), strict=True) if rows else ((), ())
    names, distinct_shapes = tuple(dict.fromkeys(labels)), tuple(dict.fromkeys(shapes))
    calls: list[int] = []
    last: dict[str, int] = {}
    for number, row in enumerate(rows):
        last[row[0]] = last[row[0]] if len(row) > 5 and not row[5] else number
        calls.append(last[row[0]])
    kinds = [
        collective_of(name) if row[1] == Kind.COMMUNICATION else "" for name, row in zip(labels, rows, strict=True)
    ]
    collectives = tuple(dict.fromkeys(kind for kind in kinds if kind))

    def numbers(values: Any) -> Any:
        return np.array(list(values), dtype=np.int64)

    return KernelTable(
        intervals=Intervals(
            numbers(round(row[3] * MS) + EPOCH_NS for row in rows),
            numbers(round(row[4] * MS) + EPOCH_NS for row in rows),
        ),
        kind=np.array([row[1] for row in rows], dtype=np.uint8),
        name=numbers(names.index(label) for label in labels),
        step=numbers(row[2] for row in rows),
        call=numbers(calls),
        names=names,
        shape=numbers(distinct_shapes.index(shape) for shape in shapes),
        shapes=distinct_shapes or ("",),
        collective=numbers(collectives.index(kind) if kind else -1 for kind in kinds),
        collectives=collectives,
        lane=numbers(0 for _ in rows),
        launches=(None,) * max(len(distinct_shapes), 1),
        without_launch=np.zeros(len(rows), dtype=bool),
        from_graph=np.zeros(len(rows), dtype=bool),
    )


def every(calls: Calls) -> npt.NDArray[np.bool_]:
    """Marks all calls."""
    return np.ones(len(calls), dtype=bool)
