from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_callbacks.analysis.kernels.call_table import Calls
from overlap_callbacks.analysis.kernels.same_calls import (
    IN_ORDER,
    IN_TURN,
    SAME_LAUNCH,
    Labels,
    SameCalls,
    match,
    numbered,
)
from overlap_callbacks.analysis.kernels.table import Kind
from tests.columns import GATHER, GEMM, MINE, MS, NORM, REDUCE, columns, every

C, M, Y = Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY


def ms(nanoseconds: Any) -> list[float]:
    return [None if np.isnan(ns) else ns / MS for ns in nanoseconds.tolist()]  # type: ignore[misc]


def matched(mine: Sequence[Any], theirs: Sequence[Any], **options: Any) -> tuple[list[float], list[bool]]:
    """Partners' times of calls, ms, and which of the partners were used."""
    calls, partners = Calls.of(columns(mine)), Calls.of(columns(theirs))
    found = match(calls, every(calls), partners, every(partners), **options)
    return ms(found.alone_ns), found.used.tolist()


def test_no_calls_match_nothing() -> None:
    calls = Calls.of(columns([]))
    assert match(calls, every(calls), calls, every(calls)).alone_ns.tolist() == []


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


@pytest.mark.parametrize("levels", [IN_ORDER, IN_TURN, SAME_LAUNCH])
@pytest.mark.parametrize("seed", range(8))
def test_calls_that_come_a_part_at_a_time_match_as_all_at_once(seed: int, levels: Any) -> None:
    chance = random.Random(seed)
    mine, theirs = (columns(profile(chance, steps)) for steps in (5, 4))
    calls, partners = Calls.of(mine), Calls.of(theirs)
    wanted, others = (np.array([chance.random() < 0.8 for _ in range(len(side))]) for side in (calls, partners))
    whole = match(calls, wanted, partners, others, levels).alone_ns
    sums = SameCalls(Labels(mine, theirs), 1, levels)
    for steps in ((0, 1), (2,), (3,)):
        rows = np.flatnonzero(np.isin(theirs.step, steps))
        sums.add(Calls.of(theirs[rows]), others[rows])
    found = np.full(len(calls), np.nan)
    for steps in ((0,), (1, 2), (3, 4)):
        rows = np.flatnonzero(np.isin(mine.step, steps))
        found[rows] = sums.alone_ns(Calls.of(mine[rows]), wanted[rows])
    assert np.isfinite(whole).any()
    np.testing.assert_array_equal(found, whole)


def test_without_partners_no_call_has_a_match() -> None:
    calls = Calls.of(columns([(GEMM, C, 0, 0, 2)]))
    sums = SameCalls(Labels(calls.kernels, calls.kernels), 1)
    assert ms(sums.alone_ns(calls, every(calls))) == [None]
    sums.add(Calls.of(columns([])), np.zeros(0, dtype=bool))
    assert ms(sums.alone_ns(calls, every(calls))) == [None]


@given(st.lists(st.tuples(*[st.integers(-(2**62), 2**62) | st.integers(-1, 2)] * 3), max_size=12))
def test_rows_have_one_number_if_they_are_equal(rows: list[tuple[int, ...]]) -> None:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(3)]
    numbers = numbered(columns).tolist()
    assert [numbers.index(number) for number in numbers] == [rows.index(row) for row in rows]
