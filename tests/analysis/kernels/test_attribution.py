from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels import attribution
from overlap_callbacks.analysis.kernels.attribution import (
    ALONE,
    IN_TURN,
    SAME_LAUNCH,
    UNMATCHED,
    Calls,
    Side,
    dimension_pair_times,
    labels_of,
    match,
    pair_times,
)
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.analysis.results.kernel_times import PairTime
from tests.columns import EPOCH_NS, MS, columns

C, M, Y = Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY
GEMM, NORM, MINE = "ampere_sgemm", "layer_norm_kernel", "my_own"
REDUCE, GATHER = "ncclDevKernel_AllReduce", "ncclDevKernel_AllGather"


def at(start: float, end: float) -> Intervals:
    return Intervals(np.array([round(start * MS) + EPOCH_NS]), np.array([round(end * MS) + EPOCH_NS]))


def ms(nanoseconds: Any) -> list[float]:
    return [None if np.isnan(ns) else ns / MS for ns in nanoseconds.tolist()]  # type: ignore[misc]


def every(calls: Calls) -> Any:
    return np.ones(len(calls), dtype=bool)


def matched(mine: Sequence[Any], theirs: Sequence[Any], **options: Any) -> tuple[list[float], list[bool]]:
    """Partners' times of calls, ms, and which of the partners were used."""
    calls, partners = Calls.of(columns(mine)), Calls.of(columns(theirs))
    found = match(calls, every(calls), partners, every(partners), **options)
    return ms(found.alone_ns), found.used.tolist()


# -- calls


def test_on_a_device_each_row_is_a_call() -> None:
    calls = Calls.of(columns([(GEMM, C, 0, 0, 2), (REDUCE, M, 1, 1, 4), (GEMM, C, -1, 3, 3)]))
    assert len(calls) == 3
    assert ms(calls.duration_ns) == [2, 3, 0]
    assert calls.step.tolist() == [0, 1, -1]
    assert calls.kind.tolist() == [C, M, C]


def test_on_cpu_the_pieces_of_a_call_are_one_call_of_their_sum() -> None:
    # aten::linear runs, calls aten::mm, goes on; and is called once more.
    rows = [("aten::linear", C, 0, 0, 1), ("aten::mm", C, 0, 1, 4), ("aten::linear", C, 0, 4, 6, 0),
            ("aten::linear", C, 0, 7, 8)]  # fmt: skip
    calls = Calls.of(columns(rows))
    assert ms(calls.duration_ns) == [3, 3, 1]
    assert calls.row.tolist() == [0, 1, 3]
    assert calls.call.tolist() == [0, 1, 0, 2]
    assert ms(calls.covered_ns(at(0.5, 4.5))) == [0.5 + 0.5, 3, 0]


def test_no_kernels_are_no_calls() -> None:
    calls = Calls.of(columns([]))
    assert len(calls) == 0
    assert calls.covered_ns(at(0, 1)).tolist() == []
    assert match(calls, every(calls), calls, every(calls)).alone_ns.tolist() == []
    assert pairs_with(calls, every(calls), []) == ()


# -- matching


def test_the_k_th_call_of_a_name_in_a_step_is_matched_with_the_k_th_of_other_steps() -> None:
    mine = [(GEMM, C, 0, 0, 2), (GEMM, C, 0, 3, 7)]
    theirs = [(GEMM, C, 0, 0, 1), (GEMM, C, 0, 3, 6), (GEMM, C, 1, 10, 13), (GEMM, C, 1, 14, 15)]
    assert matched(mine, theirs) == ([(1 + 3) / 2, (3 + 1) / 2], [True] * 4)


def test_turns_are_counted_by_time_and_not_by_the_order_of_the_rows() -> None:
    mine = [(GEMM, C, 0, 3, 7), (GEMM, C, 0, 0, 2)]
    theirs = [(GEMM, C, 0, 0, 1), (GEMM, C, 0, 3, 6)]
    assert matched(mine, theirs)[0] == [3, 1]


def test_turns_are_counted_for_each_launch_shape_by_itself() -> None:
    mine = [(f"{GEMM}@a", C, 0, 0, 2), (f"{GEMM}@b", C, 0, 3, 7)]
    theirs = [(f"{GEMM}@b", C, 0, 0, 5), (f"{GEMM}@a", C, 0, 6, 7)]
    assert matched(mine, theirs)[0] == [1, 5]


