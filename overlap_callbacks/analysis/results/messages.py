"""What ranks send each other in a step: plain data, as it is sent between ranks and written to the record.

Ranks stand as grids: the first rank, and (stride, count) of each level, the innermost first. ``(0, ((1, 8), (64, 4)))``
are the ranks 0-7, 64-71, 128-135 and 192-199.
"""

from __future__ import annotations

import msgspec

Grids = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
# Exponent of the size, messages, and their bytes: messages of 2**exponent bytes or more, and less than twice that; -1
# for messages of no bytes.
Sizes = tuple[tuple[int, int, int], ...]

# In ``MessageGroup.stage``: the job has no pipeline; or the stages were added up, because there were too many rows.
NO_STAGE = -1
SEVERAL_STAGES = -2


class RankRow(msgspec.Struct, frozen=True):
    """What one rank sends, or takes part in, by one operator on one group, in a step.

    Attributes:
        group_size: ranks of the process group.
        ranks: global ranks of the group, in its order; of a send or receive, sender and receiver; empty if unknown.
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
        num_steps, num_alike: counted steps of the window, and those that issued the same calls as the recorded step:
            operator, group, peer and bytes of each.
        chunks: model chunks of an interleaved pipeline on this rank; 1 without, or if no adapter tells.
    """

    rows: tuple[RankRow, ...]
    stage: int = NO_STAGE
    num_steps: int = 0
    num_alike: int = 0
    chunks: int = 1


class MessageGroup(msgspec.Struct, frozen=True):
    """Messages of all ranks that send alike: sums over these ranks, for one step.

    Attributes:
        operator: the gate's name: ``allreduce_``, ``send``, ...
        stage: of the pipeline; ``NO_STAGE`` without one, ``SEVERAL_STAGES`` where stages were added up.
        group_size: ranks of each process group.
        num_members: members of groups that issue these calls; a rank counts once for each of its groups.
        messages: calls of these ranks; by size in ``sizes``.
        bytes: of each call, the larger of what it reads and writes on its rank.
        bytes_in: bytes that the calls read.
        ranks: the ranks that issue them.
        firsts: the first rank of each group; of sends and receives, the senders.
        offsets: ranks of a group, in its order, less its first rank; of sends and receives, sender and receiver.
        alike: whether each of the ranks issues the same.
        whole: whether ``ranks``, ``firsts`` and ``offsets`` are known; they are left out where they are irregular.
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
    """Hosts whose ranks lie alike: the lowest rank of each, and the ranks of any one less its lowest."""

    firsts: Grids
    offsets: Grids


class JobMessages(msgspec.Struct, frozen=True):
    """Who sends what in a step of the job. Its size does not grow with the ranks as long as their layout is regular.

    Attributes:
        groups: messages by operator, dimension, stage and form of the group.
        ranks: the ranks that were heard; if they are too scattered to be kept, all from the lowest to the highest.
        hosts: which ranks share a host; without names. Ranks in none are on an unknown host.
    """

    groups: tuple[MessageGroup, ...]
    ranks: Grids
    hosts: tuple[HostShape, ...] = ()


class DimensionTraffic(msgspec.Struct, frozen=True):
    """What all ranks send in one dimension of parallelism, for one step.

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
    """The traffic of a job in numbers; the dimension with most bytes sent first.

    Attributes:
        num_steps, num_alike: counted steps, summed over ranks, and those that issued the calls of the recorded step.
        unplaced_bytes: bytes that are sent, but between which ranks is not known; not in ``between_hosts_bytes``.
    """

    dimensions: tuple[DimensionTraffic, ...]
    num_steps: int = 0
    num_alike: int = 0
    unplaced_bytes: float = 0.0
