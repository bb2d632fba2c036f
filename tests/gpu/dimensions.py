"""Along which dimensions of parallelism a job's ranks talk to each other."""

from __future__ import annotations

from collections.abc import Iterable

from overlap_callbacks.analysis.results.window import CollectiveTime

_SMALL_BYTES = 1_000  # norms, losses and flags


def dimensions_between_ranks(collectives: Iterable[CollectiveTime]) -> set[str | None]:
    """The dimensions of a report's collectives, without small messages and without groups of one rank.

    Megatron sums over the vocabulary on its tensor-parallel group even where that has one rank. On a GPU's model these
    are large messages, but nothing is sent.
    """
    return {c.dimension for c in collectives if c.group_size > 1 and c.bytes_in > _SMALL_BYTES}
