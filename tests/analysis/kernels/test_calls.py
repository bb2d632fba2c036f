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
from overlap_callbacks.analysis.kernels.calls import Calls, Labels, SameCalls, alone_ns, numbered
from overlap_callbacks.analysis.kernels.table import Kind
from tests.columns import EPOCH_NS, GATHER, GEMM, MINE, MS, NORM, REDUCE, columns, every

C, M, Y = Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY


def ms(nanoseconds: Any) -> list[float]:
    return [None if np.isnan(ns) else ns / MS for ns in nanoseconds.tolist()]  # type: ignore[misc]


def matched(mine: Sequence[Any], theirs: Sequence[Any]) -> list[float]:
    """Partners' times of calls, ms."""
    calls, partners = Calls.of(columns(mine)), Calls.of(columns(theirs))
    return ms(alone_ns(calls, every(calls), partners, every(partners)))


def test_no_calls_match_nothing() -> None:
    calls = Calls.of(columns([]))
    assert alone_ns(calls, every(calls), calls, every(calls)).tolist() == []


def test_the_k_th_call_of_a_name_in_a_step_is_matched_with_the_k_th_of_other_steps() -> None:
    mine = [(GEMM, C, 0, 0, 2), (GEMM, C, 0, 3, 7)]
    theirs = [(GEMM, C, 0, 0, 1), (GEMM, C, 0, 3, 6), (GEMM, C, 1, 10, 13), (GEMM, C, 1, 14, 15)]
    assert matched(mine, theirs) == [(1 + 3) / 2, (3 + 1) / 2]


def test_turns_are_counted_by_time_and_not_by_the_order_of_the_rows() -> None:
    mine = [(GEMM, C, 0, 3, 7), (GEMM, C, 0, 0, 2)]
    theirs = [(GEMM, C, 0, 0, 1), (GEMM, C, 0, 3, 6)]
    assert matched(mine, theirs) == [3, 1]


def test_turns_are_counted_for_each_launch_shape_by_itself() -> None:
    mine = [(f"{GEMM}@a", C, 0, 0, 2), (f"{GEMM}@b", C, 0, 3, 7)]
    theirs = [(f"{GEMM}@b", C, 0, 0, 5), (f"{GEMM}@a", C, 0, 6, 7)]
    assert matched(mine, theirs) == [1, 5]


def test_where_shapes_vary_with_the_data_the_turn_of_the_name_decides() -> None:
    mine = [(f"{GEMM}@a", C, 0, 0, 2), (f"{GEMM}@b", C, 0, 3, 7)]
    theirs = [(f"{GEMM}@c", C, 0, 0, 5), (f"{GEMM}@d", C, 0, 6, 7)]
    assert matched(mine, theirs) == [5, 1]


def test_where_steps_have_different_numbers_of_calls_what_there_is_is_paired_and_the_rest_has_no_partner() -> None:
    mine = [(f"{GEMM}@a", C, 0, 0, 2), (f"{GEMM}@a", C, 0, 3, 4), (f"{GEMM}@a", C, 0, 5, 6)]
    theirs = [(f"{GEMM}@a", C, 0, 0, 1), (f"{GEMM}@a", C, 0, 3, 6)]
    assert matched(mine, theirs) == [1, 3, None]
    assert matched(theirs, mine) == [2, 1]


def test_one_kernel_that_serves_two_collectives_is_not_the_same_call() -> None:
    generic = "ncclDevKernel_SendRecv"
    mine = dataclasses.replace(columns([(generic, M, 0, 0, 2), (generic, M, 0, 3, 7)]), collectives=("all_to_all",))
    theirs = dataclasses.replace(columns([(generic, M, 0, 0, 5)]), collectives=("send_recv",))
    calls, partners = Calls.of(mine), Calls.of(theirs)
    assert np.isnan(alone_ns(calls, every(calls), partners, every(partners))).all()


def test_steps_with_as_many_calls_are_partners_and_others_are_not() -> None:
    mine = [(GEMM, C, 0, 0, 2), (GEMM, C, 0, 3, 7)]
    theirs = [(GEMM, C, 0, 0, 1), (GEMM, C, 1, 10, 14), (GEMM, C, 1, 15, 18)]
    assert matched(mine, theirs) == [4, 3]


