"""Which ranks share a host."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from overlap_callbacks.analysis.communication.rank_grids import Ranks, ranks_in
from overlap_callbacks.analysis.results.messages import JobMessages

UNKNOWN = -1


# Mostly the messages of a window are those of the window before, and several parts of a report ask.
@lru_cache(maxsize=2)
def host_numbers(messages: JobMessages, world_size: int) -> Ranks:
    """The number of each rank's host, by the order of their lowest ranks; ``UNKNOWN`` where it is not known.

    The array is shared, and cannot be written to.
    """
    hosts = np.full(world_size, UNKNOWN, dtype=np.int64)
    found = [
        (int(first), members)
        for shape in messages.hosts
        for offsets in [ranks_in(shape.offsets)]
        for first in ranks_in(shape.firsts)
        for members in [first + offsets]
    ]
    for number, (_, members) in enumerate(sorted(found, key=lambda host: host[0])):
        hosts[members[members < world_size]] = number
    hosts.flags.writeable = False
    return hosts


def equal_hosts(world_size: int, ranks_per_host: int) -> Ranks:
    """Hosts of so many consecutive ranks each; the last may have fewer."""
    return np.arange(world_size, dtype=np.int64) // ranks_per_host
