"""Joins each kernel of a long trace with the call that launched it, and tells by its name what it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.copies import WITHIN_DEVICE
from overlap_callbacks.analysis.kernels.table import Indices, Kind
from overlap_callbacks.traces.device_trace import no_rule_knows
from overlap_callbacks.traces.launches import launches_of
from overlap_callbacks.traces.long import columns
from overlap_callbacks.traces.long.columns import Rows, RowsFile


def joined(kernels: RowsFile, launches: RowsFile) -> Iterator[Rows]:
    """The kernels with their launches, a part at a time, in any order. The files are deleted.

    Of several launches with one number, the first in the file counts, and none if that one has no time.
    """
    number = max(1, -(-max(len(kernels), len(launches)) // columns.AT_ONCE))
    parts = zip(kernels.divided("correlation", number), launches.divided("correlation", number), strict=True)
    for of_kernels, of_launches in parts:
        calls = of_launches.read(0, len(of_launches)) if len(of_launches) else np.empty(0, of_launches.dtype)
        # Kernels without a number all lie in one file.
        for rows in of_kernels:
            launch = launches_of(rows["correlation"], calls["correlation"])
            call = calls[launch[launch >= 0]]
            for column, of_call in (("launched", "start"), ("returned", "end"), ("thread", "thread")):
                rows[column][launch >= 0] = call[of_call]
            yield rows
        of_kernels.delete()
        of_launches.delete()


class Names:
    """What the names of a trace's kernels tell.

    Args:
        clean: the names as they are shown.
        number: the number among those of each name as it is in the file; shape (names of the file,).

    Attributes:
        clean: as given.
        communicates: whether each name is of a kernel that communicates; shape (clean,).
        within_device: whether each is of a copy within the device; shape (clean,).
    """

    def __init__(self, clean: Sequence[str], number: Indices) -> None:
        self.clean, self._number = tuple(clean), number
        self.communicates = _those(name_rules.is_communication(text) for text in clean)
        self.within_device = _those(text.startswith(WITHIN_DEVICE) for text in clean)
        self._says_nothing = _those(map(no_rule_knows, clean))

    def apply(self, rows: Rows) -> None:
        """Set what rows do, by their names; where those tell nothing, by metadata of a collective."""
        name = self._number[rows["name"]]
        kind, is_described = rows["kind"].copy(), rows["info"] >= 0
        kind[is_described & (kind == Kind.COMPUTE) & self._says_nothing[name]] = Kind.COMMUNICATION
        kind[((kind == Kind.COMPUTE) | (kind == Kind.COPY)) & self.communicates[name]] = Kind.COMMUNICATION
        rows["name"], rows["kind"] = name, kind


def _those(are: Iterator[bool]) -> npt.NDArray[np.bool_]:
    return np.fromiter(are, dtype=bool)
