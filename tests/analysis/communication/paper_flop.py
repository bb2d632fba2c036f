"""Equation 11 of "Understanding Communication Characteristics of Distributed Training" (APNet '24)."""

from __future__ import annotations


def iteration_flop(*, batch: int, sequence: int, layers: int, hidden: int, vocabulary: int) -> float:
    """FLOP of a step with full recomputation on all ranks: 96bslh²(1 + s/(6h) + V/(16lh))."""
    dense = 96 * batch * sequence * layers * hidden**2
    return dense * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
