"""Plans, their order, their groups, and sizes as text."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.bench import bytes_of, powers_of_two, rate_in_words, size_in_words
from overlap_callbacks.analysis.results.bench import Failed
from overlap_callbacks.experiments.bench.results import Bench, points_of, ranks_of, whole_bytes
from overlap_callbacks.experiments.sweep import Point
from tests.analysis.bench_results import HERE, collectives_plan, gemm_plan, gemm_results, start_of


def test_every_second_round_runs_backwards() -> None:
    points = points_of(gemm_plan())
    assert len(points) == 2
    left = Bench(HERE, start_of(gemm_plan())).left
    assert left == [Point(points[0], 0), Point(points[1], 0), Point(points[1], 1), Point(points[0], 1)]


def test_remaining_points_have_no_line_and_can_be_measured() -> None:
    plan, whole = gemm_plan(), gemm_results()
    assert whole.left == []
    missing = whole.rounds[2]
    part = Bench(HERE, start_of(plan), [line for line in whole.lines if line is not missing])
    assert part.left == [Point(missing.point, missing.round)]
    gone = Failed(gemm=points_of(plan)[0], reason="no memory")  # type: ignore[arg-type]
    left = Bench(HERE, start_of(plan), [gone]).left
    assert [point.setting for point in left] == [points_of(plan)[1]] * 2


def test_groups_cover_all_ranks() -> None:
    assert ranks_of("world", 4) == ((0, 1, 2, 3),)
    assert ranks_of("2", 4) == ((0, 1), (2, 3))
    assert ranks_of("2:2", 4) == ((0, 2), (1, 3))
    assert ranks_of("2:2", 8) == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize("text", ["3", "1", "0", "2:4", "two", "2:", "-2", "2:0"])
def test_groups_that_cannot_be_are_refused(text: str) -> None:
    if text == "2:":
        assert ranks_of(text, 4) == ranks_of("2", 4)
        return
    with pytest.raises(ValueError, match="--groups"):
        ranks_of(text, 4)


def test_messages_are_whole_numbers_for_each_rank() -> None:
    assert (whole_bytes(8, 2), whole_bytes(8, 4), whole_bytes(1000, 3)) == (8, 16, 1008)
    # Sizes that come to the same are one point.
    points = points_of(collectives_plan(message_bytes=(8, 16), ranks=4, kinds=("all_gather",)))
    assert [point.message_bytes for point in points] == [16]


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64KiB", 65536), ("16MiB", 16 * 2**20), ("1GB", 10**9), ("1.5 kb", 1500)]
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text, "--size") == size


@pytest.mark.parametrize("text", ["", "many", "-1", "0", "1.5", "2TB", "1e3", "9999GiB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--size must be a whole number of bytes"):
        bytes_of(text, "--size")


def test_sizes_in_words() -> None:
    sizes = (8, 1024, 16 * 2**20, 2**30, 10**9, 1008)
    assert [size_in_words(size) for size in sizes] == ["8 B", "1 KiB", "16 MiB", "1 GiB", "953.7 MiB", "1008 B"]


def test_bandwidths_in_words_have_three_digits_and_a_unit_that_fits() -> None:
    rates = (0.0, 2.9e-9, 7.43e-6, 9.996e-4, 0.0109, 0.7846, 1.0, 1.66, 1234.0)
    assert [rate_in_words(gb_s) for gb_s in rates] == [
        "0 B/s", "2.90 B/s", "7.43 kB/s", "1.00 MB/s", "10.9 MB/s", "785 MB/s", "1.00 GB/s", "1.66 GB/s", "1230 GB/s",
    ]  # fmt: skip


def test_powers_of_two() -> None:
    assert powers_of_two(8, 100) == (8, 16, 32, 64)
    assert powers_of_two(8, 4) == (8,)
