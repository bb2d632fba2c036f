"""What single ranks measured, whole, of a bounded number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from overlap_callbacks.analysis.results.window import CollectiveTime, RankWindow

# Up to so many ranks, each is kept.
MAX_RANKS = 16
# Of more, what is larger than this when compressed goes without its tables, but for rank 0.
MAX_BYTES = 7_000
# What a report keeps of ranks but the lowest, where it does not keep each: ranks beyond go without their tables.
MAX_REPORT_BYTES = 100_000

_TABLES = ("kernels", "pairs", "dimension_pairs", "dimensions", "collectives", "power")

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RankWindow)


def packed(window: RankWindow) -> bytes:
    """What one rank measured, compressed; without what stands elsewhere."""
    return zlib.compress(
        _ENCODER.encode(
            msgspec.structs.replace(
                window, environment=None, messages=None, experts=None, arrivals=(), calls=(), race=None
            )
        ),
        1,
    )


def unpacked(content: bytes) -> RankWindow:
    """What ``packed`` was given."""
    return _DECODER.decode(zlib.decompress(content))


def _without_tables(window: RankWindow) -> RankWindow:
    return msgspec.structs.replace(window, **dict.fromkeys(_TABLES, ()))


def chosen(samples: Mapping[int, bytes], num_ranks: int, wanted: Collection[int]) -> dict[int, bytes]:
    """Those that a part keeps: of few ranks all, else those that are wanted.

    Args:
        samples: that the part may keep.
        num_ranks: ranks of the part.
        wanted: ranks with the extremes of its figures, and the lowest.
    """
    if num_ranks <= MAX_RANKS:
        return dict(sorted(samples.items()))
    return {rank: _small(rank, samples[rank]) for rank in sorted(wanted)}


def _small(rank: int, content: bytes) -> bytes:
    """The same, without tables if it is large."""
    if not rank or len(content) <= MAX_BYTES:
        return content
    return packed(_without_tables(unpacked(content)))


def in_report(samples: Iterable[RankWindow], num_ranks: int) -> tuple[RankWindow, ...]:
    """What a report keeps of them: of few ranks all, else all of the lowest and of others as much as there is room for.

    Args:
        samples: by rank, ascending.
        num_ranks: ranks that the report speaks for.
    """
    # What stands in the report itself need not be there twice.
    first, *others = [
        msgspec.structs.replace(sample, pictures=(), power_trace=None, collectives=_as_recorded(sample.collectives))
        for sample in samples
    ]
    if num_ranks <= MAX_RANKS:
        return (first, *others)
    kept, left_bytes = [first], MAX_REPORT_BYTES
    for sample in others:
        left_bytes -= len(msgspec.json.encode(sample))
        kept.append(sample if left_bytes >= 0 else _without_tables(sample))
    return tuple(kept)


def _as_recorded(collectives: Sequence[CollectiveTime]) -> tuple[CollectiveTime, ...]:
    return tuple([msgspec.structs.replace(row, first_rank=msgspec.UNSET) for row in collectives])
