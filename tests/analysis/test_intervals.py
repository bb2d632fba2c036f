from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_callbacks.analysis.intervals import Intervals, self_segments, sum_of, sums_by

Pairs = list[tuple[int, int]]

# A profile's times: nanoseconds since 1970. A float has 53 bits and is good to 256 ns there.
NOW_NS = 1_755_000_000_123_456_789


def intervals(pairs: Pairs, offset: int = 0) -> Intervals:
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 2) + offset
    return Intervals(columns[:, 0], columns[:, 1])


def pairs_of(found: Intervals) -> Pairs:
    return list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True))


def nanoseconds(pairs: Pairs) -> set[int]:
    """Every whole nanosecond that some interval covers."""
    return {time for start, end in pairs for time in range(start, end)}


# A small range, so that touching, nested, equal, empty and inverted intervals are common.
any_pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)
offsets = st.sampled_from([0, -20, NOW_NS])


# -- sets of points


@given(any_pairs, offsets)
def test_a_union_covers_the_same_points_by_disjoint_ascending_intervals(pairs, offset):
    union = pairs_of(intervals(pairs, offset).union())
    assert nanoseconds(union) == {time + offset for time in nanoseconds(pairs)}
    bounds = [bound for pair in union for bound in pair]
    assert bounds == sorted(set(bounds))  # strictly ascending: none is empty, none touches the next


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 3)), max_size=16), offsets)
def test_the_unions_of_groups_are_those_of_each_on_its_own(rows, offset):
    group = np.array([row[2] for row in rows], dtype=np.int64)
    found, of_group = intervals([row[:2] for row in rows], offset).union_by(group)
    for number in range(4):
        own = intervals([row[:2] for row in rows if row[2] == number], offset).union()
        assert pairs_of(found[of_group == number]) == pairs_of(own)
    assert of_group.tolist() == sorted(of_group.tolist())


@given(any_pairs, any_pairs, offsets)
def test_an_intersection_covers_the_points_of_both_by_disjoint_ascending_intervals(mine, theirs, offset):
    found = pairs_of(intervals(mine, offset).intersection(intervals(theirs, offset)))
    assert nanoseconds(found) == {time + offset for time in nanoseconds(mine) & nanoseconds(theirs)}
    bounds = [bound for pair in found for bound in pair]
    assert bounds == sorted(set(bounds))


@given(any_pairs, offsets)
def test_busy_time_counts_each_point_once_and_the_sum_counts_it_for_each_interval(pairs, offset):
    found = intervals(pairs, offset)
    assert found.busy_ns == len(nanoseconds(pairs))
    assert found.sum_ns == sum(end - start for start, end in pairs)
    assert found.durations_ns.tolist() == [end - start for start, end in pairs]


@given(any_pairs, any_pairs, offsets)
def test_cover_of_each_interval_is_the_number_of_its_points_that_the_others_hold(pairs, others, offset):
    covered = intervals(pairs, offset).covered_ns(intervals(others, offset))
    assert covered.tolist() == [len(nanoseconds([pair]) & nanoseconds(others)) for pair in pairs]


@given(any_pairs, any_pairs, offsets)
def test_shared_time_is_the_number_of_points_in_both(pairs, others, offset):
    first, second = intervals(pairs, offset), intervals(others, offset)
    shared = first.union().covered_ns(second).sum()
    assert shared == len(nanoseconds(pairs) & nanoseconds(others))
    assert second.union().covered_ns(first).sum() == shared


def test_by_hand_touching_nested_empty_and_inverted_intervals():
    found = intervals([(40, 50), (0, 10), (10, 15), (2, 4), (30, 30), (38, 36), (45, 60)])
    assert pairs_of(found.union()) == [(0, 15), (40, 60)]
    assert found.busy_ns == 15 + 20
    #              a half-covered one, one across the gap, one in the gap, an inverted one, an empty one
    probes = intervals([(10, 20), (12, 42), (20, 40), (45, 5), (3, 3)])
    assert probes.covered_ns(found).tolist() == [5, 3 + 2, 0, 0, 0]


def test_times_of_today_lose_no_nanosecond():
    found = intervals([(0, 3), (2, 5), (7, 8)], NOW_NS)
    assert pairs_of(found.union()) == [(NOW_NS, NOW_NS + 5), (NOW_NS + 7, NOW_NS + 8)]
    assert found.busy_ns == 6
    assert intervals([(4, 8)], NOW_NS).covered_ns(found).tolist() == [1 + 1]
    assert found.union().start_ns.dtype == np.int64


