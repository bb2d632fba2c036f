"""What is known about the collectives of a trace, in columns: a trace may have hundreds of thousands of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from overlap_callbacks.analysis.kernels.table import Indices

# Stands for a size or a number that is not known.
UNKNOWN = -(2**63)


class CollectiveInfo(NamedTuple):
    """What many collectives have in common.

    Attributes:
        kind: kind of collective, e.g. ``all_reduce``.
        group: name of its process group; empty if unknown.
        description: description of the group; empty if unknown.
        ranks: ranks of the group, as text of the file; empty if unknown.
        size: number of ranks of the group; None if unknown.
        by_name: whether nothing but the kernel's name tells the kind.
    """

    kind: str
    group: str = ""
    description: str = ""
    ranks: str = ""
    size: int | None = None
    by_name: bool = False


class Collectives(msgspec.Struct, frozen=True):
    """What is known about the communication kernels of a trace, one row per kernel.

    Attributes:
        rows: rows of the kernels in their table, ascending; shape (m,).
        info: index into ``infos``; shape (m,).
        num_bytes: size of the collective, as NCCL's tests count it; ``UNKNOWN`` if unknown; shape (m,).
        sequence: number of the collective in its group; ``UNKNOWN`` if unknown; shape (m,).
        infos: what some of them have in common.
    """

    rows: Indices
    info: Indices
    num_bytes: Indices
    sequence: Indices
    infos: tuple[CollectiveInfo, ...]

    @classmethod
    def none(cls) -> Collectives:
        """Of a file that tells nothing."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(nothing, nothing, nothing, nothing, ())

    @classmethod
    def alike(cls, rows: Indices, info: Indices, infos: tuple[CollectiveInfo, ...]) -> Collectives:
        """Of collectives whose sizes and numbers are not known; ``rows`` ascend."""
        unknown = np.full(len(rows), UNKNOWN, dtype=np.int64)
        return cls(rows, info, unknown, unknown, infos)

    def __len__(self) -> int:
        return len(self.rows)

    def of_kernels(self, kernels: Indices) -> Collectives:
        """Those of some of the kernels, with their places among these as rows.

        Args:
            kernels: rows of the table, ascending.
        """
        if not len(kernels):
            return Collectives.none()
        place = np.minimum(np.searchsorted(kernels, self.rows), len(kernels) - 1)
        kept = kernels[place] == self.rows
        return Collectives(place[kept], self.info[kept], self.num_bytes[kept], self.sequence[kept], self.infos)

    def of_rows(self, rows: Indices) -> tuple[Indices, Indices, Indices]:
        """Index into ``infos``, size and number of each of some kernels: -1 and ``UNKNOWN`` where nothing is known."""
        if not len(self):
            unknown = np.full(len(rows), UNKNOWN, dtype=np.int64)
            return np.full(len(rows), -1, dtype=np.int64), unknown, unknown
        place = np.minimum(np.searchsorted(self.rows, rows), len(self) - 1)
        known = self.rows[place] == rows
        return (
            np.where(known, self.info[place], -1),
            np.where(known, self.num_bytes[place], UNKNOWN),
            np.where(known, self.sequence[place], UNKNOWN),
        )

    def with_others(self, others: Collectives) -> Collectives:
        """These and others. What the others tell about a kernel counts."""
        kept = ~np.isin(self.rows, others.rows)
        rows = np.concatenate((self.rows[kept], others.rows))
        order = np.argsort(rows, kind="stable")
        return Collectives(
            rows[order],
            np.concatenate((self.info[kept], others.info + len(self.infos)))[order],
            np.concatenate((self.num_bytes[kept], others.num_bytes))[order],
            np.concatenate((self.sequence[kept], others.sequence))[order],
            (*self.infos, *others.infos),
        )

    def with_infos(self, infos: Iterable[CollectiveInfo]) -> Collectives:
        """The same collectives, of which more is known."""
        return msgspec.structs.replace(self, infos=tuple(infos))
