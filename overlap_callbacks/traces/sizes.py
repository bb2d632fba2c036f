"""Collectives by size: time and bandwidth of a message, and those of its transfer without waiting for other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.traces.figures import CollectiveSize
from overlap_callbacks.traces.rank_collectives import RankCollectives, SizeKey, Timed
from overlap_callbacks.traces.skew import Matched


def collective_sizes(traces: Sequence[RankCollectives], matched: Matched) -> tuple[CollectiveSize, ...]:
    """A row for each kind, group size and message size, those with the most time first.

    Args:
        traces: all files.
        matched: the participants of each collective, see ``skew_over_ranks``. A collective of which a rank has several
            kernels counts for no transfer: how its bytes are divided among them is not known.
    """
    times: dict[SizeKey, Timed] = {}
    for trace in traces:
        for key, found in trace.by_size.items():
            before = times.get(key, Timed(0, 0))
            times[key] = Timed(before.number + found.number, before.sum_ns + found.sum_ns)
    transfers: dict[SizeKey, Timed] = {}
    for place, participants in matched.items():
        of_ranks = list(participants.values())
        sizes = {part.num_bytes for part in of_ranks}
        if len(of_ranks) > 1 and len(sizes) == 1 and all(part.num_kernels == 1 for part in of_ranks):
            key = (place[0], place[4], sizes.pop())
            before = transfers.get(key, Timed(0, 0))
            transfers[key] = Timed(before.number + 1, before.sum_ns + min(part.time_ns for part in of_ranks))
    rows = [_row(key, found, transfers.get(key, Timed(0, 0))) for key, found in times.items()]
    return tuple(sorted(rows, key=lambda row: (-row.time_ms * row.kernels, row.collective, row.bytes)))


def _row(key: SizeKey, kernels: Timed, transfers: Timed) -> CollectiveSize:
    kind, group_size, num_bytes = key
    factor = bus_factor(kind, group_size)

    def bandwidth(timed: Timed) -> float | None:  # bytes per nanosecond, i.e. GB/s
        return num_bytes * timed.number / timed.sum_ns if timed.sum_ns else None

    def bus(timed: Timed) -> float | None:
        plain = bandwidth(timed)
        return None if plain is None or factor is None else plain * factor

    return CollectiveSize(
        collective=kind,
        group_size=group_size,
        bytes=num_bytes,
        kernels=kernels.number,
        time_ms=kernels.sum_ns / kernels.number / 1e6,
        bus_bandwidth_gb_s=bus(kernels),
        matched=transfers.number,
        transfer_ms=transfers.sum_ns / transfers.number / 1e6 if transfers.number else None,
        transfer_bandwidth_gb_s=bandwidth(transfers),
        transfer_bus_bandwidth_gb_s=bus(transfers),
    )
