"""How much of collective time is waiting for the last rank, from the kernels of single collectives.

A collective's kernel waits on the device for the last rank of its group. That rank's own kernel is the shortest, and
gives the transfer; what ran during the transfer is taken from it too. If the calls of a step were added up, or ranks
are missing, the waiting is a lower bound.

An all-to-all is one transfer, bound by its largest share: it takes what that share takes at the rate of the rank that
is fastest for its own. Only what the ranks' kernels take beyond that is waiting, which is a lower bound too.

The same holds for a message and its two kernels. The time that a rank waits for its peer while nothing else runs is
part of the pipeline's bubble. In a large job, a random sample of messages is compared. If NCCL buffers a message, its
kernels end at different times, and the time up to its transfer counts as waiting.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.job.stages import MessageScale, Side, StageMessages, stage_messages
from overlap_callbacks.analysis.job.tables import PairSum, add_pairs, mean_pairs
from overlap_callbacks.analysis.kernels.issued import SEND_RECV
from overlap_callbacks.analysis.results.arrivals import CollectiveCalls, are_times
from overlap_callbacks.analysis.results.kernel_times import ALONE, PairTime
from overlap_callbacks.analysis.results.window import DimensionTime
from overlap_callbacks.analysis.sums import each_sum, grouped, in_a_row, named_sum, struct_sum, table_sum

# Maximum bytes that a part keeps for groups with missing ranks, and for such messages; maximum dimensions.
MAX_OPEN_BYTES, MAX_MESSAGE_BYTES, MAX_DIMENSIONS = 40_000, 200_000, 32
MAX_TRANSFERS, MAX_STAGE_KINDS, MAX_NAMES = 250, 400, 200
# The pairs of a kind are known if this share of its kernels' time is.
_WHOLE = 0.99
# Ranks are equally late if their kernels' times differ by less than this share.
_ALIKE, _SHORTEST_US, _MOST_HIDDEN = 0.01, 1e-3, 0.999

_Floats = npt.NDArray[np.float32]


class OpenGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One kind of collective on one group, on the ranks that have reported.

    Attributes:
        calls: for each collective, the minimum of the ranks' times, and what ran during compute on the rank that came
            last.
        heard: ranks.
        time_us: per step, the sum over all calls of all ranks.
        sides: for messages, the ranks' sides.
        shares: for all-to-alls, as in ``_of_shares``; else empty.
        bins_us: for each bin, the sum over the overlapped steps of all ranks; empty if these have different steps.
    """

    calls: CollectiveCalls
    heard: int
    time_us: tuple[float, ...]
    sides: tuple[Side, ...] = ()
    shares: bytes = b""
    bins_us: tuple[float, ...] = ()


