from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import astuple

from overlap_callbacks.analysis.kernels.attribution import (
    ALONE,
    UNMATCHED,
    PairSums,
    VictimSums,
    labels_of,
    pair_times_of,
)
from overlap_callbacks.analysis.kernels.calls import Calls, alone_ns
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.kernel_times import PairTime
from tests.columns import GATHER, GEMM, MINE, MS, NORM, REDUCE, columns, every

C, M, Y = Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY


def pairs_of(rows: Sequence[Any], alone: Sequence[float | None], num_steps: int = 1) -> dict[tuple[str, str], PairTime]:
    """By victim and what ran beside it; ``alone`` in ms, by call."""
    calls = Calls.of(columns(rows))
    found = pairs_with(calls, every(calls), alone, num_steps)
    assert len({(pair.kernel_family, pair.concurrent_with, pair.communication) for pair in found}) == len(found)
    return {(pair.kernel_family, pair.concurrent_with): pair for pair in found}


def pairs_with(calls: Calls, wanted: Any, alone: Sequence[float | None], num_steps: int = 1) -> Sequence[PairTime]:
    """The pairs, where the sequential steps hold just the partners of those calls that have one."""
    times = np.array([np.nan if value is None else value * MS for value in alone])
    kernels = calls.kernels
    partners = [
        (kernels.names[kernels.name[row]], Kind(int(kernels.kind[row])), 0, 100 * i, 100 * i + value)
        for i, (row, value) in enumerate(zip(calls.row, alone, strict=True))
        if value is not None and wanted[i]
    ]
    theirs = Calls.of(columns(partners))
    sums = PairSums(kernels)
    sums.add(calls, wanted, times)
    sums.add_alone(theirs, every(theirs))
    return sums.pairs(num_steps, num_steps)


def beside_dimensions(calls: Calls, alone_ns: Any, dimension: Sequence[int], names: tuple[str, ...]) -> list[PairTime]:
    """The compute kernels beside each dimension; the dimension of each row is an index into the names."""
    sums = VictimSums(calls.kernels, C, (M,), names)
    sums.add(calls, every(calls), alone_ns, np.array(dimension))
    return [pair for pair in sums.pairs(1, 1) if pair.concurrent_with in names]


def row(pair: PairTime) -> tuple[float, float, float, float | None]:
    return pytest.approx((pair.calls, pair.concurrent_ms, pair.time_ms, pair.alone_ms))  # type: ignore[return-value]


def test_a_kernel_s_loss_goes_to_the_collective_beside_it_and_the_other_way_round() -> None:
    found = pairs_of([(GEMM, C, 0, 0, 6), (REDUCE, M, 0, 4, 10), (NORM, C, 0, 20, 21)], [4, 5, 1])
    assert set(found) == {("gemm", "all_reduce"), ("all_reduce", "gemm"), ("normalisation", ALONE)}
    assert row(found["gemm", "all_reduce"]) == (1, 2, 6, 4)
    assert row(found["all_reduce", "gemm"]) == (1, 2, 6, 5)
    assert row(found["normalisation", ALONE]) == (1, 0, 1, 1)
    assert found["gemm", "all_reduce"].lost_ms == pytest.approx(2)
    assert found["gemm", "all_reduce"].slowdown == pytest.approx(0.5)
    assert [pair.communication for pair in found.values()] == [
        pair.kernel_family == "all_reduce" for pair in found.values()
    ]


def test_during_two_collectives_a_loss_is_shared_by_their_times() -> None:
    rows = [(GEMM, C, 0, 0, 12), (REDUCE, M, 0, 0, 9), (GATHER, M, 0, 6, 9)]
    found = pairs_of(rows, [8, None, None])
    reduce, gather = found["gemm", "all_reduce"], found["gemm", "all_gather"]
    assert row(reduce) == (1, 9 * 9 / 12, 12 * 9 / 12, 8 * 9 / 12)
    assert row(gather) == (1, 9 * 3 / 12, 12 * 3 / 12, 8 * 3 / 12)
    # In 9 ms beside either it lost 4.
    assert reduce.slowdown_during == gather.slowdown_during == pytest.approx(4 / (9 - 4))
    assert pairs_of(rows, [None, None, None])["gemm", UNMATCHED].concurrent_ms == pytest.approx(9)
    assert reduce.lost_ms + gather.lost_ms == pytest.approx(12 - 8)
    assert reduce.time_ms + gather.time_ms == pytest.approx(12)


