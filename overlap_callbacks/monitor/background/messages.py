"""What a rank sends in the recorded step of a window, and whether its other steps send the same."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from overlap_callbacks.analysis.results.messages import NO_STAGE, RankMessages, RankRow
from overlap_callbacks.gate.collectives import RECEIVES, Collective
from overlap_callbacks.gate.step_log import StepLog

# Steps that are held against the recorded one. Each may have thousands of collectives, and training goes on meanwhile.
_MAX_COMPARED = 64
# The interpreter is given to others for so long after each of them.
_PAUSE_S = 0.0005

# Operator, dimension, ranks of the group (of a send or receive, sender and receiver), and how many the group has.
_Key = tuple[str, str, tuple[int, ...], int]
_Call = tuple[str, str, int, int, int]


@dataclass
class _Row:
    """Sums over calls; of each size, messages and bytes."""

    messages: int = 0
    bytes: int = 0
    bytes_in: int = 0
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)


def messages_of(
    recorded: StepLog | None, counted: Sequence[StepLog], rank: int, chunks: int = 1
) -> RankMessages | None:
    """The messages of a window on this rank; None if its recorded step did not run, or is not whole.

    Args:
        recorded: the recorded step.
        counted: the counted steps, of which some are held against it.
        rank: of this process.
        chunks: model chunks of an interleaved pipeline on this rank.
    """
    if recorded is None or recorded.dropped or recorded.compiled or recorded.captured:
        return None
    rows: dict[_Key, _Row] = {}
    known: dict[tuple[str, str, int], _Row] = {}  # the same: groups of thousands of ranks are slow as keys
    for collective in recorded.collectives:
        alike = (collective.operator, collective.group.name, collective.peer)
        row = known.get(alike)
        if row is None:
            row = known[alike] = rows.setdefault(_key(collective, rank), _Row())
        size = max(collective.bytes_in, collective.bytes_out)
        row.messages += 1
        row.bytes += size
        row.bytes_in += collective.bytes_in
        number, total = row.sizes.get(size.bit_length() - 1, (0, 0))
        row.sizes[size.bit_length() - 1] = number + 1, total + size
    found = [
        RankRow(
            operator, dimension, group_size, ranks, row.messages, row.bytes, row.bytes_in,
            tuple([(size, number, total) for size, (number, total) in sorted(row.sizes.items())]),
        )
        for (operator, dimension, ranks, group_size), row in rows.items()
    ]  # fmt: skip
    compared = counted[:_MAX_COMPARED]
    return RankMessages(tuple(found), _stage(recorded, rank), len(compared), _num_alike(recorded, compared), chunks)


def _key(collective: Collective, rank: int) -> _Key:
    group = collective.group
    ranks = group.ranks
    if collective.point_to_point:
        peer = ranks[collective.peer] if 0 <= collective.peer < len(ranks) else None
        receives = collective.operator in RECEIVES
        ranks = () if peer is None else (peer, rank) if receives else (rank, peer)
    return collective.operator, group.dimension, ranks, group.num_ranks


def _stage(recorded: StepLog, rank: int) -> int:
    """The rank's place in its pipeline, as the largest group of a pipeline has it."""
    groups = {call.group.name: call.group for call in recorded.collectives if call.group.dimension == "pipeline"}
    pipelines = [group.ranks for group in groups.values() if len(group.ranks) > 1 and rank in group.ranks]
    return max(pipelines, key=len).index(rank) if pipelines else NO_STAGE


def _num_alike(recorded: StepLog, counted: Sequence[StepLog]) -> int:
    """How many steps issued the same calls as the recorded one. Threads may have issued them in another order."""
    expected = list(_calls(recorded))
    number = Counter(expected)
    alike = 0
    for log in counted:
        calls = list(_calls(log))
        alike += calls == expected or Counter(calls) == number
        time.sleep(_PAUSE_S)
    return alike


def _calls(log: StepLog) -> Iterator[_Call]:
    for call in log.collectives:
        yield call.operator, call.group.name, call.peer, call.bytes_in, call.bytes_out