def test_where_shapes_vary_with_the_data_the_turn_of_the_name_decides() -> None:
    mine = [(f"{GEMM}@a", C, 0, 0, 2), (f"{GEMM}@b", C, 0, 3, 7)]
    theirs = [(f"{GEMM}@c", C, 0, 0, 5), (f"{GEMM}@d", C, 0, 6, 7)]
    assert matched(mine, theirs) == ([5, 1], [True, True])


def test_where_steps_have_different_numbers_of_calls_those_of_the_launch_shape_are_averaged() -> None:
    mine = [(f"{GEMM}@a", C, 0, 0, 2), (f"{GEMM}@a", C, 0, 3, 4), (f"{GEMM}@a", C, 0, 5, 6)]
    theirs = [(f"{GEMM}@a", C, 0, 0, 1), (f"{GEMM}@a", C, 0, 3, 6), (f"{GEMM}@b", C, 0, 7, 90)]
    # By name alone the steps have three calls each: in turn, as far as that is known.
    alone, used = matched(mine, theirs, levels=SAME_LAUNCH)
    assert (alone, used) == ([2, 2, 2], [True, True, False])
    assert matched(mine, theirs[:2], levels=IN_TURN) == ([None] * 3, [False, False])


def test_where_steps_have_different_numbers_of_calls_what_there_is_is_paired_and_the_rest_has_no_partner() -> None:
    mine = [(f"{GEMM}@a", C, 0, 0, 2), (f"{GEMM}@a", C, 0, 3, 4), (f"{GEMM}@a", C, 0, 5, 6)]
    theirs = [(f"{GEMM}@a", C, 0, 0, 1), (f"{GEMM}@a", C, 0, 3, 6)]
    assert matched(mine, theirs) == ([1, 3, None], [True, True])
    assert matched(theirs, mine) == ([2, 1], [True, True, False])


def test_one_kernel_that_serves_two_collectives_is_not_the_same_call() -> None:
    generic = "ncclDevKernel_SendRecv"
    mine = dataclasses.replace(columns([(generic, M, 0, 0, 2), (generic, M, 0, 3, 7)]), collectives=("all_to_all",))
    theirs = dataclasses.replace(columns([(generic, M, 0, 0, 5)]), collectives=("send_recv",))
    calls, partners = Calls.of(mine), Calls.of(theirs)
    assert np.isnan(match(calls, every(calls), partners, every(partners)).alone_ns).all()


def test_steps_with_as_many_calls_are_partners_and_others_are_not() -> None:
    mine = [(GEMM, C, 0, 0, 2), (GEMM, C, 0, 3, 7)]
    theirs = [(GEMM, C, 0, 0, 1), (GEMM, C, 1, 10, 14), (GEMM, C, 1, 15, 18)]
    assert matched(mine, theirs) == ([4, 3], [False, True, True])


def test_a_call_without_the_like_matches_nothing() -> None:
    assert matched([(GEMM, C, 0, 0, 2), (NORM, C, 0, 3, 4)], [(NORM, C, 0, 0, 5)]) == ([None, 5], [True])
    assert matched([(GEMM, C, 0, 0, 2)], []) == ([None], [])
    assert matched([], [(GEMM, C, 0, 0, 2)]) == ([], [False])


def test_names_and_shapes_are_compared_as_texts_and_not_by_their_numbers() -> None:
    mine = [(f"{NORM}@x", C, 0, 0, 2), (f"{GEMM}@y", C, 0, 3, 7)]
    theirs = [(f"{GEMM}@y", C, 0, 0, 1), (f"{MINE}@x", C, 0, 2, 3), (f"{NORM}@x", C, 0, 3, 6)]
    assert matched(mine, theirs) == ([3, 1], [True, False, True])


def test_calls_that_are_not_wanted_are_no_partners_but_count_in_turn() -> None:
    calls = Calls.of(columns([(GEMM, C, 0, 0, 2), (GEMM, C, 0, 3, 7), (GEMM, C, 1, 10, 13), (GEMM, C, 1, 14, 20)]))
    wanted, others = np.array([False, True, False, False]), np.array([True, False, True, True])
    found = match(calls, wanted, calls, others)
    assert ms(found.alone_ns) == [None, 6, None, None]  # the second of its step, not the first that is wanted
    assert found.used.tolist() == [False, False, False, True]


def test_pieces_of_a_call_are_matched_as_one() -> None:
    rows = [("aten::linear", C, 0, 0, 1), ("aten::mm", C, 0, 1, 4), ("aten::linear", C, 0, 4, 6, 0)]
    theirs = [("aten::linear", C, 0, 0, 2), ("aten::mm", C, 0, 2, 4), ("aten::linear", C, 0, 4, 5, 0)]
    assert matched(rows, theirs) == ([3, 2], [True, True])


