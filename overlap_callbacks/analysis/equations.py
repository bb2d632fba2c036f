"""Equations 1 to 5 of the study, as functions of times in milliseconds, and bus bandwidth by nccl-tests.

Source: "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning" (arXiv 2507.03114),
section IV-D. Equation 3 has no function: it is the measured time of an overlapped step. T_comp is the sum of the
compute kernels' times in a step. "Isolated" means: in sequential steps, where no communication runs during compute.

The two functions for attainable overlap are not in the study. They measure how close overlap comes to its best possible
effect.

The functions raise ``ZeroDivisionError`` (or return NaN, for NumPy numbers) if a figure is undefined.
"""

from __future__ import annotations

import math

# An attainable gain below this share of a sequential step cannot be distinguished from noise.
MIN_ATTAINABLE_GAIN = 0.05


def slowdown(overlapped_ms: float, isolated_ms: float) -> float:
    """Equation 1: how much longer kernels take in overlapped steps, as a fraction of their isolated time."""
    return overlapped_ms / isolated_ms - 1


def overlap_ratio(covered_compute_ms: float, compute_ms: float) -> float:
    """Equation 2: the share of compute kernel time during which communication was in flight, from 0 to 1."""
    return covered_compute_ms / compute_ms


def ideal_step_ms(step_ms: float, compute_ms: float, compute_isolated_ms: float) -> float:
    """Equation 4: the time of an overlapped step if overlap did not slow down its compute kernels.

    ``compute_ms`` is T_comp.
    """
    return step_ms - (compute_ms - compute_isolated_ms)


def sequential_step_ms(ideal_ms: float, hidden_comm_ms: float, more_waiting_ms: float = 0.0) -> float:
    """Equation 5: modelled time of a sequential step, in which nothing is slowed down and nothing is hidden.

    Args:
        ideal_ms: equation 4.
        hidden_comm_ms: time per overlapped step during which communication ran during compute.
        more_waiting_ms: how much longer collectives and messages of an overlapped step wait for other ranks than those
            of a sequential one. An early rank waits within its kernels, which hides nothing.
    """
    return ideal_ms + hidden_comm_ms - more_waiting_ms


def attainable_step_ms(compute_busy_isolated_ms: float, comm_busy_isolated_ms: float) -> float:
    """The step time if overlap were perfect and free: the longer of compute and communication alone.

    Args:
        compute_busy_isolated_ms: time in which compute kernels run in a sequential step on the rank that has the most:
            no step is shorter. It is the union of their intervals: a sum would count kernels twice that run at once on
            two streams.
        comm_busy_isolated_ms: time in which communication is in flight in a sequential step, without waiting.
    """
    return max(compute_busy_isolated_ms, comm_busy_isolated_ms)


def attained_fraction(sequential_ms: float, overlapped_ms: float, attainable_ms: float) -> float:
    """How far overlap has come from a sequential step to the attainable one; 1 is all the way.

    NaN if less than ``MIN_ATTAINABLE_GAIN`` of a sequential step can be gained: the quotient would be noise.
    """
    gain_ms = sequential_ms - attainable_ms
    if not gain_ms > MIN_ATTAINABLE_GAIN * sequential_ms:
        return math.nan
    return (sequential_ms - overlapped_ms) / gain_ms


# -- bytes of a collective on a rank's link: bus bandwidth as defined by nccl-tests, and the steps of a ring

# Bytes on each rank's link in a collective of n ranks, as a multiple of its size, are this times (n-1)/n: how often a
# ring passes all parts of a message on to the other n-1 ranks. Source:
# https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
# The root receives or sends the parts of the n-1 others.
_ROOTED = ("gather", "scatter")
# These send the whole message.
_WHOLE = ("broadcast", "reduce", "send_recv")


def size_of(kind: str, group_size: int, bytes_in: float, bytes_out: float) -> float:
    """Size of a collective from the bytes that it reads and writes on one rank; for a gather, its whole result.

    In a gather or scatter, ranks other than the root see only one part.
    """
    if kind == "gather":
        return max(bytes_in * group_size, bytes_out)
    return max(bytes_in, bytes_out * group_size if kind == "scatter" else bytes_out)


def bus_factor(kind: str, size: int | None) -> float | None:
    """Bus bandwidth over algorithm bandwidth of a collective in a group of ``size`` ranks; None if unknown."""
    if size is None or size < 1:
        return None
    if kind in _WHOLE:
        return 1.0
    rounds = 1 if kind in _ROOTED else _ROUNDS.get(kind)
    return None if rounds is None else rounds * (size - 1) / size


def wire_factor(kind: str, size: int) -> float:
    """``bus_factor`` for the bytes on a rank's link: 1 if unknown, 0 in a group of one rank."""
    if size == 1:
        return 0.0
    factor = bus_factor(kind, size)
    return 1.0 if factor is None else factor


def ring_steps(kind: str, size: int) -> int:
    """Number of consecutive steps of a collective that runs as a ring; 0 in a group of one rank.

    2(n-1) for an all-reduce, n-1 for an all-gather, a reduce-scatter and an all-to-all, 1 for all others.
    """
    if size == 1:
        return 0
    return _ROUNDS[kind] * (size - 1) if kind in _ROUNDS and size > 1 else 1