def test_two_collectives_of_one_kind_at_once_are_counted_once() -> None:
    found = pairs_of([(GEMM, C, 0, 0, 10), (REDUCE, M, 0, 0, 6), (REDUCE, M, 0, 4, 8)], [5, None, None])
    assert row(found["gemm", "all_reduce"]) == (1, 8, 10, 5)


def test_a_loss_goes_to_the_dimension_in_flight_whatever_its_kind_of_collective() -> None:
    # Two all-reduces of one kind, of two dimensions; a norm beside neither, and a GEMM that has no partner.
    rows = [(GEMM, C, 0, 0, 6), (NORM, C, 0, 7, 11), (REDUCE, M, 0, 0, 6), (REDUCE, M, 0, 8, 12), (NORM, C, 0, 30, 33),
            (GEMM, C, 0, 40, 44), (REDUCE, M, 0, 40, 44)]  # fmt: skip
    calls = Calls.of(columns(rows))
    alone_ns = np.array([4, 3.5, 6, 4, 3, np.nan, 4]) * MS
    found = beside_dimensions(calls, alone_ns, [-1, -1, 0, 1, -1, -1, 0], ("tensor", "data"))
    assert [(pair.kernel_family, pair.concurrent_with, pair.communication) for pair in found] == [
        ("gemm", "tensor", False), ("normalisation", "data", False),
    ]  # fmt: skip
    assert row(found[0]) == (1, 6, 6, 4)
    assert row(found[1]) == (1, 3, 4, 3.5)
    assert found[0].slowdown == pytest.approx(0.5)


def test_during_two_dimensions_a_loss_is_shared_by_their_times() -> None:
    calls = Calls.of(columns([(GEMM, C, 0, 0, 12), (REDUCE, M, 0, 0, 9), (REDUCE, M, 0, 6, 9)]))
    alone_ns = np.array([8.0, 9, 3]) * MS
    found = beside_dimensions(calls, alone_ns, [-1, 0, 1], ("pipeline", "data"))
    assert [pair.concurrent_with for pair in found] == ["pipeline", "data"]
    assert [pair.lost_ms for pair in found] == pytest.approx([4 * 9 / 12, 4 * 3 / 12])


def test_unmatched_kernels_of_each_mode_have_their_own_rows() -> None:
    found = pairs_of([(GEMM, C, 0, 0, 4), (GEMM, C, 0, 5, 8), (REDUCE, M, 0, 2, 7)], [None, 2, None])
    assert row(found["gemm", "all_reduce"]) == (1, 2, 3, 2)
    unmatched = found["gemm", UNMATCHED]
    assert (unmatched.calls, unmatched.time_ms, unmatched.concurrent_ms) == (1, 4, 2)
    assert (unmatched.alone_ms, unmatched.slowdown) == (pytest.approx(0), None)
    assert found["all_reduce", UNMATCHED].time_ms == 5


def test_losses_add_up_to_the_difference_in_time_whatever_has_a_partner() -> None:
    mine = Calls.of(columns([(GEMM, C, 0, 0, 4), (GEMM, C, 0, 5, 8), (NORM, C, 0, 9, 11), (REDUCE, M, 0, 2, 7)]))
    theirs = Calls.of(columns([(GEMM, C, 0, 0, 3), ("aten::add", C, 0, 20, 27), (REDUCE, M, 0, 40, 44)]))
    sums = PairSums(mine.kernels)
    sums.add(mine, every(mine), alone_ns(mine, every(mine), theirs, every(theirs)))
    sums.add_alone(theirs, every(theirs))
    found = sums.pairs(1, 1)
    assert sum(pair.lost_ms for pair in found if not pair.communication) == pytest.approx((4 + 3 + 2) - (3 + 7))
    assert sum(pair.lost_ms for pair in found if pair.communication) == pytest.approx(5 - 4)
    unmatched = {
        pair.kernel_family: (pair.time_ms, pair.alone_ms) for pair in found if pair.concurrent_with == UNMATCHED
    }
    assert unmatched == {
        "gemm": (3, pytest.approx(0)),
        "normalisation": (2, pytest.approx(0)),
        "elementwise": (0, 7),
    }


