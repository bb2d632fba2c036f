"""Effective bandwidth by the size of messages, and its share of the link's peak. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from overlap_callbacks.analysis.communication.link_peaks import Peaks
from overlap_callbacks.analysis.communication.rows import wire_factor
from overlap_callbacks.analysis.results.arrivals import ONE_HOST, SEVERAL_HOSTS, SizeTransfer

_BYTES_PER_MS = 1e6  # of 1 GB/s


class SizeBandwidth(NamedTuple):
    """Messages of one size.

    Attributes:
        transfer: they and their times.
        mean_bytes: their size.
        transfer_ms: of one, the least over its ranks.
        gb_s: bytes on the wire a second, as nccl-tests' bus bandwidth.
        peak_fraction: of the link's peak; None if that is not known.
    """

    transfer: SizeTransfer
    mean_bytes: float
    transfer_ms: float
    gb_s: float
    peak_fraction: float | None


def bandwidths(transfers: Iterable[SizeTransfer], peaks: Peaks) -> list[SizeBandwidth]:
    """The bandwidth of each size; rows that cannot be are left out.

    A group on several hosts is as slow as its slowest link, so it is held against the link between hosts.
    """
    found = []
    for row in transfers:
        factor = wire_factor(row.operator, row.group_size) if row.sound else 0.0
        if factor <= 0:
            continue
        link = {ONE_HOST: peaks.within, SEVERAL_HOSTS: peaks.between}.get(row.reach)
        gb_s = row.bytes * factor / row.transfer_ms / _BYTES_PER_MS
        share = None if link is None else gb_s / link.gb_s
        found.append(SizeBandwidth(row, row.bytes / row.calls, row.transfer_ms / row.calls, gb_s, share))
    return found
