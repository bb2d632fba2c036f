"""Pools the power of all ranks' devices; a device that several ranks share counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlap_callbacks.analysis.power.sums import PowerSums, add_power, pooled_power, power_of
from overlap_callbacks.analysis.results.power import DevicePower, JobPower


def pool(by_rank: Mapping[int, Sequence[DevicePower]], *, whole: bool = True) -> JobPower:
    """Power over all ranks. If ranks share a device, the figures of the lowest rank that has power figures count.

    Args:
        by_rank: power of each rank's devices; empty for a rank without a source.
        whole: whether these are the devices of all ranks of the job. If not, there are no sums.
    """
    parts = [power_of(rank, power) for rank, power in sorted(by_rank.items())]
    return pooled_power(add_power(parts) if parts else PowerSums(), whole=whole)