def test_nothing_covers_and_is_covered_by_nothing():
    empty, some = Intervals.empty(), intervals([(0, 5)])
    assert len(empty) == 0
    assert empty.sum_ns == empty.busy_ns == 0
    assert pairs_of(empty.union()) == []
    assert some.covered_ns(empty).tolist() == [0]
    assert empty.covered_ns(some).tolist() == []
    assert empty.covered_ns(some).sum() == some.covered_ns(empty).sum() == 0


def test_rows_are_chosen_by_mask_and_by_index():
    found = intervals([(0, 1), (2, 4), (5, 9)])
    assert len(found) == 3
    assert pairs_of(found[np.array([True, False, True])]) == [(0, 1), (5, 9)]
    assert pairs_of(found[np.array([2, 0])]) == [(5, 9), (0, 1)]


def test_nothing_that_is_given_is_changed():
    pairs = [(5, 9), (0, 6), (3, 3)]
    found = intervals(pairs)
    found.union(), found.covered_ns(found), self_segments(intervals([(0, 6), (1, 2)]))
    assert pairs_of(found) == pairs


# -- thinned to a bounded number


@given(any_pairs, st.integers(1, 8), offsets)
def test_thinned_intervals_are_few_and_cover_the_union_from_its_first_start_to_its_last_end(pairs, most, offset):
    union, thin = (
        pairs_of(found) for found in (intervals(pairs, offset).union(), intervals(pairs, offset).thinned(most))
    )
    assert len(thin) == min(most, len(union))
    assert all(any(low <= start and end <= high for low, high in thin) for start, end in union)
    if union:
        assert (thin[0][0], thin[-1][1]) == (union[0][0], union[-1][1])
    bounds = [bound for pair in thin for bound in pair]
    assert bounds == sorted(set(bounds))


@given(any_pairs, st.integers(1, 8))
def test_thinning_closes_the_smallest_gaps_and_leaves_the_largest_as_they_are(pairs, most):
    union, thin = (pairs_of(found) for found in (intervals(pairs).union(), intervals(pairs).thinned(most)))
    gaps = [(end, start) for (_, end), (start, _) in itertools.pairwise(union)]
    left = [(end, start) for (_, end), (start, _) in itertools.pairwise(thin)]
    assert set(left) <= set(gaps)
    lengths = sorted((start - end for end, start in gaps), reverse=True)
    assert sorted((start - end for end, start in left), reverse=True) == lengths[: max(most, 1) - 1]


def test_thinning_by_hand():
    found = intervals([(40, 50), (0, 10), (12, 20), (21, 30), (55, 60)])
    assert pairs_of(found.thinned(9)) == pairs_of(found.union())
    assert pairs_of(found.thinned(3)) == [(0, 30), (40, 50), (55, 60)]
    assert pairs_of(found.thinned(2)) == [(0, 30), (40, 60)]
    assert pairs_of(found.thinned(1)) == [(0, 60)]
    assert pairs_of(Intervals.empty().thinned(1)) == []


@pytest.mark.parametrize("most", [0, -1])
def test_thinning_to_nothing_is_refused(most):
    with pytest.raises(ValueError, match="max_intervals must be at least 1"):
        intervals([(0, 1)]).thinned(most)


# -- self time


@st.composite
def nested_calls(draw):
    """Calls of one thread as (start, end), each within its caller; many begin or end at the same instant."""
    calls: Pairs = []

    def fill(low: int, high: int, depth: int) -> None:
        time = low
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(time, high))
            end = draw(st.integers(start, high))
            calls.append((start, end))
            if depth < 3:
                fill(start, end, depth + 1)
            time = end

    fill(0, 12, 0)
    return draw(st.permutations(calls))


def innermost_by_stack(calls: Pairs) -> dict[int, tuple[int, int]]:
    """For each nanosecond, the call (as a pair) that is on top of the stack then.

    Properly nested calls that hold the same nanosecond are each other's callers, so the top is the shortest. Equal
    calls cannot be told apart; the pair stands for either.
    """
    top: dict[int, tuple[int, int]] = {}
    for call in sorted(calls, key=lambda call: call[0] - call[1]):  # longest first; a shorter one is pushed on top
        top.update(dict.fromkeys(range(*call), call))
    return top


@given(nested_calls(), offsets)
def test_each_nanosecond_belongs_to_the_call_on_top_of_the_stack(calls, offset):
    pieces, owner = self_segments(intervals(calls, offset))
    found: dict[int, tuple[int, int]] = {}
    for (start, end), row in zip(pairs_of(pieces), owner, strict=True):
        for time in range(start - offset, end - offset):
            assert time not in found, "pieces overlap"
            found[time] = calls[row]
    assert found == innermost_by_stack(calls)


