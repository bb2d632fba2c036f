"""Messages between ranks in a step: plain data, as sent between ranks and written to the record.

Ranks are stored as grids: the first rank, and (stride, count) of each level, innermost first.
``(0, ((1, 8), (64, 4)))`` is ranks 0-7, 64-71, 128-135 and 192-199.
"""

from __future__ import annotations

import msgspec

Grids = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
# Exponent of the size, number of messages, and their bytes: messages of at least 2**exponent bytes and less than twice
# that; -1 for messages without bytes.
Sizes = tuple[tuple[int, int, int], ...]

# Values of ``MessageGroup.stage``: the job has no pipeline; or stages were merged because there were too many rows.
NO_STAGE = -1
SEVERAL_STAGES = -2


class RankRow(msgspec.Struct, frozen=True):
    """What one rank sends, or takes part in, by one operator on one group, in a step.

    Attributes:
        group_size: ranks of the process group.
        ranks: global ranks of the group, in its order; for a send or receive, sender and receiver; empty if unknown.
        messages: calls; by size in ``sizes``.
        bytes: of each call, the larger of what it reads and writes on this rank.
        bytes_in: bytes that the calls read on this rank.
    """

    operator: str
    dimension: str
    group_size: int
    ranks: tuple[int, ...]
    messages: int
    bytes: int
    bytes_in: int
    sizes: Sizes


class RankMessages(msgspec.Struct, frozen=True):
    """The messages of one rank's recorded step, by operator, group and peer.

    Attributes:
        num_steps, num_alike: counted steps of the window, and those with the same calls as the recorded step:
            operator, group, peer and bytes of each.
        chunks: model chunks of an interleaved pipeline on this rank; 1 without, or if unknown.
    """

    rows: tuple[RankRow, ...]
    stage: int = NO_STAGE
    num_steps: int = 0
    num_alike: int = 0
    chunks: int = 1


class MessageGroup(msgspec.Struct, frozen=True):
    """Messages of all ranks that send the same: sums over these ranks, for one step.

    Attributes:
        operator: the gate's name: ``allreduce_``, ``send``, ...
        stage: of the pipeline; ``NO_STAGE`` without one, ``SEVERAL_STAGES`` if stages were merged.
        group_size: ranks of each process group.
        num_members: members of groups that issue these calls; a rank counts once for each of its groups.
        messages: calls of these ranks; by size in ``sizes``.
        bytes: of each call, the larger of what it reads and writes on its rank.
        bytes_in: bytes that the calls read.
        ranks: the ranks that issue them.
        firsts: the first rank of each group; for sends and receives, the senders.
        offsets: ranks of a group, in its order, minus its first rank; for sends and receives, sender and receiver.
        alike: whether each of the ranks issues the same.
        whole: whether ``ranks``, ``firsts`` and ``offsets`` are known; they are omitted if irregular.
    """

    operator: str
    dimension: str
    stage: int
    group_size: int
    num_members: int
    messages: int
    bytes: int
    bytes_in: int
    sizes: Sizes
    ranks: Grids = ()
    firsts: Grids = ()
    offsets: Grids = ()
    alike: bool = True
    whole: bool = True


class HostShape(msgspec.Struct, frozen=True):
    """Hosts with the same layout of ranks: the lowest rank of each, and the ranks of any one minus its lowest."""

    firsts: Grids
    offsets: Grids


class JobMessages(msgspec.Struct, frozen=True):
    """The job's messages in a step. The size does not grow with the number of ranks if their layout is regular.

    Attributes:
        groups: messages by operator, dimension, stage and form of the group.
        ranks: the ranks that reported; if too scattered to keep, all from the lowest to the highest.
        hosts: which ranks share a host; without names. Ranks in none are on an unknown host.
    """

    groups: tuple[MessageGroup, ...]
    ranks: Grids
    hosts: tuple[HostShape, ...] = ()


class DimensionTraffic(msgspec.Struct, frozen=True):
    """Messages of all ranks in one dimension of parallelism, for one step.

    Attributes:
        messages: calls of all ranks.
        bytes: messages times size, summed over ranks: the larger of what a call reads and writes.
        sent_bytes: bytes that ranks send if collectives run as rings (an all-to-all, sends: directly): of an
            all-reduce of S bytes on n ranks each sends 2(n-1)/n S, of an all-gather, a reduce-scatter or an all-to-all
            (n-1)/n S, of a broadcast all but one S. Receives count nothing, their sends do.
        between_hosts_bytes: the part of ``sent_bytes`` that crosses from one host to another; None if not known.
    """

    dimension: str
    messages: int
    bytes: int
    sent_bytes: float
    between_hosts_bytes: float | None = None


class Traffic(msgspec.Struct, frozen=True):
    """The traffic of a job in numbers; dimensions ordered by bytes sent.

    Attributes:
        num_steps, num_alike: counted steps, summed over ranks, and those with the calls of the recorded step.
        unplaced_bytes: bytes sent between unknown ranks; not in ``between_hosts_bytes``.
    """

    dimensions: tuple[DimensionTraffic, ...]
    num_steps: int = 0
    num_alike: int = 0
    unplaced_bytes: float = 0.0
