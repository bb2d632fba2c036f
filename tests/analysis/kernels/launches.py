"""Launches of kernels as a device runs them."""

from __future__ import annotations

from overlap_callbacks.analysis.kernels.sm_loss import Chip
from overlap_callbacks.analysis.kernels.table import LaunchShape

KIB = 1024
H100 = Chip(132, (9, 0))


def launch(blocks: int, threads: int = 256, registers: int = 32, shared: int = 0) -> LaunchShape:
    return LaunchShape((blocks, 1, 1), (threads, 1, 1), registers, shared)


def gemm(blocks: int) -> LaunchShape:
    """Its shared memory fills an SM of Hopper."""
    return launch(blocks, 384, 168, 200 * KIB)


def nccl(blocks: int, registers: int = 96) -> LaunchShape:
    return launch(blocks, 544, registers, 80 * KIB)
