"""The traffic of a job as people see it: a matrix small enough to read, with labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from overlap_callbacks.analysis.communication.placement import UNKNOWN
from overlap_callbacks.analysis.communication.rank_grids import Ranks, ranks_in
from overlap_callbacks.analysis.communication.traffic import RING, Matrix, matrix_of
from overlap_callbacks.analysis.formatting import ranges
from overlap_callbacks.analysis.results.messages import JobMessages

RANK, HOST, STAGE = "rank", "host", "stage"
LABELS = (RANK, HOST, STAGE)
LOGICAL, PHYSICAL = "logical", "physical"
ORDERS = (LOGICAL, PHYSICAL)
# Rows and columns of a matrix that can be read.
MAX_CELLS = 64


class ViewError(ValueError):
    """Why the traffic cannot be shown as it was asked for."""


@dataclass(frozen=True)
class TrafficView:
    """A matrix to be shown.

    Attributes:
        by: what a row and a column are, one of ``LABELS``.
        labels: of the rows and columns.
        sent: ``sent[i, j]`` bytes a step go from label i to label j.
        title: what is shown.
        bounds: rows before which a host begins, where ranks are in physical order.
        unplaced_bytes: bytes that are in no cell.
    """

    by: str
    labels: tuple[str, ...]
    sent: Matrix
    title: str
    bounds: tuple[int, ...] = ()
    unplaced_bytes: float = 0.0

    @property
    def rows(self) -> list[list[float]]:
        """The matrix as lists."""
        rows: list[list[float]] = self.sent.tolist()
        return rows


@dataclass(frozen=True)
class Placement:
    """The number of each rank's host, and names of hosts by number."""

    hosts: Ranks
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether the host of every rank is known."""
        return bool((self.hosts != UNKNOWN).all())

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return int(self.hosts.max(initial=-1)) + 1

    def name(self, host: int) -> str:
        """What to call a host."""
        return self.names.get(host, f"host {host}")


def stages_of(messages: JobMessages, world_size: int) -> Ranks:
    """The pipeline stage of each rank; -1 where it has none."""
    stages = np.full(world_size, -1, dtype=np.int64)
    for group in messages.groups:
        if group.stage >= 0 and group.whole:
            ranks = ranks_in(group.ranks)
            stages[ranks[ranks < world_size]] = group.stage
    return stages


def view_of(
    messages: JobMessages,
    placement: Placement,
    *,
    by: str | None = None,
    order: str = LOGICAL,
    algorithm: str = RING,
) -> TrafficView:
    """The matrix of a job; ViewError if the traffic cannot be shown like that.

    Args:
        messages: of the job.
        placement: of its ranks.
        by: one of ``LABELS``; by default ranks if they are few, else hosts, else stages.
        order: of ranks, one of ``ORDERS``: by number, or by host.
        algorithm: of all-reduces.
    """
    stages = stages_of(messages, len(placement.hosts))
    by = by or _default(placement, stages)
    bounds: tuple[int, ...] = ()
    if by == RANK:
        labels, texts, title, bounds = _by_rank(placement, order)
    elif by == HOST:
        labels, texts, title = _by_host(placement)
    else:
        if (stages < 0).all():
            raise ViewError("by stage: no rank told a pipeline stage")
        labels, title = stages, "Bytes sent between stages"
        texts = [f"stage {number}" for number in range(int(stages.max()) + 1)]
    matrix = matrix_of(messages, placement.hosts, labels, algorithm)
    return TrafficView(by, tuple(texts), matrix.sent, title, bounds, matrix.unplaced_bytes)


def _default(placement: Placement, stages: Ranks) -> str:
    if len(placement.hosts) <= MAX_CELLS:
        return RANK
    if placement.known and placement.num_hosts > 1:
        return HOST
    return STAGE if (stages >= 0).any() else RANK


def _by_rank(placement: Placement, order: str) -> tuple[Ranks, list[str], str, tuple[int, ...]]:
    """The label of each rank, what to call labels, the title, and the labels before which a host begins."""
    hosts = placement.hosts
    world_size = len(hosts)
    physical = order == PHYSICAL and placement.known
    ranks = np.lexsort((np.arange(world_size), hosts)) if physical else np.arange(world_size)
    per_cell = -(-world_size // MAX_CELLS)
    labels = np.empty(world_size, dtype=np.int64)
    labels[ranks] = np.arange(world_size) // per_cell
    texts = [ranges(ranks[at : at + per_cell].tolist(), 2) for at in range(0, world_size, per_cell)]
    if per_cell > 1:
        return labels, texts, f"Bytes sent between ranks, {per_cell} ranks a cell", ()
    bounds = tuple((np.flatnonzero(np.diff(hosts[ranks])) + 1).tolist()) if physical else ()
    return labels, texts, "Bytes sent between ranks" + (", by host" if physical else ""), bounds


def _by_host(placement: Placement) -> tuple[Ranks, list[str], str]:
    if not placement.known:
        raise ViewError("by host: on which host each rank runs is not known")
    number = placement.num_hosts
    per_cell = -(-number // MAX_CELLS)
    if per_cell == 1:
        return placement.hosts, [placement.name(host) for host in range(number)], "Bytes sent between hosts"
    texts = [f"hosts {ranges(range(at, min(at + per_cell, number)))}" for at in range(0, number, per_cell)]
    return placement.hosts // per_cell, texts, f"Bytes sent between hosts, {per_cell} hosts a cell"
