"""Which ranks share a host."""

from __future__ import annotations

import numpy as np

from overlap_callbacks.analysis.communication.rank_grids import Ranks, ranks_in
from overlap_callbacks.analysis.results.messages import JobMessages

UNKNOWN = -1


def host_numbers(messages: JobMessages, world_size: int) -> Ranks:
    """The number of each rank's host, by the order of their lowest ranks; ``UNKNOWN`` where it is not known."""
    hosts = np.full(world_size, UNKNOWN, dtype=np.int64)
    found = [
        (int(first), members)
        for shape in messages.hosts
        for first in ranks_in(shape.firsts)
        for members in [first + ranks_in(shape.offsets)]
    ]
    for number, (_, members) in enumerate(sorted(found, key=lambda host: host[0])):
        hosts[members[members < world_size]] = number
    return hosts


def equal_hosts(world_size: int, ranks_per_host: int) -> Ranks:
    """Hosts of so many consecutive ranks each; the last may have fewer."""
    return np.arange(world_size, dtype=np.int64) // ranks_per_host
