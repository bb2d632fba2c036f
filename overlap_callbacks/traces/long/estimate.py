"""Estimates the slowdown of a long trace as ``traces/estimate`` does, from calls in files.

Calls that may match have equal keys, so those of one key are looked at together, a part of the keys at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.call_table import Calls
from overlap_callbacks.analysis.kernels.same_calls import numbered, turns_of
from overlap_callbacks.analysis.kernels.table import Indices
from overlap_callbacks.traces.estimate import BY_LAUNCH, BY_TURN, beside_and_alone
from overlap_callbacks.traces.figures import SlowdownEstimate
from overlap_callbacks.traces.long import columns
from overlap_callbacks.traces.long.columns import FACTOR, Folder, Rows, RowsFile
from overlap_callbacks.traces.long.rows import CALL, filled
from overlap_callbacks.traces.trace import Trace

# The columns of which all must be equal, by what counts as the same call.
_Levels = tuple[tuple[str, ...], ...]
_IN_TURN: _Levels = (("name", "shape", "turn", "of"), ("name", "turn_by_name", "of_by_name"))
_SAME_LAUNCH: _Levels = (("name", "shape"),)


@dataclass
class _Sums:
    """Calls of one family that ran beside communication, and the calls alone that they match."""

    time_ns: int = 0
    alone_ns: float = 0.0
    beside: int = 0
    used: int = 0
    left_out: int = 0
    names: set[int] = field(default_factory=set)

    def add(self, other: _Sums) -> None:
        self.time_ns += other.time_ns
        self.alone_ns += other.alone_ns
        self.beside += other.beside
        self.used += other.used
        self.left_out += other.left_out
        self.names |= other.names

    def figures(self, method: str, families: dict[str, SlowdownEstimate]) -> SlowdownEstimate:
        return SlowdownEstimate(
            slowdown=self.time_ns / self.alone_ns - 1,
            method=method,
            kernels=len(self.names),
            calls_beside=self.beside,
            calls_alone=self.used,
            calls_left_out=self.left_out,
            time_beside_ms=self.time_ns / 1e6,
            families=families,
        )


class EstimateSums:
    """Gathers the calls of one device that compute, and compares those beside communication with those alone.

    Args:
        folder: takes the calls.
        head: the trace, without rows.
    """

    def __init__(self, folder: Folder, head: Trace) -> None:
        self._folder, self._head = folder, head
        self._file = folder.file(CALL)
        self._num_beside = self._num_alone = 0
        # Launches that differ in registers or shared memory alone count as the same.
        shapes = head.kernels.shapes
        self._shape = np.array([shapes.index(text) for text in shapes], dtype=np.int64)
        families = [name_rules.family_of(name) for name in head.kernels.names]
        self._families = list(dict.fromkeys(families))
        self._family = np.array([self._families.index(family) for family in families], dtype=np.int64)

    def add(self, trace: Trace) -> None:
        """Add the rows of a piece, which has all calls of its steps."""
        calls = Calls.of(trace.kernels)
        beside, alone = beside_and_alone(trace, calls)
        name, shape = trace.kernels.name[calls.row], self._shape[trace.kernels.shape[calls.row]]
        # What communicates is no call of a kernel that computes, though it may have its name.
        label = name * 2 + (trace.kernels.collective[calls.row] >= 0)
        turn, of = turns_of(calls, label, shape)
        turn_by_name, of_by_name = turns_of(calls, label, np.zeros_like(shape))
        mine = beside | alone
        values = {
            "duration": calls.duration_ns, "name": name, "shape": shape, "turn": turn, "of": of,
            "turn_by_name": turn_by_name, "of_by_name": of_by_name, "beside": beside,
        }  # fmt: skip
        rows = filled(CALL, **{column: of_calls[mine] for column, of_calls in values.items()})
        self._num_beside += int(beside.sum())
        self._num_alone += int(alone.sum())
        self._file.append(rows)

    def figures(self) -> SlowdownEstimate | None:
        """The estimate; None if no call beside communication matches one alone. Asked for once."""
        if not self._num_beside or not self._num_alone:
            return None
        methods = []
        if len(self._head.steps) > 1 and not self._head.is_cut:
            methods.append((_IN_TURN, BY_TURN))
        if any(self._head.kernels.shapes):
            methods.append((_SAME_LAUNCH, BY_LAUNCH))
        for levels, method in methods:
            sums = self._matched(levels)
            if any(of_family.beside for of_family in sums.values()):
                return _together(sums, method)
        return None

    def _matched(self, levels: _Levels) -> dict[str, _Sums]:
        """What matches, by family.

        Args:
            levels: what must be equal, in order of preference.
        """
        sums: dict[str, _Sums] = defaultdict(_Sums)
        file, keep = self._file, True
        for level in levels:
            left = self._folder.file(CALL)
            for part in self._parts(file, level, keep=keep):
                self._match(part, level, sums, left)
                part.delete()
            file, keep = left, False
        for rows in file:
            for family, mine in self._by_family(rows, np.ones(len(rows), dtype=bool)):
                sums[family].left_out += int(rows["beside"][mine].sum())
                sums[family].used += int(rows["used"][mine].sum())
        file.delete()
        return sums

    def _parts(self, file: RowsFile, level: tuple[str, ...], *, keep: bool) -> list[RowsFile]:
        """The calls in files, with all that may match each other in one file."""
        keyed = self._folder.file(CALL)
        for rows in file:
            rows["key"] = 0
            for column in level:
                rows["key"] = (rows["key"] ^ rows[column].astype(np.uint64)) * FACTOR
            rows["key"] >>= np.uint64(32)
            keyed.append(rows)
        if not keep:
            file.delete()
        return keyed.divided("key", max(1, -(-len(keyed) // columns.AT_ONCE)))

    def _match(self, part: RowsFile, level: tuple[str, ...], sums: dict[str, _Sums], left: RowsFile) -> None:
        """Count the calls that match, and keep those that do not, and all calls alone.

        Args:
            part: calls; all with the same values may be more than memory holds.
            level: the columns that must be equal.
            sums: takes what matches, by family.
            left: takes the others.
        """
        # For each key, number and time of the calls alone, and whether a call beside communication matches them.
        alone: dict[tuple[int, ...], tuple[int, int, bool]] = {}
        for rows in part:
            beside, (keys, number) = rows["beside"], _keys(rows, level)
            count, matched = (np.bincount(number[these], minlength=len(keys)) for these in (~beside, beside))
            total_ns = np.bincount(number[~beside], weights=rows["duration"][~beside], minlength=len(keys))
            for key, *found in zip(keys, count.tolist(), total_ns.tolist(), matched.tolist(), strict=True):
                before = alone.get(key, (0, 0, False))
                alone[key] = (before[0] + found[0], before[1] + int(found[1]), before[2] or found[2] > 0)
        for rows in part:
            beside, (keys, number) = rows["beside"], _keys(rows, level)
            count, total_ns, matched = (np.array(values) for values in zip(*[alone[key] for key in keys], strict=True))
            alone_ns = (total_ns / np.maximum(count, 1))[number]
            matches = beside & (count > 0)[number]
            rows["used"] |= ~beside & matched[number]
            for family, mine in self._by_family(rows, matches):
                of_family = sums[family]
                of_family.beside += len(mine)
                of_family.time_ns += int(rows["duration"][mine].sum())
                of_family.alone_ns += float(alone_ns[mine].sum())
                of_family.names.update(distinct_values(rows["name"][mine]).tolist())
            left.append(rows[~matches])

    def _by_family(self, rows: Rows, wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[str, Indices]]:
        """The wanted rows of each family."""
        mine = np.flatnonzero(wanted)
        family = self._family[rows["name"][mine]]
        for number in distinct_values(family).tolist():
            yield self._families[number], mine[family == number]


def _keys(rows: Rows, level: tuple[str, ...]) -> tuple[list[tuple[int, ...]], Indices]:
    """The distinct values of some columns, and which of them each row has; shape (n,)."""
    number = numbered([rows[column].astype(np.int64) for column in level])
    first = np.unique(number, return_index=True)[1]
    return list(zip(*[rows[column][first].tolist() for column in level], strict=True)), number


def _together(sums: dict[str, _Sums], method: str) -> SlowdownEstimate:
    """The estimate over all families, and of each that has a match."""
    whole = _Sums()
    for of_family in sums.values():
        whole.add(of_family)
    families = {family: each.figures(method, {}) for family, each in sums.items() if each.beside}
    return whole.figures(method, dict(sorted(families.items(), key=lambda item: -item[1].time_beside_ms)))