@given(nested_calls(), offsets)
def test_pieces_ascend_and_none_is_empty(calls, offset):
    pieces, owner = self_segments(intervals(calls, offset))
    assert len(pieces) == len(owner)
    bounds = [bound for pair in pairs_of(pieces) for bound in pair]
    assert bounds == sorted(bounds)
    assert (pieces.durations_ns > 0).all()


@given(nested_calls())
def test_pieces_add_up_to_the_time_less_that_of_the_direct_calls(calls):
    calls = sorted(set(calls))  # of equal calls either may be the caller
    pieces, owner = self_segments(intervals(calls))
    self_ns = np.bincount(owner, weights=pieces.durations_ns, minlength=len(calls))
    for row, (start, end) in enumerate(calls):
        inner = nanoseconds([c for c in calls if c != (start, end) and start <= c[0] and c[1] <= end])
        assert self_ns[row] == end - start - len(inner & nanoseconds([(start, end)]))


def test_self_time_by_hand():
    #        0: f            1: g in f   2: h in g   3: a second call in f   4: after f
    calls = intervals([(0, 100), (10, 40), (20, 30), (40, 60), (120, 130)])
    pieces, owner = self_segments(calls)
    assert list(zip(pairs_of(pieces), owner.tolist(), strict=True)) == [
        ((0, 10), 0),
        ((10, 20), 1),
        ((20, 30), 2),
        ((30, 40), 1),
        ((40, 60), 3),
        ((60, 100), 0),
        ((120, 130), 4),
    ]


def test_calls_that_share_their_caller_s_bounds_take_its_time():
    pieces, owner = self_segments(intervals([(0, 10), (0, 4), (6, 10)]))
    assert list(zip(pairs_of(pieces), owner.tolist(), strict=True)) == [((0, 4), 1), ((4, 6), 0), ((6, 10), 2)]


def test_calls_of_no_length_take_no_time_and_cut_nothing_off():
    calls = intervals([(0, 10), (5, 5), (10, 10), (0, 0), (12, 12)])
    pieces, owner = self_segments(calls)
    assert set(owner.tolist()) == {0}
    assert pieces.sum_ns == pieces.busy_ns == 10


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_one_of_two_equal_calls_takes_the_time_and_neither_a_later_one(order):
    # As where one operator does nothing but call another, and the clock is coarse.
    calls = [[(0, 10), (0, 10), (20, 30)][row] for row in order]
    pieces, owner = self_segments(intervals(calls))
    assert [(pair, calls[row]) for pair, row in zip(pairs_of(pieces), owner, strict=True)] == [
        ((0, 10), (0, 10)),
        ((20, 30), (20, 30)),
    ]


def test_after_two_equal_calls_time_is_their_caller_s():
    calls = [(0, 100), (10, 20), (10, 20)]
    pieces, owner = self_segments(intervals(calls))
    assert [(pair, calls[row]) for pair, row in zip(pairs_of(pieces), owner, strict=True)] == [
        ((0, 10), (0, 100)),
        ((10, 20), (10, 20)),
        ((20, 100), (0, 100)),
    ]


def test_no_calls_have_no_pieces():
    pieces, owner = self_segments(Intervals.empty())
    assert len(pieces) == len(owner) == 0
    pieces, owner = self_segments(intervals([(3, 3)]))
    assert len(pieces) == len(owner) == 0


def test_a_deep_stack_of_times_of_today():
    depth = 40
    calls = [(level, 1000 - level) for level in range(depth)]
    pieces, owner = self_segments(intervals(calls, NOW_NS))
    self_ns = np.bincount(owner, weights=pieces.durations_ns, minlength=depth)
    # One nanosecond before and one after the next call in; the innermost has all of its own.
    assert self_ns.tolist() == [2] * (depth - 1) + [1000 - 2 * (depth - 1)]


# Sums of a few of these do not fit into 64 bits, nor are they whole in a floating-point number.
values = st.integers(-(2**62), 2**62)


@given(st.lists(st.tuples(st.integers(0, 4), values), max_size=20))
def test_sums_are_those_of_whole_numbers_of_any_size(rows):
    group, of_group = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
    assert sum_of(of_group) == sum(value for _, value in rows)
    expected = [sum(value for number, value in rows if number == wanted) for wanted in range(6)]
    assert sums_by(group, of_group, 6) == expected
