"""Bandwidth of collectives, as nccl-tests define it."""

from __future__ import annotations

from collections.abc import Callable

# NCCL's tests: what a collective sends over each rank's link, in parts of its size, on n ranks.
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


def bus_factor(kind: str, size: int | None) -> float | None:
    """Bus bandwidth / algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md); None where it is not known."""
    factor = _BUS_FACTORS.get(kind)
    if factor is None or size is None or size < 1:
        return None
    return factor(size)
