from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_callbacks.analysis.kernels.sm_loss import FEW_WAVES, Chip, predicted_loss
from tests.analysis.kernels.launches import H100, gemm, launch, nccl


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


def test_what_fits_beside_a_block_of_communication_is_not_lost() -> None:
    small = launch(100_000, 256, 32)
    some, all_taken = (predicted_loss(small, launch(16, 256, registers), H100) for registers in (96, 0))
    assert some is not None
    assert all_taken is not None
    assert 0 < some.from_sms < all_taken.from_sms == pytest.approx(132 / 116 - 1)


def test_what_cannot_run_beside_at_all_has_no_prediction() -> None:
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
