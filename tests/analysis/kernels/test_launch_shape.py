"""The shape of a launch, from metadata as Kineto writes it."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.kernels.table import LaunchShape

# As an H100 with its 132 SMs gives it.
METADATA = {
    "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": 12, "registers per thread": 168,
    "shared memory": 199168, "blocks per SM": 0.969697, "warps per SM": 11.636364, "grid": [128, 1, 1],
    "block": [384, 1, 1], "est. achieved occupancy %": 18,
}  # fmt: skip


def test_it_is_read_from_a_kernels_metadata() -> None:
    shape = LaunchShape.of(METADATA)
    assert shape == LaunchShape((128, 1, 1), (384, 1, 1), 168, 199168, 132)
    assert (shape.num_blocks, shape.threads_per_block) == (128, 384)
    assert str(shape) == "[128, 1, 1] [384, 1, 1]"


def test_grid_and_block_alone_are_enough() -> None:
    shape = LaunchShape.of({"grid": [2, 3, 4], "block": ["32", 2, 1]})
    assert shape == LaunchShape((2, 3, 4), (32, 2, 1))
    assert (shape.num_blocks, shape.threads_per_block, shape.num_sms) == (24, 64, 0)


@pytest.mark.parametrize("grid", [[1, 1, 1], [7, 1, 1], [131, 3, 1], [65535, 2, 1]])
@pytest.mark.parametrize("num_sms", [40, 108, 132, 304])
def test_the_number_of_sms_follows_from_the_blocks_of_each_as_far_as_they_are_printed(
    grid: list[int], num_sms: int
) -> None:
    blocks_per_sm = float(f"{grid[0] * grid[1] / num_sms:.6g}")
    shape = LaunchShape.of({"grid": grid, "block": [32, 1, 1], "blocks per SM": blocks_per_sm})
    assert shape is not None
    assert shape.num_sms == num_sms


@pytest.mark.parametrize(
    "change",
    [
        {"grid": None}, {"grid": [1, 1]}, {"grid": [1, 1, 1, 1]}, {"block": "64"}, {"block": ["a", 1, 1]},
        {"registers per thread": "many"}, {"blocks per SM": float("nan")}, {"grid": [float("inf"), 1, 1]},
        {"blocks per SM": 1e-320},
    ],
)  # fmt: skip
def test_invalid_metadata_gives_no_shape_or_one_without_sms(change: dict[str, object]) -> None:
    shape = LaunchShape.of({**METADATA, **change})
    assert shape is None or shape.num_sms == 0


@pytest.mark.parametrize("blocks_per_sm", [0, -1.0])
def test_meaningless_blocks_per_sm_leave_the_sms_unknown(blocks_per_sm: float) -> None:
    shape = LaunchShape.of({**METADATA, "blocks per SM": blocks_per_sm})
    assert shape is not None
    assert shape.num_sms == 0


def test_without_metadata_there_is_no_shape() -> None:
    assert LaunchShape.of({}) is None
