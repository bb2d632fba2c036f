"""Bus bandwidth of collectives, as nccl-tests define it, so that figures compare with theirs."""

from __future__ import annotations

from collections.abc import Callable

# What a collective sends over each rank's link, as a multiple of its size, on n ranks.
# Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}


def size_of(kind: str, group_size: int, bytes_in: float, bytes_out: float) -> float:
    """Bytes of a collective, from those that it reads and writes on one rank: of a gather those of its whole result.

    Of a gather or scatter, ranks that are not its root see a single part.
    """
    if kind == "gather":
        return max(bytes_in * group_size, bytes_out)
    return max(bytes_in, bytes_out * group_size if kind == "scatter" else bytes_out)


def bus_factor(kind: str, size: int | None) -> float | None:
    """Bus bandwidth over algorithm bandwidth of a collective; None if it is unknown.

    Args:
        kind: kind of collective, e.g. ``all_reduce``.
        size: number of ranks of its group; None if unknown.
    """
    factor = _BUS_FACTORS.get(kind)
    if factor is None or size is None or size < 1:
        return None
    return factor(size)
