"""What the numbers of a long trace's rows stand for, and tables of kernels of some of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.launch_shape import LaunchShape
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.traces.collectives import UNKNOWN, CollectiveInfo, Collectives
from overlap_callbacks.traces.long.columns import Rows


@dataclass(frozen=True)
class Tables:
    """What the numbers of rows stand for.

    Attributes:
        names: names of kernels, then those of copies that communicate.
        shapes: launch shapes.
        collectives: kinds of collectives.
        infos: what is known of collectives.
        streams: the stream of each lane.
        kind_of: number of the kind of collective of each name and kind by metadata that communicate; of a shape that
            these two number.
        copy_kinds: number of the kind of collective of each collective whose work copies are; empty if none are.
        copy_names: the name of copies that communicate, by the name of such copies.
        first_copy_info: number of what is known of the first such collective.
        has_launches: whether the trace holds launches.
        on_host: whether the trace is of a CPU job.
    """

    names: tuple[str, ...]
    shapes: tuple[LaunchShape | str, ...]
    collectives: tuple[str, ...]
    infos: tuple[CollectiveInfo, ...]
    streams: tuple[str, ...]
    kind_of: dict[tuple[int, int], int]
    copy_kinds: tuple[int, ...]
    copy_names: dict[int, int]
    first_copy_info: int
    has_launches: bool
    on_host: bool = False

    def kernels(self, rows: Rows) -> KernelTable:
        """The table of some rows."""
        kind, name = rows["kind"].copy(), rows["name"].astype(np.int64)
        collective = np.full(len(rows), -1, dtype=np.int64)
        communicates = kind == Kind.COMMUNICATION
        pairs = np.stack((name[communicates], rows["metadata"][communicates].astype(np.int64)))
        distinct, place = np.unique(pairs, axis=1, return_inverse=True)
        kinds = np.array([self.kind_of[pair[0], pair[1]] for pair in distinct.T.tolist()], dtype=np.int64)
        collective[communicates] = kinds[place.reshape(-1)]
        copies = np.flatnonzero(self._are_copies(rows))
        if len(copies):
            kind[copies] = Kind.COMMUNICATION
            collective[copies] = np.array(self.copy_kinds, dtype=np.int64)[rows["copied"][copies]]
            name[copies] = [self.copy_names[number] for number in name[copies].tolist()]
        return KernelTable(
            intervals=Intervals(rows["start"].copy(), rows["end"].copy()),
            kind=kind,
            name=name,
            step=rows["step"].astype(np.int64),
            call=rows["call"].copy() if self.on_host else np.arange(len(rows)),
            names=self.names,
            shape=rows["shape"].astype(np.int64),
            shapes=self._shape_texts,
            collective=collective,
            collectives=self.collectives,
            lane=rows["lane"].astype(np.int64),
            launches=self._launches,
            without_launch=(rows["launched"] < 0) & self.has_launches,
            from_graph=np.zeros(len(rows), dtype=bool),
        )

    def known(self, rows: Rows) -> Collectives:
        """What is known of the collectives of some rows."""
        info = rows["info"].astype(np.int64)
        copies = self._are_copies(rows)
        info[copies] = self.first_copy_info + rows["copied"][copies]
        # Several copies may be one collective, so each of them has neither its size nor its number.
        num_bytes, sequence = (np.where(copies, UNKNOWN, rows[name]) for name in ("num_bytes", "sequence"))
        mine = np.flatnonzero(info >= 0)
        return Collectives(mine, info[mine], num_bytes[mine], sequence[mine], self.infos)

    @cached_property
    def _shape_texts(self) -> tuple[str, ...]:
        return tuple([str(shape) for shape in self.shapes]) or ("",)

    @cached_property
    def _launches(self) -> tuple[LaunchShape | None, ...]:
        return tuple([shape if isinstance(shape, LaunchShape) else None for shape in self.shapes]) or (None,)

    def _are_copies(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows are copies that communicate."""
        found: npt.NDArray[np.bool_] = (rows["copied"] >= 0) & bool(self.copy_kinds)
        return found