# -- pairs


def pairs_of(rows: Sequence[Any], alone: Sequence[float | None], num_steps: int = 1) -> dict[tuple[str, str], PairTime]:
    """By victim and what ran beside it; ``alone`` in ms, by call."""
    calls = Calls.of(columns(rows))
    found = pairs_with(calls, every(calls), alone, num_steps)
    assert len({(pair.victim, pair.beside, pair.communication) for pair in found}) == len(found)
    return {(pair.victim, pair.beside): pair for pair in found}


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
    return pair_times(Side(calls, wanted, num_steps), Side(theirs, every(theirs), num_steps), times)


def row(pair: PairTime) -> tuple[float, float, float, float | None]:
    return pytest.approx((pair.calls, pair.beside_ms, pair.time_ms, pair.alone_ms))  # type: ignore[return-value]


def test_a_kernel_s_loss_goes_to_the_collective_beside_it_and_the_other_way_round() -> None:
    found = pairs_of([(GEMM, C, 0, 0, 6), (REDUCE, M, 0, 4, 10), (NORM, C, 0, 20, 21)], [4, 5, 1])
    assert set(found) == {("gemm", "all_reduce"), ("all_reduce", "gemm"), ("normalisation", ALONE)}
    assert row(found["gemm", "all_reduce"]) == (1, 2, 6, 4)
    assert row(found["all_reduce", "gemm"]) == (1, 2, 6, 5)
    assert row(found["normalisation", ALONE]) == (1, 0, 1, 1)
    assert found["gemm", "all_reduce"].lost_ms == pytest.approx(2)
    assert found["gemm", "all_reduce"].slowdown == pytest.approx(0.5)
    assert [pair.communication for pair in found.values()] == [pair.victim == "all_reduce" for pair in found.values()]


def test_beside_two_collectives_at_once_a_loss_is_shared_by_the_time_of_each() -> None:
    rows = [(GEMM, C, 0, 0, 12), (REDUCE, M, 0, 0, 9), (GATHER, M, 0, 6, 9)]
    found = pairs_of(rows, [8, None, None])
    reduce, gather = found["gemm", "all_reduce"], found["gemm", "all_gather"]
    assert row(reduce) == (1, 9, 12 * 9 / 12, 8 * 9 / 12)
    assert row(gather) == (1, 3, 12 * 3 / 12, 8 * 3 / 12)
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
    dimensions = np.array([-1, -1, 0, 1, -1, -1, 0]), ("tensor", "data")
    side = Side(calls, every(calls), 1)
    found = dimension_pair_times(side, side, alone_ns, dimensions)
    assert [(pair.victim, pair.beside, pair.communication) for pair in found] == [
        ("gemm", "tensor", False), ("normalisation", "data", False),
    ]  # fmt: skip
    assert row(found[0]) == (1, 6, 6, 4)
    assert row(found[1]) == (1, 3, 4, 3.5)
    assert found[0].slowdown == pytest.approx(0.5)


def test_beside_two_dimensions_at_once_a_loss_is_shared_by_the_time_of_each() -> None:
    calls = Calls.of(columns([(GEMM, C, 0, 0, 12), (REDUCE, M, 0, 0, 9), (REDUCE, M, 0, 6, 9)]))
    alone_ns = np.array([8.0, 9, 3]) * MS
    side = Side(calls, every(calls), 1)
    found = dimension_pair_times(side, side, alone_ns, (np.array([-1, 0, 1]), ("pipeline", "data")))
    assert [pair.beside for pair in found] == ["pipeline", "data"]
    assert [pair.lost_ms for pair in found] == pytest.approx([4 * 9 / 12, 4 * 3 / 12])


def test_what_has_no_partner_stands_in_a_row_of_its_own_beside_what_the_other_mode_has_alone() -> None:
    found = pairs_of([(GEMM, C, 0, 0, 4), (GEMM, C, 0, 5, 8), (REDUCE, M, 0, 2, 7)], [None, 2, None])
    assert row(found["gemm", "all_reduce"]) == (1, 2, 3, 2)
    unmatched = found["gemm", UNMATCHED]
    assert (unmatched.calls, unmatched.time_ms, unmatched.beside_ms) == (1, 4, 2)
    assert (unmatched.alone_ms, unmatched.slowdown) == (pytest.approx(0), None)
    assert found["all_reduce", UNMATCHED].time_ms == 5


