"""One step of each mode on a device with 132 SMs; a GEMM of one full wave, a collective that holds 16 of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.kernels.sm_loss import Chip, sm_loss
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.results.window import SmLoss
from tests.analysis.kernels.launches import H100, gemm, nccl
from tests.columns import columns

OV, SEQ = np.array([0]), np.array([1])
GEMM, NCCL = "gemm@a", "ncclDevKernel_AllReduce@b"
LAUNCHES = {"a": gemm(132), "b": nccl(16), "c": nccl(32), "d": gemm(116)}


def loss_of(*rows: Any, launches: Any = LAUNCHES, chip: Chip | None = H100, overlapped: Any = OV) -> SmLoss | None:
    table = columns(rows)
    return sm_loss(table, [launches.get(shape) for shape in table.shapes], chip, overlapped, SEQ)


SEQUENTIAL = ((GEMM, Kind.COMPUTE, 1, 100, 104), (NCCL, Kind.COMMUNICATION, 1, 110, 115))


def test_the_price_is_time_alone_by_the_share_beside_communication() -> None:
    overlapped = ((GEMM, Kind.COMPUTE, 0, 0, 6), (NCCL, Kind.COMMUNICATION, 0, 3, 9))
    found = loss_of(*overlapped, *SEQUENTIAL)
    assert found is not None
    assert found.from_sms_ms + found.from_waves_ms == pytest.approx(4 * 1.0 * 0.5)  # alone x a wave more x half
    assert found.from_sms_ms == pytest.approx(2 * (132 / 116 - 1))
    assert (found.concurrent_ms, found.modelled_ms, found.sms_held, found.num_sms) == (3, 3, 16, 132)
    assert msgspec.json.decode(msgspec.json.encode(found), type=SmLoss) == found


def test_a_kernel_that_still_fits_loses_nothing_though_it_ran_beside_communication() -> None:
    found = loss_of(
        ("gemm@d", Kind.COMPUTE, 0, 0, 6),
        (NCCL, Kind.COMMUNICATION, 0, 0, 9),
        ("gemm@d", Kind.COMPUTE, 1, 100, 104),
    )
    assert found is not None
    assert (found.from_sms_ms, found.from_waves_ms, found.modelled_ms) == (0, 0, 6)


def test_each_communication_kernel_counts_with_its_own_blocks() -> None:
    overlapped = (
        (GEMM, Kind.COMPUTE, 0, 0, 8),
        (NCCL, Kind.COMMUNICATION, 0, 0, 2),
        ("ncclDevKernel_AllGather@c", Kind.COMMUNICATION, 0, 2, 8),
    )
    found = loss_of(*overlapped, *SEQUENTIAL)
    assert found is not None
    assert found.sms_held == pytest.approx((2 * 16 + 6 * 32) / 8)


def test_means_are_per_step() -> None:
    steps = [
        row
        for step, at in ((0, 0), (2, 50))
        for row in ((GEMM, Kind.COMPUTE, step, at, at + 6), (NCCL, Kind.COMMUNICATION, step, at, at + 6))
    ]
    found = loss_of(*steps, *SEQUENTIAL, overlapped=np.array([0, 2]))
    assert found is not None
    assert (found.concurrent_ms, found.from_sms_ms + found.from_waves_ms) == (pytest.approx(6), pytest.approx(4))


def test_time_of_kernels_without_a_launch_is_told_apart() -> None:
    overlapped = (
        (GEMM, Kind.COMPUTE, 0, 0, 6),
        ("relu@x", Kind.COMPUTE, 0, 6, 8),
        (NCCL, Kind.COMMUNICATION, 0, 0, 8),
    )
    found = loss_of(*overlapped, *SEQUENTIAL, ("relu@x", Kind.COMPUTE, 1, 104, 105))
    assert found is not None
    assert (found.concurrent_ms, found.modelled_ms) == (8, 6)


def test_what_is_not_known_has_no_figure() -> None:
    rows = ((GEMM, Kind.COMPUTE, 0, 0, 6), (NCCL, Kind.COMMUNICATION, 0, 0, 6), *SEQUENTIAL)
    assert loss_of(*rows) is not None
    assert loss_of(*rows, chip=None) is None
    assert loss_of(*rows, launches={}) is None
    assert loss_of(*rows, launches={"a": gemm(132)}) is None
    assert loss_of(*rows, overlapped=np.array([], dtype=np.int64)) is None
    assert loss_of((GEMM, Kind.COMPUTE, 0, 0, 6), *SEQUENTIAL) is None  # nothing beside it
    assert loss_of(*rows[:2]) is None  # no sequential step has the kernel
    assert sm_loss(columns(rows), (), H100, OV, SEQ) is None