def test_figures_are_per_step() -> None:
    rows = [(GEMM, C, step, 10 * step, 10 * step + 6) for step in range(4)] + [(REDUCE, M, 0, 0, 3)]
    found = pairs_of(rows, [4, 4, 4, 4, 3], num_steps=4)
    assert row(found["gemm", "all_reduce"]) == (1 / 4, 3 / 4, 6 / 4, 4 / 4)
    assert row(found["gemm", ALONE]) == (3 / 4, 0, 18 / 4, 12 / 4)


def test_pieces_of_an_operator_are_one_victim_and_only_its_own_time_overlaps() -> None:
    rows = [("aten::linear", C, 0, 0, 1), ("aten::add", C, 0, 1, 4), ("aten::linear", C, 0, 4, 6, 0),
            ("gloo:all_reduce", M, 0, 0.5, 4.5)]  # fmt: skip
    found = pairs_of(rows, [2, 3, None])
    assert row(found["gemm", "all_reduce"]) == (1, 1, 3, 2)
    assert row(found["elementwise", "all_reduce"]) == (1, 3, 3, 3)


def test_copies_and_unwanted_calls_are_no_victims_but_count_as_concurrent() -> None:
    calls = Calls.of(columns([(GEMM, C, 0, 0, 4), ("Memcpy", Y, 0, 0, 4), (REDUCE, M, 1, 1, 3), (GEMM, C, 1, 9, 10)]))
    wanted = np.array([True, True, False, False])
    found = pairs_with(calls, wanted, [3, 3, 2, 1])
    assert [(pair.kernel_family, pair.concurrent_with, pair.lost_ms) for pair in found] == [
        ("gemm", "all_reduce", pytest.approx(1)),
    ]


def test_pairs_that_lose_most_come_first_and_those_without_a_loss_by_time() -> None:
    rows = [(GEMM, C, 0, 0, 4), (NORM, C, 0, 4, 9), (MINE, C, 0, 20, 21), ("their_own_reduce", C, 0, 30, 36),
            (REDUCE, M, 0, 0, 9)]  # fmt: skip
    calls = Calls.of(columns(rows))
    found = pairs_with(calls, every(calls), [3.5, 2, 3, None, None])
    assert [(pair.kernel_family, pair.lost_ms) for pair in found] == [
        ("all_reduce", pytest.approx(9)), ("reduction", pytest.approx(6)), ("normalisation", pytest.approx(3)),
        ("gemm", pytest.approx(0.5)), ("other", pytest.approx(-2)),
    ]  # fmt: skip


def test_a_collective_and_a_family_of_one_name_are_not_mixed() -> None:
    generic = "ncclDevKernel_Generic_4"  # a collective of kind ``other``
    calls = Calls.of(columns([(MINE, C, 0, 0, 4), (generic, M, 0, 2, 5)]))
    found = pairs_with(calls, every(calls), [3, 2])
    assert {(pair.kernel_family, pair.communication, pair.concurrent_with, pair.time_ms) for pair in found} == {
        ("other", False, "other", 4),
        ("other", True, "other", 3),
    }


def random_profile(chance: random.Random) -> list[Any]:
    names = [(GEMM, C), (NORM, C), (MINE, C), (REDUCE, M), (GATHER, M)]
    rows = []
    for _ in range(40):
        name, kind = chance.choice(names)
        start = chance.randrange(100)
        rows.append((name, kind, chance.randrange(2), start, start + chance.randrange(12)))
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_times_and_losses_of_all_rows_add_up_to_those_of_the_kernels(seed: int) -> None:
    chance = random.Random(seed)
    rows = random_profile(chance)
    alone = [chance.choice([None, chance.randrange(1, 12)]) for _ in rows]
    found = pairs_of(rows, alone, num_steps=2)
    for kind in (C, M):
        mine = [(row[4] - row[3], value) for row, value in zip(rows, alone, strict=True) if row[1] == kind]
        pairs = [pair for pair in found.values() if pair.communication == (kind == M)]
        assert sum(pair.time_ms for pair in pairs) == pytest.approx(sum(time for time, _ in mine) / 2)
        lost = sum(time - (value or 0) for time, value in mine)
        assert sum(pair.lost_ms for pair in pairs) == pytest.approx(lost / 2)
        unmatched = sum(time for time, value in mine if value is None)
        assert sum(pair.time_ms for pair in pairs if pair.concurrent_with == UNMATCHED) == pytest.approx(unmatched / 2)


