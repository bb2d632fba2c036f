"""Collectives by size: time and bandwidth of a message, and those of its transfer without waiting for other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from overlap_callbacks.analysis.bus_bandwidth import bus_factor
from overlap_callbacks.traces.figures import CollectiveSize
from overlap_callbacks.traces.kineto import Trace
from overlap_callbacks.traces.skew import Participant


def collective_sizes(
    traces: Sequence[Trace], matched: Iterable[Mapping[Any, Participant]]
) -> tuple[CollectiveSize, ...]:
    """A row for each kind, group size and message size, those with the most time first.

    Args:
        traces: all files.
        matched: the participants of each collective, see ``skew_over_ranks``. A collective of which a rank has several
            kernels counts for no transfer: how its bytes are divided among them is not known.
    """
    times: dict[tuple[str, int | None, int], list[int]] = defaultdict(list)
    for trace in traces:
        durations = trace.kernels.intervals.durations_ns
        for row, info in trace.collectives.items():
            if info.num_bytes:
                times[info.kind, info.size, info.num_bytes].append(int(durations[row]))
    transfers: dict[tuple[str, int | None, int], list[int]] = defaultdict(list)
    for participants in matched:
        of_ranks = list(participants.values())
        sizes = {(part.kind, part.group_size, part.num_bytes) for part in of_ranks}
        if len(of_ranks) > 1 and len(sizes) == 1 and all(part.num_kernels == 1 for part in of_ranks):
            kind, size, num_bytes = sizes.pop()
            if num_bytes:
                transfers[kind, size, num_bytes].append(min(part.time_ns for part in of_ranks))
    rows = [_row(*key, found, transfers.get(key, [])) for key, found in times.items()]
    return tuple(sorted(rows, key=lambda row: (-row.time_ms * row.kernels, row.collective, row.bytes)))


def _row(
    kind: str, group_size: int | None, num_bytes: int, times_ns: Sequence[int], transfers_ns: Sequence[int]
) -> CollectiveSize:
    factor = bus_factor(kind, group_size)

    def bandwidth(all_ns: Sequence[int]) -> float | None:  # bytes per nanosecond, i.e. GB/s
        return num_bytes * len(all_ns) / sum(all_ns) if sum(all_ns) else None

    def bus(all_ns: Sequence[int]) -> float | None:
        plain = bandwidth(all_ns)
        return None if plain is None or factor is None else plain * factor

    return CollectiveSize(
        collective=kind,
        group_size=group_size,
        bytes=num_bytes,
        kernels=len(times_ns),
        time_ms=sum(times_ns) / len(times_ns) / 1e6,
        bus_bandwidth_gb_s=bus(times_ns),
        matched=len(transfers_ns),
        transfer_ms=sum(transfers_ns) / len(transfers_ns) / 1e6 if transfers_ns else None,
        transfer_bandwidth_gb_s=bandwidth(transfers_ns),
        transfer_bus_bandwidth_gb_s=bus(transfers_ns),
    )
