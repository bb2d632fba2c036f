"""Puts the kernels of a long trace in the order of their starts, and in their steps, by the rules of ``placement``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.placement import StepsOnDevice, step_of
from overlap_callbacks.analysis.kernels.table import Indices
from overlap_callbacks.traces.long.columns import Rows, RowsFile

# Stands for the step of a neighbour that there is none of.
_NONE = -2


def placed(kernels: RowsFile, file: RowsFile, bounds: Sequence[tuple[int, int]], *, has_launches: bool) -> None:
    """Write kernels to a file in the order of their starts, each with its step.

    Args:
        kernels: the kernels, in any order; the file is deleted.
        file: takes them.
        bounds: host start and end of each step.
        has_launches: whether the trace holds launches; without, the kernels' own starts decide.
    """
    on_device = StepsOnDevice(bounds)
    before = _Neighbours()
    any_unknown = False
    for rows in kernels.in_order("start", "place"):
        if not has_launches:
            rows["step"] = step_of(rows["start"], bounds)
        else:
            rows["step"] = step_of(rows["launched"], bounds)
            known = rows["launched"] >= 0
            any_unknown |= not bool(known.all())
            on_device.add(rows["step"].astype(np.int64), Intervals(rows["start"], rows["end"]))
            rows["before"] = before.of(rows, rows["step"].astype(np.int64), known)
        file.append(rows)
    if any_unknown and on_device.any:
        _place_unknown(file, on_device)


def _place_unknown(file: RowsFile, on_device: StepsOnDevice) -> None:
    """Place kernels without a launch: by their neighbours on their streams, else by what the device ran of steps."""
    after = _Neighbours()
    for first, last in reversed(file.bounds()):
        rows = file.read(first, last)
        known = rows["launched"] >= 0
        following = after.of(rows[::-1], rows["step"][::-1].astype(np.int64), known[::-1])[::-1]
        agree = (rows["before"] != _NONE) & (rows["before"] == following)
        found = np.where(agree, rows["before"], on_device.at(rows["start"]))
        rows["step"] = np.where(known, rows["step"], found)
        file.overwrite(first, rows)


class _Neighbours:
    """The step of the last row before each row of its stream whose launch is known, over parts of a table."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def of(self, rows: Rows, step: Indices, known: np.ndarray) -> Indices:
        """The step of the row before each of the next rows; ``_NONE`` without one. Of a known row, its own.

        Args:
            rows: the rows.
            step: their steps; shape (n,).
            known: whether the launch of each is known; shape (n,).
        """
        lane = rows["lane"].astype(np.int64)
        order = np.argsort(lane, kind="stable")
        place = np.maximum.accumulate(np.where(known[order], np.arange(len(order)), -1))
        begins = np.searchsorted(lane[order], lane[order], side="left")  # where its lane begins
        earlier = np.array([self._last.get(number, _NONE) for number in lane[order].tolist()], dtype=np.int64)
        found = np.empty(len(order), dtype=np.int64)
        found[order] = np.where(place >= begins, step[order][place], earlier)
        ends = np.flatnonzero(np.append(lane[order][1:] != lane[order][:-1], True)) if len(order) else order
        self._last.update(zip(lane[order][ends].tolist(), found[order][ends].tolist(), strict=True))
        return found
