"""Jobs laid out in tensor, pipeline and data parallel groups, and what each rank of them sends."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np

from overlap_callbacks.analysis.communication.rank_grids import Ranks
from overlap_callbacks.analysis.communication.sums import MessageSums, add_sums, sums_of
from overlap_callbacks.analysis.results.messages import NO_STAGE, RankMessages, RankRow

ACTIVATION, SHARD, EMBEDDING, EXPERTS = 4096, 10_000, 640, 512


@dataclass(frozen=True)
class Layout:
    """A job: tensor groups of neighbours, then data, then pipeline, as Megatron-core orders them.

    Attributes:
        tp, pp, dp: sizes of its dimensions.
        ranks_per_host: consecutive ranks of one host.
        expert: whether the data groups exchange tokens too, and how much differs from rank to rank.
    """

    tp: int = 2
    pp: int = 2
    dp: int = 2
    ranks_per_host: int = 8
    expert: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def rank(self, t: int, d: int, p: int) -> int:
        return t + self.tp * (d + self.dp * p)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        return rank % self.tp, rank // self.tp % self.dp, rank // self.tp // self.dp

    def messages(self, rank: int) -> RankMessages:
        """What a rank sends."""
        t, d, p = self.coordinates(rank)
        tensor = tuple(self.rank(other, d, p) for other in range(self.tp))
        data = tuple(self.rank(t, other, p) for other in range(self.dp))
        rows = []
        # The first stage has one more.
        rows.append(row("allreduce_", "tensor", tensor, 4 + (p == 0), ACTIVATION))
        rows.append(row("_reduce_scatter_base_", "data", data, 2, SHARD * self.dp))
        rows.append(row("_allgather_base_", "data", data, 2, SHARD * self.dp, SHARD))
        for other in (p - 1, p + 1):
            if 0 <= other < self.pp:
                peer = self.rank(t, d, other)
                rows.append(row("send", "pipeline", (rank, peer), 3, ACTIVATION, size=self.pp))
                rows.append(row("recv_", "pipeline", (peer, rank), 3, ACTIVATION, 0, size=self.pp))
        if self.pp > 1 and p in (0, self.pp - 1):
            ends = tuple(self.rank(t, d, stage) for stage in (0, self.pp - 1))
            rows.append(row("allreduce_", "embedding", ends, 1, EMBEDDING))
        if self.expert:
            rows.append(row("alltoall_base_", "expert", data, 1, EXPERTS * (rank + 1)))
        return RankMessages(tuple(rows), p if self.pp > 1 else NO_STAGE, 16, 16)

    def hosts(self) -> Ranks:
        return np.arange(self.world_size, dtype=np.int64) // self.ranks_per_host

    def part(self, rank: int) -> MessageSums:
        return sums_of(rank, self.messages(rank), f"node{rank // self.ranks_per_host}")

    def sums(self, without: tuple[int, ...] = ()) -> MessageSums:
        """Those of all ranks, added in two levels as a job does."""
        parts = [self.part(rank) for rank in range(self.world_size) if rank not in without]
        leaves = [add_sums(parts[at : at + 64]) for at in range(0, len(parts), 64)]
        return add_sums(leaves)


def row(
    operator: str,
    dimension: str,
    ranks: tuple[int, ...],
    messages: int,
    each: int,
    bytes_in: int | None = None,
    *,
    size: int = 0,
) -> RankRow:
    """Calls of one size."""
    sizes = ((each.bit_length() - 1, messages, messages * each),)
    read = each if bytes_in is None else bytes_in
    return RankRow(operator, dimension, size or len(ranks), ranks, messages, messages * each, messages * read, sizes)


def by_hand(layout: Layout) -> np.ndarray:  # type: ignore[type-arg]
    """The traffic matrix of a layout with rings, each rank and message by itself."""
    sent: Counter[tuple[int, int]] = Counter()
    for rank in range(layout.world_size):
        for message in layout.messages(rank).rows:
            n, total = len(message.ranks), message.bytes
            if n == 1 or message.operator == "recv_":
                continue
            if message.operator == "send":
                sent[rank, message.ranks[1]] += total
            elif message.operator == "alltoall_base_":
                for other in message.ranks:
                    sent[rank, other] += (total / n) if other != rank else 0
            else:
                passes = 2 if message.operator == "allreduce_" else 1
                following = message.ranks[(message.ranks.index(rank) + 1) % n]
                sent[rank, following] += passes * (n - 1) / n * total
    matrix = np.zeros((layout.world_size, layout.world_size))
    for (source, target), amount in sent.items():
        matrix[source, target] = amount
    return matrix


def any_tree(layout: Layout, chance: np.random.Generator) -> MessageSums:
    """The sums of a layout, added in a tree of any shape and in any order."""
    parts = [layout.part(rank) for rank in range(layout.world_size)]
    while len(parts) > 1:
        parts = [parts[at] for at in chance.permutation(len(parts))]
        sizes = chance.integers(1, 6, size=len(parts))
        bounds = [0, *[b for b in np.cumsum(sizes).tolist() if b < len(parts)], len(parts)]
        parts = [add_sums(parts[low:high]) for low, high in itertools.pairwise(bounds)]
    return parts[0]
