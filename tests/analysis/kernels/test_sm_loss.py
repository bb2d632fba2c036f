"""One step of each mode on a device with 132 SMs; a GEMM of one full wave, a collective that holds 16 of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_callbacks.analysis.kernels.sm_loss import (
    FEW_WAVES,
    LIMITS,
    Chip,
    predicted_loss,
    resident_blocks,
    resident_next_to,
    sm_loss,
)
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.analysis.results.window import SmLoss
from tests.analysis.kernels.launches import H100, KIB, gemm, launch, nccl
from tests.columns import columns

OV, SEQ = np.array([0]), np.array([1])
GEMM, NCCL = "gemm@a", "ncclDevKernel_AllReduce@b"
LAUNCHES = {"a": gemm(132), "b": nccl(16), "c": nccl(32), "d": gemm(116)}


def loss_of(*rows: Any, launches: Any = LAUNCHES, chip: Chip | None = H100, overlapped: Any = OV) -> SmLoss | None:
    table = columns(rows)
    return sm_loss(table, [launches.get(shape) for shape in table.shapes], chip, overlapped, SEQ)


SEQUENTIAL = ((GEMM, Kind.COMPUTE, 1, 100, 104), (NCCL, Kind.COMMUNICATION, 1, 110, 115))


def test_the_price_is_the_time_alone_times_the_share_during_communication() -> None:
    overlapped = ((GEMM, Kind.COMPUTE, 0, 0, 6), (NCCL, Kind.COMMUNICATION, 0, 3, 9))
    found = loss_of(*overlapped, *SEQUENTIAL)
    assert found is not None
    assert found.from_sms_ms + found.from_waves_ms == pytest.approx(4 * 1.0 * 0.5)  # alone x a wave more x half
    assert found.from_sms_ms == pytest.approx(2 * (132 / 116 - 1))
    assert (found.concurrent_ms, found.modelled_ms, found.sms_held, found.num_sms) == (3, 3, 16, 132)
    assert msgspec.json.decode(msgspec.json.encode(found), type=SmLoss) == found


def test_a_kernel_that_still_fits_loses_nothing_during_communication() -> None:
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


def test_time_of_kernels_without_a_launch_is_separate() -> None:
    overlapped = (
        (GEMM, Kind.COMPUTE, 0, 0, 6),
        ("relu@x", Kind.COMPUTE, 0, 6, 8),
        (NCCL, Kind.COMMUNICATION, 0, 0, 8),
    )
    found = loss_of(*overlapped, *SEQUENTIAL, ("relu@x", Kind.COMPUTE, 1, 104, 105))
    assert found is not None
    assert (found.concurrent_ms, found.modelled_ms) == (8, 6)


def test_missing_data_gives_no_loss() -> None:
    rows = ((GEMM, Kind.COMPUTE, 0, 0, 6), (NCCL, Kind.COMMUNICATION, 0, 0, 6), *SEQUENTIAL)
    assert loss_of(*rows) is not None
    assert loss_of(*rows, chip=None) is None
    assert loss_of(*rows, launches={}) is None
    assert loss_of(*rows, launches={"a": gemm(132)}) is None
    assert loss_of(*rows, overlapped=np.array([], dtype=np.int64)) is None
    assert loss_of((GEMM, Kind.COMPUTE, 0, 0, 6), *SEQUENTIAL) is None  # nothing beside it
    assert loss_of(*rows[:2]) is None  # no sequential step has the kernel
    assert sm_loss(columns(rows), (), H100, OV, SEQ) is None


def total(blocks: int, taken: int) -> float:
    found = predicted_loss(gemm(blocks), nccl(taken), H100)
    assert found is not None
    return found.from_sms + found.from_waves


def test_a_full_wave_that_no_longer_fits_takes_a_second_one() -> None:
    found = predicted_loss(gemm(132), nccl(16), H100)
    assert found is not None
    assert found.from_sms == pytest.approx(132 / 116 - 1)
    assert found.from_sms + found.from_waves == pytest.approx(1.0)


def test_less_than_a_wave_that_still_fits_loses_nothing() -> None:
    assert predicted_loss(gemm(116), nccl(16), H100) == (0, 0)
    assert predicted_loss(gemm(1), nccl(16), H100) == (0, 0)
    assert total(117, 16) == pytest.approx(1.0)


def test_a_last_wave_that_is_not_full_takes_the_blocks_that_found_no_place() -> None:
    assert predicted_loss(gemm(132 + 90), nccl(16), H100) == (0, 0)  # 222 blocks, 2 x 116 places
    assert total(132 + 101, 16) == pytest.approx(0.5)  # 233 blocks: three waves instead of two


def test_many_waves_lose_the_share_of_the_sms() -> None:
    found = predicted_loss(gemm(132 * FEW_WAVES), nccl(16), H100)
    assert found == (pytest.approx(132 / 116 - 1), 0)


def test_blocks_that_fit_next_to_communication_are_not_lost() -> None:
    small = launch(100_000, 256, 32)
    some, all_taken = (predicted_loss(small, launch(16, 256, registers), H100) for registers in (96, 0))
    assert some is not None
    assert all_taken is not None
    assert 0 < some.from_sms < all_taken.from_sms == pytest.approx(132 / 116 - 1)


def test_kernels_that_cannot_run_during_communication_have_no_prediction() -> None:
    assert predicted_loss(gemm(132), nccl(132), H100) is None
    assert predicted_loss(gemm(132), nccl(500), H100) is None
    assert predicted_loss(launch(132), nccl(16), Chip(132)) is None  # of an unknown device
    assert predicted_loss(gemm(132), nccl(16), Chip(0, (9, 0))) is None


@settings(deadline=None)
@given(blocks=st.integers(1, 10_000), taken=st.integers(0, 131))
def test_no_loss_is_below_zero_and_none_needs_more_than_one_block_after_another(blocks: int, taken: int) -> None:
    found = predicted_loss(gemm(blocks), nccl(taken), H100)
    assert found is not None
    assert found.from_sms >= 0
    assert found.from_waves >= 0
    assert 1 + found.from_sms + found.from_waves <= max(blocks, 132 / (132 - taken)) + 1e-9
    if not taken:
        assert found == (0, 0)


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "blocks"),
    [
        ((9, 0), 256, 32, 0, 8),  # 2048 threads
        ((8, 6), 256, 32, 0, 6),  # 1536 threads
        ((9, 0), 32, 16, 0, 32),  # the most blocks
        ((8, 9), 32, 16, 0, 24),
        ((9, 0), 256, 128, 0, 2),  # 32,768 registers each
        ((9, 0), 256, 255, 0, 1),
        ((9, 0), 384, 168, 200 * KIB, 1),  # shared memory
        ((8, 0), 128, 32, 81 * KIB, 2),  # 2 x (81 + 1) KiB of 164
        ((8, 0), 128, 32, 82 * KIB, 1),
        ((7, 0), 128, 32, 48 * KIB, 2),  # nothing is reserved
        ((9, 0), 1, 0, 0, 32),  # registers unknown
    ],
)
def test_the_scarcest_resource_limits_the_blocks_of_an_sm(capability, threads, registers, shared, blocks) -> None:
    assert resident_blocks(launch(1, threads, registers, shared), LIMITS[capability]) == blocks


def test_without_limits_only_big_blocks_are_known() -> None:
    assert resident_blocks(gemm(1), None) == 1
    assert resident_blocks(launch(1, 1024, 64), None) == 1
    assert resident_blocks(launch(1, 256, 32), None) is None
    assert resident_blocks(launch(1, 1024, 0), None) is None


def test_a_launch_that_cannot_be_of_this_device_is_unknown() -> None:
    assert resident_blocks(launch(1, 384, 168, 200 * KIB), LIMITS[8, 0]) is None


def test_blocks_that_fit_run_next_to_a_block_of_communication() -> None:
    hopper = LIMITS[9, 0]
    assert resident_next_to(gemm(1), hopper, nccl(1)) == 0  # shared memory
    small = launch(1, 256, 32)
    assert resident_next_to(small, hopper, nccl(1)) == 0  # 17 warps of 96 registers leave none for 8 warps more
    assert resident_next_to(small, hopper, launch(1, 256, 96)) == 5  # 10,240 registers are left in each part: 40 warps
    assert resident_next_to(small, hopper, launch(1, 1024, 32)) == 4  # half of the threads


def test_an_unknown_block_takes_the_whole_sm() -> None:
    assert resident_next_to(launch(1, 256, 32), LIMITS[9, 0], nccl(1, registers=0)) == 0
    assert resident_next_to(launch(1, 256, 32), None, nccl(1)) == 0


def test_limits_go_by_compute_capability() -> None:
    assert Chip(132, (9, 0)).limits == LIMITS[9, 0]
    assert Chip(132, (99, 0)).limits is None
    assert Chip(132).limits is None