def test_labels_are_the_family_or_the_kind_of_collective() -> None:
    kernels: KernelTable = columns([(GEMM, C, 0, 0, 1), (REDUCE, M, 0, 0, 1), (MINE, C, 0, 0, 1), (GEMM, C, 0, 2, 3)])
    numbers, labels = labels_of(kernels)
    assert [labels[number] for number in numbers.tolist()] == ["gemm", "all_reduce", "other", "gemm"]


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (0.6, 1.4, 1.7, 0.3), (2.2, -0.2, -0.4, 2.4)])
def test_kernels_that_all_steps_have_leave_nothing_without_a_partner_however_steps_are_weighted(
    weights: tuple[float, ...],
) -> None:
    # Steps 0 and 1 are overlapped, 2 and 3 sequential; none takes as long as another.
    rows = []
    for step, (gemm_ms, norm_ms) in enumerate([(12, 3), (15, 4), (10, 2), (11, 5)]):
        rows += [(GEMM, Kind.COMPUTE, step, 100 * step, 100 * step + gemm_ms)]
        rows += [(NORM, Kind.COMPUTE, step, 100 * step + 50, 100 * step + 50 + norm_ms)]
        rows += [(REDUCE, Kind.COMMUNICATION, step, 100 * step + 70 * (step // 2), 100 * step + 70 * (step // 2) + 20)]
    found = pair_times_of(columns(rows), np.array([0, 1]), np.array([2, 3]), weights=np.array(weights)).by_kind
    assert UNMATCHED not in {pair.concurrent_with for pair in found}
    # Each side is the mean with these weights.
    gemm = next(pair for pair in found if pair.kernel_family == "gemm")
    assert gemm.time_ms == pytest.approx((12 * weights[0] + 15 * weights[1]) / 2)
    assert gemm.alone_ms == pytest.approx((10 * weights[2] + 11 * weights[3]) / 2)


def test_pairs_of_no_kernels_are_none() -> None:
    calls = Calls.of(columns([]))
    assert pairs_with(calls, every(calls), []) == ()


@pytest.mark.parametrize("seed", range(8))
def test_pairs_that_are_added_up_over_parts_are_those_of_all_at_once(seed: int) -> None:
    chance = random.Random(seed)
    rows = [(name, kind, step, start + 200 * step, end + 200 * step)
            for name, kind, step, start, end in random_profile(chance)]  # fmt: skip
    kernels = columns(rows)
    calls = Calls.of(kernels)
    wanted = np.array([chance.random() < 0.9 for _ in rows])
    times = np.array([chance.choice((np.nan, chance.randrange(9) * MS)) for _ in rows])
    at_once, sums = PairSums(kernels), PairSums(kernels)
    at_once.add(calls, wanted, times)
    at_once.add_alone(calls, ~wanted)
    whole = at_once.pairs(2, 1)
    for step in range(2):
        mine = np.flatnonzero(kernels.step == step)
        part = Calls.of(kernels[mine])
        sums.add(part, wanted[mine], times[mine])
        sums.add_alone(part, ~wanted[mine])
    found = sums.pairs(2, 1)
    mine, theirs = ({astuple(pair)[:3]: astuple(pair)[3:] for pair in side} for side in (found, whole))
    assert mine.keys() == theirs.keys()
    for pair, numbers in theirs.items():
        assert mine[pair] == pytest.approx(numbers)


@pytest.mark.parametrize("slowdown", [0.06, 0.22, 1.0])
def test_slowdown_while_both_run_does_not_depend_on_the_time_alone(slowdown: float) -> None:
    # A product of 5 ms alone runs beside an all-reduce of 3 ms, then goes on alone.
    own = 3.0 + 5.0 - 3.0 / (1 + slowdown)
    pair = pairs_of([(GEMM, C, 0, 0.0, own), (REDUCE, M, 0, 0.0, 3.0)], [5.0, None])["gemm", "all_reduce"]
    assert pair.slowdown is not None
    assert pair.slowdown == pytest.approx(own / 5.0 - 1, abs=1e-6)
    assert pair.slowdown < slowdown
    assert pair.slowdown_during == pytest.approx(slowdown, abs=1e-5)


def test_what_ran_alone_is_slower_during_nothing() -> None:
    (pair,) = pairs_of([(GEMM, C, 0, 0.0, 3.0)], [2.0]).values()
    assert pair.slowdown_during is None
