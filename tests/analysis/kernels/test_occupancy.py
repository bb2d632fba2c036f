from __future__ import annotations

import pytest

from overlap_callbacks.analysis.kernels.sm_loss import LIMITS, Chip, resident_beside, resident_blocks
from tests.analysis.kernels.launches import KIB, gemm, launch, nccl


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


def test_beside_a_block_of_communication_runs_what_it_leaves_room_for() -> None:
    hopper = LIMITS[9, 0]
    assert resident_beside(gemm(1), hopper, nccl(1)) == 0  # shared memory
    small = launch(1, 256, 32)
    assert resident_beside(small, hopper, nccl(1)) == 0  # 17 warps of 96 registers leave none for 8 warps more
    assert resident_beside(small, hopper, launch(1, 256, 96)) == 5  # 10,240 registers are left in each part: 40 warps
    assert resident_beside(small, hopper, launch(1, 1024, 32)) == 4  # half of the threads


def test_a_block_of_which_nothing_is_known_takes_the_whole_sm() -> None:
    assert resident_beside(launch(1, 256, 32), LIMITS[9, 0], nccl(1, registers=0)) == 0
    assert resident_beside(launch(1, 256, 32), None, nccl(1)) == 0


def test_limits_go_by_compute_capability() -> None:
    assert Chip(132, (9, 0)).limits == LIMITS[9, 0]
    assert Chip(132, (99, 0)).limits is None
    assert Chip(132).limits is None
