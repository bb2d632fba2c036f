"""The slowdown of matrix products during communication, measured without the library; CUDA only."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist


def tolerance(by_hand: float) -> float:
    """How far a reported slowdown may be from the one measured by hand."""
    return max(0.03, 0.1 * abs(by_hand))


def slowdown_by_hand(data: torch.Tensor, bucket: torch.Tensor, pairs: int = 6, rounds: int = 7) -> float:
    """The two GEMMs of a layer's backward pass beside the link's kernels, against the same alone.

    Those are what a report's pair of GEMM and all-reduce covers in DDP: the gradient of the input, and that of the
    weight. Both are timed on the device by events around ``pairs`` of them, and rounds alternate.

    Args:
        data: a batch that the layer takes, shape (rows, width).
        bucket: is reduced meanwhile.
        pairs: of GEMMs.
        rounds: of the measurement.
    """
    width = data.shape[1]
    gradient, weight = torch.randn_like(data), torch.randn(width, width, device=data.device)

    def time_ms(communicating: bool) -> float:
        torch.cuda.synchronize()
        works: list[Any] = []
        if communicating:
            # Far more communication than compute, so that all of the products run beside it. Without a monitor
            # nothing is serialised.
            works = [dist.all_reduce(bucket, async_op=True) for _ in range(6 * pairs)]
        torch.cuda._sleep(2_000_000)  # some 1 ms: the first all-reduce runs before the first product
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(pairs):
            gradient @ weight
            gradient.t() @ data
        end.record()
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        elapsed: float = start.elapsed_time(end)
        return elapsed

    time_ms(True)
    alone, beside = zip(*[(time_ms(False), time_ms(True)) for _ in range(rounds)], strict=True)
    slowdown: float = statistics.median(beside) / statistics.median(alone) - 1
    return slowdown