def test_losses_add_up_to_the_difference_in_time_whatever_has_a_partner() -> None:
    mine = Calls.of(columns([(GEMM, C, 0, 0, 4), (GEMM, C, 0, 5, 8), (NORM, C, 0, 9, 11), (REDUCE, M, 0, 2, 7)]))
    theirs = Calls.of(columns([(GEMM, C, 0, 0, 3), ("aten::add", C, 0, 20, 27), (REDUCE, M, 0, 40, 44)]))
    overlapped, sequential = (Side(calls, every(calls), 1) for calls in (mine, theirs))
    found = pair_times(overlapped, sequential, match(mine, every(mine), theirs, every(theirs)).alone_ns)
    assert sum(pair.lost_ms for pair in found if not pair.communication) == pytest.approx((4 + 3 + 2) - (3 + 7))
    assert sum(pair.lost_ms for pair in found if pair.communication) == pytest.approx(5 - 4)
    unmatched = {pair.victim: (pair.time_ms, pair.alone_ms) for pair in found if pair.beside == UNMATCHED}
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


def test_pieces_of_an_operator_are_one_victim_and_only_its_own_time_is_beside() -> None:
    rows = [("aten::linear", C, 0, 0, 1), ("aten::add", C, 0, 1, 4), ("aten::linear", C, 0, 4, 6, 0),
            ("gloo:all_reduce", M, 0, 0.5, 4.5)]  # fmt: skip
    found = pairs_of(rows, [2, 3, None])
    assert row(found["gemm", "all_reduce"]) == (1, 1, 3, 2)
    assert row(found["elementwise", "all_reduce"]) == (1, 3, 3, 3)


def test_copies_and_calls_that_are_not_wanted_are_neither_victims_nor_left_out_beside_others() -> None:
    calls = Calls.of(columns([(GEMM, C, 0, 0, 4), ("Memcpy", Y, 0, 0, 4), (REDUCE, M, 1, 1, 3), (GEMM, C, 1, 9, 10)]))
    wanted = np.array([True, True, False, False])
    found = pairs_with(calls, wanted, [3, 3, 2, 1])
    assert [(pair.victim, pair.beside, pair.lost_ms) for pair in found] == [
        ("gemm", "all_reduce", pytest.approx(1)),
    ]


def test_pairs_that_lose_most_come_first_and_those_without_a_loss_by_time() -> None:
    rows = [(GEMM, C, 0, 0, 4), (NORM, C, 0, 4, 9), (MINE, C, 0, 20, 21), ("their_own_reduce", C, 0, 30, 36),
            (REDUCE, M, 0, 0, 9)]  # fmt: skip
    calls = Calls.of(columns(rows))
    found = pairs_with(calls, every(calls), [3.5, 2, 3, None, None])
    assert [(pair.victim, pair.lost_ms) for pair in found] == [
        ("all_reduce", pytest.approx(9)), ("reduction", pytest.approx(6)), ("normalisation", pytest.approx(3)),
        ("gemm", pytest.approx(0.5)), ("other", pytest.approx(-2)),
    ]  # fmt: skip


def test_a_collective_and_a_family_of_one_name_are_not_mixed() -> None:
    generic = "ncclDevKernel_Generic_4"  # a collective of kind ``other``
    calls = Calls.of(columns([(MINE, C, 0, 0, 4), (generic, M, 0, 2, 5)]))
    found = pairs_with(calls, every(calls), [3, 2])
    assert {(pair.victim, pair.communication, pair.beside, pair.time_ms) for pair in found} == {
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
        assert sum(pair.time_ms for pair in pairs if pair.beside == UNMATCHED) == pytest.approx(unmatched / 2)


def test_labels_are_the_family_or_the_kind_of_collective() -> None:
    kernels: KernelTable = columns([(GEMM, C, 0, 0, 1), (REDUCE, M, 0, 0, 1), (MINE, C, 0, 0, 1), (GEMM, C, 0, 2, 3)])
    numbers, labels = labels_of(kernels)
    assert [labels[number] for number in numbers.tolist()] == ["gemm", "all_reduce", "other", "gemm"]


@given(st.lists(st.tuples(*[st.integers(-(2**62), 2**62) | st.integers(-1, 2)] * 3), max_size=12))
def test_rows_have_one_number_if_they_are_equal(rows: list[tuple[int, ...]]) -> None:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(3)]
    numbers = attribution.numbered(columns).tolist()
    assert [numbers.index(number) for number in numbers] == [rows.index(row) for row in rows]
