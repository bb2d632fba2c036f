"""Equations 1 to 5 of the study that this library measures, as functions of times in milliseconds.

Source: "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning" (arXiv 2507.03114),
section IV-D. Equation 3 has no function: it is the measured time of an overlapped step. T_comp is the sum of the
compute kernels' times in a step. "Isolated" means: in sequential steps, where no communication runs beside compute.

The functions raise ``ZeroDivisionError`` (or give NaN, for numbers of numpy) where a figure is undefined.
"""

from __future__ import annotations


def slowdown(overlapped_ms: float, isolated_ms: float) -> float:
    """Equation 1: how much longer kernels take in overlapped steps, as a fraction of their isolated time."""
    return overlapped_ms / isolated_ms - 1


def log_slowdown(log_overlapped: float, log_isolated: float) -> float:
    """Equation 1 as ``log(1 + slowdown)``, from mean logarithms of times.

    The interval of a ratio is symmetric on this scale; ``math.expm1`` leads back to the fraction.
    """
    return log_overlapped - log_isolated


def overlap_ratio(covered_compute_ms: float, compute_ms: float) -> float:
    """Equation 2: the share of compute kernel time during which communication was in flight, from 0 to 1."""
    return covered_compute_ms / compute_ms


def ideal_step_ms(step_ms: float, compute_ms: float, compute_isolated_ms: float) -> float:
    """Equation 4: the time that an overlapped step would take if overlap did not slow its compute kernels down.

    Args:
        step_ms: measured time of an overlapped step (equation 3).
        compute_ms: T_comp in overlapped steps.
        compute_isolated_ms: T_comp in sequential steps.
    """
    return step_ms - (compute_ms - compute_isolated_ms)


def sequential_step_ms(ideal_ms: float, hidden_comm_ms: float) -> float:
    """Equation 5: the time of a sequential step, as a model: nothing is slowed down, and nothing is hidden.

    Args:
        ideal_ms: equation 4.
        hidden_comm_ms: time per overlapped step during which communication ran beside compute.
    """
    return ideal_ms + hidden_comm_ms
