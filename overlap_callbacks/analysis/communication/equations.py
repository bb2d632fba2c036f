"""Equations 1 to 5 and 7 to 10 of "Understanding Communication Characteristics of Distributed Training" (APNet '24).

In the paper's own forms with its approximations: layers split evenly, N/(pt) parameters on a rank, no message of the
embedding. ``p`` is pipeline stages, ``t`` tensor-parallel ranks, ``d`` replicas, ``m`` micro-batches of a step and
replica. Bandwidths are effective ones of a rank's link in bytes per second, times in milliseconds.
"""

from __future__ import annotations

MS_PER_S = 1e3


def iteration_ms(compute_ms: float, tensor_ms: float, pipeline_ms: float, data_ms: float, bubble_ms: float) -> float:
    """Equation 1: the step of rank 0, nothing overlapped: compute, three kinds of communication, and the bubble."""
    return compute_ms + tensor_ms + pipeline_ms + data_ms + bubble_ms


def activation_bytes(micro_batch: int, sequence: int, hidden: int, bytes_per_value: int = 2) -> int:
    """Bytes of a message of tensor or pipeline parallelism: 2bsh in 16 bit."""
    return bytes_per_value * micro_batch * sequence * hidden


def ring_bytes(size_bytes: float, ranks: int) -> float:
    """Bytes that a rank sends for an all-reduce of this size as a ring: 2(n-1)/n of it."""
    return size_bytes * 2 * (ranks - 1) / ranks


def tensor_ms(
    *, m: int, layers: int, p: int, t: int, message_bytes: float, bytes_per_s: float, per_layer: int = 6
) -> float:
    """Equation 2: time of the all-reduces of tensor parallelism in a step, of ``activation_bytes`` each.

    A layer and micro-batch have 4 all-reduces, and 6 with full recomputation.
    """
    return m * layers / p * per_layer * ring_bytes(message_bytes, t) / bytes_per_s * MS_PER_S


def pipeline_ms(*, m: int, message_bytes: float, bytes_per_s: float, p: int = 2) -> float:
    """Equation 3: time of the first stage's messages: a send and a receive for each micro-batch; 0 with one stage."""
    return m * 2 * message_bytes / bytes_per_s * MS_PER_S if p > 1 else 0.0


def data_ms(*, parameters: float, p: int, t: int, d: int, bytes_per_s: float, bytes_per_value: int = 2) -> float:
    """Equation 4: time of the all-reduce of the gradients, 2N/(pt) bytes in 16 bit."""
    return ring_bytes(bytes_per_value * parameters / (p * t), d) / bytes_per_s * MS_PER_S


def bubble_ms(*, p: int, micro_batch_ms: float, chunks: int = 1) -> float:
    """Equation 5: the bubble, (p-1) micro-batches long (forward and backward, with their communication).

    Interleaving divides it by the model chunks of a rank (Narayanan et al., "Efficient Large-Scale Language Model
    Training", section 2.2.2).
    """
    return (p - 1) * micro_batch_ms / chunks


def bubble_ratio(*, bubble_ms: float, iteration_ms: float) -> float:
    """Equation 7, as it is defined: the bubble as a fraction of the step."""
    return bubble_ms / iteration_ms


def expected_bubble_ratio(*, p: int, m: int, chunks: int = 1) -> float:
    """Equation 7, approximated: (p-1)/(p-1+m), with v chunks (p-1)/v for p-1; exact if gradients take no time."""
    bubble = (p - 1) / chunks
    return bubble / (bubble + m)


def micro_batch_flop(
    *, parameters: float, p: int, t: int, micro_batch: int, sequence: int, recompute: bool = True
) -> float:
    """Equation 8: FLOP of a micro-batch on one rank: 8Nbs/(pt): 2 forward, 4 backward, and 2 if all is recomputed."""
    return (8 if recompute else 6) * parameters / (p * t) * micro_batch * sequence


def compute_ms(*, m: int, micro_batch_flop: float, utilisation: float, peak_flop_per_s: float) -> float:
    """Equation 9: compute of a step at a utilisation of the device's peak; the paper saw 0.3 (RTX 3090), 0.4 (V100)."""
    return m * micro_batch_flop / (utilisation * peak_flop_per_s) * MS_PER_S


def parameters(*, layers: int, hidden: int, vocabulary: int, sequence: int) -> float:
    """Equation 10: parameters of a GPT: 12lh²(1 + 13/(12h) + (V+s)/(12lh)). It leaves out the last layer norm's 2h."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))
