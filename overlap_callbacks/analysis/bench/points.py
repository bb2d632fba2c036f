"""The points of a plan, the order in which they are measured, and the ranks of its groups. Pure."""

from __future__ import annotations

from collections.abc import Collection

from overlap_callbacks.analysis.results.bench import (
    BOTH,
    COMMUNICATION,
    COMPUTE,
    GEMM,
    BenchResults,
    GemmPoint,
    Plan,
    Point,
    TransferPoint,
)

WORLD = "world"
# The conditions of a point in one round. What drifts evenly along them adds as much to each.
CONDITIONS = (COMPUTE, COMMUNICATION, BOTH, BOTH, COMMUNICATION, COMPUTE)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
# Messages of collectives are 32-bit numbers.
ELEMENT_BYTES = 4


def points_of(plan: Plan) -> tuple[Point, ...]:
    """The points of a plan, in the order of its first round."""
    if plan.bench == GEMM:
        return tuple(
            [
                GemmPoint(dtype, ctas, size, n, power_w, clock_mhz)
                # Outermost: changing them takes time, and devices take their time to follow.
                for power_w in plan.power_caps_w
                for clock_mhz in plan.clock_caps_mhz
                for dtype in plan.dtypes
                for ctas in plan.ctas
                for size in plan.message_bytes
                for n in plan.sizes
            ]
        )
    found: dict[TransferPoint, None] = {}
    for group in plan.groups:
        ranks = group_size(group, plan.ranks)
        for kind in plan.kinds:
            for size in plan.message_bytes:
                found[TransferPoint(kind, group, whole_bytes(size, ranks))] = None
    return tuple(found)


def whole_bytes(size: int, ranks: int) -> int:
    """The least size of at least ``size`` bytes that has as many whole numbers for each rank."""
    unit = ELEMENT_BYTES * ranks
    return -(-size // unit) * unit


def work_of(plan: Plan) -> list[tuple[int, Point]]:
    """Rounds and points, in the order in which they are measured: every second round runs backwards."""
    points = points_of(plan)
    return [(number, point) for number in range(plan.rounds) for point in (points if number % 2 == 0 else points[::-1])]


def work_left(plan: Plan, results: BenchResults) -> list[tuple[int, Point]]:
    """The part of a plan's work that a result file does not have yet. What cannot be measured is left out."""
    done: Collection[tuple[int, Point]] = {(found.round, found.point) for found in results.rounds}
    failed = {found.gemm or found.transfer for found in results.failed}
    return [item for item in work_of(plan) if item not in done and item[1] not in failed]


def group_size(group: str, ranks: int) -> int:
    """Ranks of each group that a text means: ``world``, ``N`` or ``N:S``.

    Raises:
        ValueError: the text means no groups of so many ranks.
    """
    return len(ranks_of(group, ranks)[0])


def ranks_of(group: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of all groups that a text means; together they are all ranks.

    Args:
        group: ``world``, ``N`` for groups of N neighbours, or ``N:S`` for groups of N ranks that are S apart.
        ranks: of the job.

    Raises:
        ValueError: the text means no groups of so many ranks.
    """
    if group == WORLD:
        return (tuple(range(ranks)),)
    size, _, apart = group.partition(":")
    if not (size.isdigit() and (apart or "1").isdigit()):
        raise ValueError(f"--groups must be world, N or N:S with whole numbers, got {group!r}")
    count, step = int(size), int(apart or "1")
    if count < 2 or step < 1 or ranks % (count * step):
        raise ValueError(
            f"--groups {group} must have at least 2 ranks, and their number times their distance must divide the "
            f"{ranks} ranks"
        )
    return tuple(
        [
            tuple(range(first + place, first + place + count * step, step))
            for first in range(0, ranks, count * step)
            for place in range(step)
        ]
    )