class BlockWaiting(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Waiting in a profiled block, per step, summed over ranks: kernel time of collectives and messages minus
    transfers.

    ``bubble_us``: the part of the messages' waiting in which nothing else ran and that no rank could know alone.
    """

    block: int
    waited_us: float
    message_us: float = 0.0
    bubble_us: float = 0.0

    def scaled_us(self, scale: MessageScale) -> tuple[float, float]:
        """All waiting, and the bubble's part of it, including messages that were not compared."""
        return self.waited_us + scale.waited * self.message_us, scale.bubble * self.bubble_us


class GroupTransfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The transfers of a kind of collective on a group, in a sequential step.

    ``transfer_us`` is of all calls of one rank, each the minimum over the ranks; ``first_rank``: the group's lowest
    rank.
    """

    first_rank: int
    group: str
    kind: str
    transfer_us: float


class DimensionTransfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Collectives of a dimension of parallelism, per step, summed over ranks.

    ``time_us``: kernel time in an overlapped step, including waiting; the others are of transfers only.
    """

    dimension: str
    time_us: float
    transfer_us: float
    transfer_isolated_us: float


class WaitingSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The waiting of a set of ranks.

    Attributes:
        open: groups with ranks that have not reported yet.
        blocks, dimensions, transfers: of the other groups.
        pairs: their transfers paired with families of compute.
        kinds_us: kernel time in an overlapped step, including waiting, by kind of collective.
        stages: of messages.
        names_us: waiting in all overlapped steps, by the code of what collectives are for; those with most.
    """

    open: Annotated[tuple[OpenGroup, ...], in_a_row] = ()
    blocks: Annotated[tuple[BlockWaiting, ...], table_sum(BlockWaiting, 1)] = ()
    pairs: Annotated[tuple[PairSum, ...], add_pairs] = ()
    kinds_us: Annotated[dict[str, float], named_sum(sum)] = {}
    dimensions: Annotated[tuple[DimensionTransfer, ...], table_sum(DimensionTransfer, 1, limit=MAX_DIMENSIONS)] = ()
    stages: Annotated[tuple[StageMessages, ...], table_sum(StageMessages, 2, limit=MAX_STAGE_KINDS)] = ()
    # The report shows the lowest rank's collectives, which come first.
    transfers: Annotated[tuple[GroupTransfer, ...], table_sum(GroupTransfer, 4, limit=MAX_TRANSFERS)] = ()
    names_us: Annotated[dict[int, float], _most_waited] = {}


def _most_waited(parts: Sequence[dict[int, float]]) -> dict[int, float]:
    names = named_sum(sum)(parts).items()
    return dict(sorted(names, key=lambda name: (-name[1], name[0]))[:MAX_NAMES])


_add = struct_sum(WaitingSums)


def waiting_of(calls: Sequence[CollectiveCalls], stage: int) -> WaitingSums:
    """The waiting of one rank's collectives and messages; ``stage`` is -1 without a pipeline."""
    rows = []
    for row in calls:
        if row.group_size > 1:
            times_us = tuple(_table(row, row.time_us).sum(axis=1).tolist())
            sides = (Side(stage, row.alike, row.open_us, times_us),) if row.alike else ()
            kept = msgspec.structs.replace(row, open_us=b"", sizes=b"")
            bins_us = tuple(_table(row, row.time_us)[~_is_sequential(row)].sum(axis=0).tolist()) if row.names else ()
            rows.append(OpenGroup(kept, 1, times_us, sides, _of_share(row), bins_us))
    return _settled(WaitingSums(open=tuple(rows)), lambda row: False)


def add_waiting(parts: Sequence[WaitingSums]) -> WaitingSums:
    """The waiting of the ranks of all parts, which have distinct ranks."""
    if len(parts) == 1:
        return parts[0]
    sums = _add(parts)
    by_group = grouped(
        filter(_is_sound, sums.open),
        lambda row: (row.calls.kind, row.calls.group, row.calls.first_rank, row.calls.calls),
    )
    joined = tuple([_joined(rows) for rows in by_group.values()])
    return _settled(msgspec.structs.replace(sums, open=joined), lambda row: row.heard >= row.calls.group_size)


def reported_waiting(sums: WaitingSums) -> WaitingSums:
    """Adds what is known of groups with missing ranks."""
    return _settled(sums, lambda row: True)


def _settled(sums: WaitingSums, is_over: Callable[[OpenGroup], bool]) -> WaitingSums:
    """Replaces groups that are complete, or too many, by sums.

    All ranks sample the same messages: by their names' checksums.
    """
    closed, kept = [], []
    left = [MAX_OPEN_BYTES, MAX_MESSAGE_BYTES]
    for row in sorted(sums.open, key=_draw):
        if is_over(row):
            closed.append(_closed(row))
            continue
        of_message = bool(row.sides)
        left[of_message] -= sum(map(len, (row.calls.time_us, row.calls.hidden_us, row.calls.shares)))
        left[of_message] -= sum([len(side.open_us) for side in row.sides]) + len(row.shares)
        if left[of_message] < 0:
            closed.append(_dropped(row))
        else:
            kept.append(row)
    return _add([msgspec.structs.replace(sums, open=tuple(kept)), *closed])


def _dropped(row: OpenGroup) -> WaitingSums:
    """Messages that are not compared, because there are too many or the peer is missing."""
    return WaitingSums(stages=tuple([StageMessages(side.stage, side.alike, dropped=1) for side in row.sides]))


def _draw(row: OpenGroup) -> tuple[int, str, str]:
    name = row.calls.group
    return zlib.crc32(name.encode()) if row.sides else row.calls.first_rank, name, row.calls.kind


def _is_sequential(row: CollectiveCalls) -> npt.NDArray[np.bool_]:
    return np.array([step.sequential for step in row.steps], dtype=bool)


def _table(row: CollectiveCalls, content: bytes) -> _Floats:
    return np.frombuffer(content, np.float32).reshape(len(row.steps), -1)


def _of_share(row: CollectiveCalls) -> bytes:
    """Of the calls of one rank: the largest share in bytes, the least time per megabyte, and the sum of the times."""
    if not row.sizes:
        return b""
    times_us, sizes = (np.frombuffer(content, np.float32) for content in (row.time_us, row.sizes))
    return np.stack([sizes, times_us / np.maximum(sizes, 1) * 1e6, times_us]).tobytes()


def _of_shares(row: OpenGroup) -> _Floats:
    """The same of several ranks; shape (3, steps, bins)."""
    return np.frombuffer(row.shares, np.float32).reshape(3, len(row.calls.steps), -1)


def _shares(row: CollectiveCalls) -> npt.NDArray[np.uint8]:
    shape = _table(row, row.time_us).shape
    return np.frombuffer(row.shares, np.uint8).reshape(*shape, len(row.families))


def _is_sound(row: OpenGroup) -> bool:
    """Whether the row is plausible: another rank may have sent it."""
    bins = len(row.calls.time_us) // 4
    return (
        row.calls.is_valid
        and 1 <= row.heard <= row.calls.group_size
        and len(row.sides) == (row.heard if row.calls.alike else 0)
        and _are_times(row.time_us, len(row.calls.steps))
        and all([are_times(side.open_us, bins) for side in row.sides])
        and (not row.shares or are_times(row.shares, 3 * bins))
        and all([_are_times(side.time_us, len(row.calls.steps)) for side in row.sides])
        and (not row.bins_us or _are_times(row.bins_us, bins // max(len(row.calls.steps), 1)))
    )


def _are_times(times_us: Sequence[float], number: int) -> bool:
    return len(times_us) == number and all([0 <= time_us < np.inf for time_us in times_us])


def _joined(rows: Sequence[OpenGroup]) -> OpenGroup:
    """The steps that count on all ranks, and in which either all or none have these collectives."""
    first = rows[0].calls
    if len(rows) == 1:
        return rows[0]
    has = []
    for row in rows:
        any_us = _table(row.calls, row.calls.time_us).sum(axis=1)
        has.append({step: us > 0 for step, us in zip(row.calls.steps, any_us.tolist(), strict=True)})
    steps = [step for step in first.steps if len({of_rank.get(step) for of_rank in has}) == 1]
    families = tuple(dict.fromkeys(family for row in rows for family in row.calls.families))
    picked = [[row.calls.steps.index(step) for step in steps] for row in rows]
    time, hidden = _picked(rows, picked, "time_us"), _picked(rows, picked, "hidden_us")
    last = _last(time, hidden)[None] if steps else np.empty((1, 0, 0), np.intp)
    shares = np.zeros((*time.shape, len(families)), np.uint8)
    for place, (row, own) in enumerate(zip(rows, picked, strict=True)):
        columns = [families.index(family) for family in row.calls.families]
        if steps:
            shares[place][:, :, columns] = _shares(row.calls)[own]
    calls = msgspec.structs.replace(
        first,
        steps=tuple(steps),
        families=families,
        time_us=time.min(axis=0).tobytes() if steps else b"",
        hidden_us=np.take_along_axis(hidden, last, axis=0).tobytes(),
        shares=np.take_along_axis(shares, last[..., None], axis=0).tobytes(),
    )
    sums = each_sum([[row.time_us[place] for place in own] for row, own in zip(rows, picked, strict=True)])
    sides = [
        msgspec.structs.replace(
            side,
            open_us=_table(row.calls, side.open_us)[own].tobytes() if steps else b"",
            time_us=tuple([side.time_us[place] for place in own]),
        )
        for row, own in zip(rows, picked, strict=True)
        for side in row.sides
    ]
    of_shares = b""
    if steps and all([row.shares for row in rows]):
        parts = [_of_shares(row)[:, own] for row, own in zip(rows, picked, strict=True)]
        largest, rate, of_all = np.stack(parts, axis=1)
        of_shares = np.stack([largest.max(axis=0), rate.min(axis=0), of_all.sum(axis=0)]).tobytes()
    alike = all([row.calls.steps == calls.steps and row.calls.names == calls.names for row in rows])
    bins_us = each_sum([row.bins_us for row in rows]) if alike else ()
    return OpenGroup(calls, sum(row.heard for row in rows), sums, tuple(sides), of_shares, bins_us)


def _picked(rows: Sequence[OpenGroup], steps: Sequence[Sequence[int]], field: str) -> _Floats:
    """Times of the chosen steps of each row; shape (rows, steps, bins)."""
    if not steps[0]:
        return np.empty((len(rows), 0, 0), np.float32)
    return np.stack([_table(row.calls, getattr(row.calls, field))[own] for row, own in zip(rows, steps, strict=True)])


def _last(time: _Floats, hidden: _Floats) -> npt.NDArray[np.intp]:
    """The rank that came last to each call. Of equally late ones, the one with most compute during it."""
    with np.errstate(all="ignore"):
        alike = np.floor(np.log(np.maximum(time, _SHORTEST_US)) / _ALIKE)
        return np.asarray((alike - np.minimum(hidden / np.maximum(time, _SHORTEST_US), _MOST_HIDDEN)).argmin(axis=0))


def _closed(row: OpenGroup) -> WaitingSums:
    calls, heard = row.calls, row.heard
    if heard < 2:
        return _dropped(row)
    if not calls.steps:
        return WaitingSums()
    time, hidden = _table(calls, calls.time_us).astype(float), _table(calls, calls.hidden_us).astype(float)
    if row.shares:
        largest, rate, of_all = _of_shares(row).astype(float)
        time = np.minimum(np.maximum(time, rate * largest / 1e6), of_all / heard)
        hidden = np.minimum(hidden, time)
    waited = np.array(row.time_us) - heard * time.sum(axis=1)
    by_block = grouped(range(len(calls.steps)), lambda place: calls.steps[place].block)
    sequential = _is_sequential(calls)
    both = sequential.any() and not sequential.all()
    bubbles = [np.maximum(_table(calls, side.open_us) - time, 0).sum(axis=1) for side in row.sides]
    bubble = np.sum(bubbles, axis=0) if bubbles else np.zeros(len(time))
    blocks = []
    for block, own in by_block.items():
        waited_us = max(0.0, float(waited[own].mean()))
        of_message = (0.0, waited_us) if row.sides else (waited_us, 0.0)
        blocks.append(BlockWaiting(block, *of_message, float(bubble[own].mean())))
    time_us = 0.0 if sequential.all() else float(np.array(row.time_us)[~sequential].mean())
    transfer_us = [heard * float(time[own].sum(axis=1).mean()) for own in (~sequential, sequential) if both]
    if row.sides:
        return WaitingSums(
            blocks=tuple(blocks),
            stages=tuple([stage_messages(*side, time, sequential) for side in zip(row.sides, bubbles, strict=True)]),
        )
    return WaitingSums(
        (),
        tuple(blocks),
        _pairs(calls, heard, time, hidden, sequential) if both else (),
        {} if sequential.all() else {calls.kind: time_us},
        (DimensionTransfer(calls.dimension, time_us, *transfer_us),) if both and calls.dimension else (),
        (),
        (GroupTransfer(calls.first_rank, calls.group, calls.kind, float(time[sequential].sum(axis=1).mean())),)
        if sequential.any()
        else (),
        _by_name(row, time[~sequential].sum(axis=0)),
    )


def _by_name(row: OpenGroup, transfer_us: npt.NDArray[np.float64]) -> dict[int, float]:
    """The waiting of a group's ranks in all overlapped steps, by code; ``transfer_us``: of one rank, for each bin."""
    found: dict[int, float] = {}
    if len(row.bins_us) == len(row.calls.names):
        for code, time_us, least_us in zip(row.calls.names, row.bins_us, transfer_us.tolist(), strict=False):
            if code:
                found[code] = found.get(code, 0.0) + max(0.0, time_us - row.heard * least_us)
    return found


def _pairs(
    calls: CollectiveCalls,
    heard: int,
    time: npt.NDArray[np.float64],
    hidden: npt.NDArray[np.float64],
    sequential: npt.NDArray[np.bool_],
) -> tuple[PairSum, ...]:
    """For each call of an overlapped step, its time and its time alone, divided among what ran at the same time."""
    having = (time > 0).any(axis=1)
    if not (having & sequential).any():
        return ()
    per_step = heard / int((~sequential).sum())
    alone_of_each, overlapped = time[having & sequential].mean(axis=0), having & ~sequential
    time, hidden, shares = time[overlapped], hidden[overlapped], _shares(calls)[overlapped].astype(float)
    alone = np.broadcast_to(alone_of_each, time.shape)
    total = shares.sum(axis=2)
    shares = np.concatenate((shares / np.where(total > 0, total, 1)[..., None], (total == 0)[..., None]), axis=2)
    found = []
    for place, family in enumerate((*calls.families, ALONE)):
        share = shares[:, :, place]
        if share.any():
            times_us = share * hidden, share * time, share * alone
            number = float((share > 0).sum()) * calls.calls / time.shape[1]
            times_ms = [float(of.sum()) * per_step / 1e3 for of in times_us]
            found.append(PairSum(calls.kind, True, family, number * per_step, *times_ms))
    return tuple(found)


def transfers_of_dimensions(
    dimensions: Sequence[DimensionTime], ranks: Mapping[str, int], sums: WaitingSums
) -> tuple[DimensionTime, ...]:
    """Replaces the kernel times of dimensions by the transfers of their collectives, if all are known.

    They are means over the ranks that have them, whose numbers are ``ranks``.
    """
    known = {row.dimension: row for row in sums.dimensions}

    def transfers(row: DimensionTime) -> DimensionTime:
        own, number = known.get(row.dimension), ranks[row.dimension]
        whole_us = 1e3 * number * row.kernels_ms
        if own is None or abs(own.time_us - whole_us) > (1 - _WHOLE) * whole_us:
            return row
        overlapped_ms, isolated_ms = (us / 1e3 / number for us in (own.transfer_us, own.transfer_isolated_us))
        return msgspec.structs.replace(row, kernels_ms=overlapped_ms, kernels_isolated_ms=isolated_ms)

    return tuple([transfers(row) for row in dimensions])


def without_waiting(pairs: Sequence[PairTime], sums: WaitingSums, num_ranks: int) -> tuple[PairTime, ...]:
    """Replaces collectives' times in the pairs by their transfers, if all of a kind's kernels are known.

    Messages have none: single ones run during compute in both modes. ``pairs`` are means over ``num_ranks`` ranks.
    """
    known_ms = {kind: us / 1e3 / num_ranks for kind, us in sums.kinds_us.items()} if num_ranks else {}
    time_ms: dict[str, float] = defaultdict(float)
    for pair in pairs:
        if pair.communication:
            time_ms[pair.kernel_family] += pair.time_ms
    told = {row.kernel_family for row in sums.pairs} & {
        kind for kind, ms in time_ms.items() if abs(known_ms.get(kind, 0.0) - ms) <= (1 - _WHOLE) * ms
    }
    own = mean_pairs([row for row in sums.pairs if row.kernel_family in told], num_ranks)
    kept = [pair for pair in pairs if not (pair.communication and pair.kernel_family in {*told, SEND_RECV})]
    return tuple(sorted([*own, *kept], key=lambda pair: (-pair.lost_ms, -pair.time_ms)))
