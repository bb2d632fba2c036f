"""The traffic of a job in numbers: by dimension of parallelism, and between hosts."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from overlap_callbacks.analysis.communication.algorithms import RING
from overlap_callbacks.analysis.communication.hosts import UNKNOWN, host_numbers
from overlap_callbacks.analysis.communication.rank_grids import Ranks, ranks_in
from overlap_callbacks.analysis.communication.sums import MessageSums, job_messages
from overlap_callbacks.analysis.communication.traffic import by_dimension, off_diagonal, sent_bytes, traffic_matrix
from overlap_callbacks.analysis.results.messages import DimensionTraffic, JobMessages, Traffic


def traffic_of(sums: MessageSums, world_size: int) -> tuple[JobMessages | None, Traffic | None]:
    """Who sends what in a step of the job, and how much that is; None where no rank tells.

    Args:
        sums: of the ranks heard.
        world_size: ranks of the job.
    """
    messages = job_messages(sums)
    if messages is None:
        return None, None
    dimensions, unplaced = _dimensions(messages, world_size)
    return messages, Traffic(dimensions, sums.num_steps, sums.num_alike, unplaced)


# Mostly the messages of a window are those of the window before.
@lru_cache(maxsize=2)
def _dimensions(messages: JobMessages, world_size: int) -> tuple[tuple[DimensionTraffic, ...], float]:
    hosts = host_numbers(messages, world_size)
    return dimension_totals(messages, hosts)


def dimension_totals(
    messages: JobMessages, hosts: Ranks, algorithm: str = RING
) -> tuple[tuple[DimensionTraffic, ...], float]:
    """What all ranks send in each dimension, those with most bytes sent first; and bytes whose ranks are not known.

    Args:
        messages: of the job.
        hosts: the number of each rank's host.
        algorithm: of all-reduces.
    """
    heard = ranks_in(messages.ranks)
    known = bool((hosts != UNKNOWN).all())
    labels = hosts if known else np.zeros(len(hosts), dtype=np.int64)
    totals, unplaced = [], 0.0
    for dimension, groups in by_dimension(messages.groups).items():
        matrix = traffic_matrix(groups, heard, hosts, labels, algorithm)
        unplaced += matrix.unplaced_bytes
        totals.append(
            DimensionTraffic(
                dimension=dimension,
                messages=sum([group.messages for group in groups]),
                bytes=sum([group.bytes for group in groups]),
                sent_bytes=sent_bytes(matrix),
                between_hosts_bytes=off_diagonal(matrix.sent) if known else None,
            )
        )
    return tuple(sorted(totals, key=lambda row: (-row.sent_bytes, row.dimension))), unplaced
