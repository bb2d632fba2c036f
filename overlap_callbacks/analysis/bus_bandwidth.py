"""What a collective sends over a rank's link: bus bandwidth as nccl-tests define it, and the steps of a ring."""

from __future__ import annotations

# What a collective of n ranks sends over each rank's link, as a multiple of its size, is this times (n-1)/n. A ring
# passes all parts of a message on to the other n-1 ranks so often.
# Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
# The root receives or sends the parts of the n-1 others.
_ROOTED = ("gather", "scatter")
# These send the whole message.
_WHOLE = ("broadcast", "reduce", "send_recv")


def size_of(kind: str, group_size: int, bytes_in: float, bytes_out: float) -> float:
    """Bytes of a collective, from those that it reads and writes on one rank: of a gather those of its whole result.

    Of a gather or scatter, ranks that are not its root see a single part.
    """
    if kind == "gather":
        return max(bytes_in * group_size, bytes_out)
    return max(bytes_in, bytes_out * group_size if kind == "scatter" else bytes_out)


def bus_factor(kind: str, size: int | None) -> float | None:
    """Bus bandwidth over algorithm bandwidth of a collective in a group of ``size`` ranks; None if it is unknown."""
    if size is None or size < 1:
        return None
    if kind in _WHOLE:
        return 1.0
    rounds = 1 if kind in _ROOTED else _ROUNDS.get(kind)
    return None if rounds is None else rounds * (size - 1) / size


def wire_factor(kind: str, size: int) -> float:
    """``bus_factor``, for what passes a rank's link: 1 where it is unknown, 0 in a group of one rank."""
    if size == 1:
        return 0.0
    factor = bus_factor(kind, size)
    return 1.0 if factor is None else factor


def ring_steps(kind: str, size: int) -> int:
    """Steps in which a collective sends one after the other, if it runs as a ring; 0 in a group of one rank.

    An all-reduce takes 2(n-1), an all-gather, a reduce-scatter and an all-to-all n-1, all others are taken as one.
    """
    if size == 1:
        return 0
    return _ROUNDS[kind] * (size - 1) if kind in _ROUNDS and size > 1 else 1