def test_a_call_without_the_like_matches_nothing() -> None:
    assert matched([(GEMM, C, 0, 0, 2), (NORM, C, 0, 3, 4)], [(NORM, C, 0, 0, 5)]) == [None, 5]
    assert matched([(GEMM, C, 0, 0, 2)], []) == [None]
    assert matched([], [(GEMM, C, 0, 0, 2)]) == []


def test_names_and_shapes_are_compared_as_texts_and_not_by_their_numbers() -> None:
    mine = [(f"{NORM}@x", C, 0, 0, 2), (f"{GEMM}@y", C, 0, 3, 7)]
    theirs = [(f"{GEMM}@y", C, 0, 0, 1), (f"{MINE}@x", C, 0, 2, 3), (f"{NORM}@x", C, 0, 3, 6)]
    assert matched(mine, theirs) == [3, 1]


def test_calls_that_are_not_wanted_are_no_partners_but_count_in_turn() -> None:
    calls = Calls.of(columns([(GEMM, C, 0, 0, 2), (GEMM, C, 0, 3, 7), (GEMM, C, 1, 10, 13), (GEMM, C, 1, 14, 20)]))
    wanted, others = np.array([False, True, False, False]), np.array([True, False, True, True])
    found = alone_ns(calls, wanted, calls, others)
    assert ms(found) == [None, 6, None, None]  # the second of its step, not the first that is wanted


def test_pieces_of_a_call_are_matched_together() -> None:
    rows = [("aten::linear", C, 0, 0, 1), ("aten::mm", C, 0, 1, 4), ("aten::linear", C, 0, 4, 6, 0)]
    theirs = [("aten::linear", C, 0, 0, 2), ("aten::mm", C, 0, 2, 4), ("aten::linear", C, 0, 4, 5, 0)]
    assert matched(rows, theirs) == [3, 2]


def profile(chance: random.Random, steps: int) -> list[Any]:
    """Calls of some kernels, a third of which vary from step to step, in the order of their steps."""
    rows: list[Any] = []
    for step in range(steps):
        for place in range(12):
            name, kind = chance.choice([(GEMM, C), (NORM, C), (MINE, C), (REDUCE, M), (GATHER, M)])
            if chance.random() < 0.7:
                name, kind = ((GEMM, C), (NORM, C), (REDUCE, M))[place % 3]
            start = 100 * step + chance.randrange(90)
            rows.append((f"{name}@{chance.randrange(2)}", kind, step, start, start + chance.randrange(12)))
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_calls_that_come_a_part_at_a_time_match_as_all_at_once(seed: int) -> None:
    chance = random.Random(seed)
    mine, theirs = (columns(profile(chance, steps)) for steps in (5, 4))
    calls, partners = Calls.of(mine), Calls.of(theirs)
    wanted, others = (np.array([chance.random() < 0.8 for _ in range(len(side))]) for side in (calls, partners))
    whole = alone_ns(calls, wanted, partners, others)
    sums = SameCalls(Labels(mine, theirs), 1)
    for steps in ((0, 1), (2,), (3,)):
        rows = np.flatnonzero(np.isin(theirs.step, steps))
        sums.add(Calls.of(theirs[rows]), others[rows])
    found = np.full(len(calls), np.nan)
    for steps in ((0,), (1, 2), (3, 4)):
        rows = np.flatnonzero(np.isin(mine.step, steps))
        found[rows] = sums.means_ns(Calls.of(mine[rows]), wanted[rows])[0]
    assert np.isfinite(whole).any()
    np.testing.assert_array_equal(found, whole)


def test_without_partners_no_call_has_a_match() -> None:
    calls = Calls.of(columns([(GEMM, C, 0, 0, 2)]))
    sums = SameCalls(Labels(calls.kernels, calls.kernels), 1)
    assert ms(sums.means_ns(calls, every(calls))[0]) == [None]
    sums.add(Calls.of(columns([])), np.zeros(0, dtype=bool))
    assert ms(sums.means_ns(calls, every(calls))[0]) == [None]


@given(st.lists(st.tuples(*[st.integers(-(2**62), 2**62) | st.integers(-1, 2)] * 3), max_size=12))
def test_rows_have_one_number_if_they_are_equal(rows: list[tuple[int, ...]]) -> None:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(3)]
    numbers = numbered(columns).tolist()
    assert [numbers.index(number) for number in numbers] == [rows.index(row) for row in rows]


# -- what a call is


def at(start: float, end: float) -> Intervals:
    return Intervals(np.array([round(start * MS) + EPOCH_NS]), np.array([round(end * MS) + EPOCH_NS]))


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
