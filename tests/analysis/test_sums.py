"""How structs and tables of ranks add up: by what their fields say."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.sums import Aggregate, add_aggregates, named_sum, of_lowest, struct_sum, table_sum


class Row(msgspec.Struct, frozen=True):
    name: str
    calls: int
    longest_ms: Annotated[float, max]


class Part(msgspec.Struct, frozen=True):
    complete: Annotated[bool, all]
    rows: Annotated[tuple[Row, ...], table_sum(Row, 1)]
    source: Annotated[tuple[int, str] | None, of_lowest] = None


def test_fields_add_up_by_their_ways_and_others_are_summed() -> None:
    one = Part(True, (Row("b", 1, 5.0), Row("a", 1, 2.0)), (3, "three"))
    other = Part(False, (Row("a", 2, 1.0),), (1, "one"))
    expected = Part(False, (Row("a", 3, 2.0), Row("b", 1, 5.0)), (1, "one"))
    assert struct_sum(Part)([one, other]) == struct_sum(Part)([other, one]) == expected


def test_a_table_keeps_its_first_rows_in_an_order_that_no_tree_changes() -> None:
    most = table_sum(Row, 1, order=lambda row: -row.calls, limit=2)
    rows = [Row("c", 2, 0.0), Row("b", 2, 0.0), Row("a", 1, 0.0), Row("a", 2, 0.0)]
    assert most([rows]) == most([rows[2:], rows[:2]]) == (Row("a", 3, 0.0), Row("b", 2, 0.0))
    assert table_sum(Row, 1, calls=min)([rows])[0] == Row("a", 1, 0.0)
    assert named_sum(max)([{"b": 1}, {"a": 2, "b": 3}]) == {"a": 2, "b": 3}


@pytest.mark.parametrize("seed", range(4))
def test_an_aggregate_is_that_of_all_values_whatever_the_tree(seed: int) -> None:
    chance = np.random.default_rng(seed)
    values = 1e6 + chance.normal(0, 1e-2, (60, 3)).round(2)
    values[chance.random((60, 3)) < 0.2] = np.nan
    parts = [Aggregate.of([rank], values[rank : rank + 1]) for rank in range(60)]
    cut = int(chance.integers(1, 59))
    found = add_aggregates([add_aggregates(parts[cut:]), add_aggregates(parts[:cut])])
    for of_one, (number, total, squares, low, low_rank, high, high_rank) in zip(values.T, found.columns, strict=True):
        known = of_one[~np.isnan(of_one)]
        assert (number, low, high) == (len(known), known.min(), known.max())
        assert (low_rank, high_rank) == (np.nanargmin(of_one), np.nanargmax(of_one))
        assert (total, squares) == pytest.approx((known.sum(), known.var() * len(known)), rel=1e-4)


def test_ranks_that_are_equal_do_not_spread() -> None:
    (column,) = add_aggregates([Aggregate.of([rank], np.array([[0.1]])) for rank in range(7)]).columns
    assert column[2:] == (0.0, 0.1, 0.0, 0.1, 0.0)


def test_means_of_equal_values_that_rounding_made_differ_do_not_spread() -> None:
    one, *three = [Aggregate.of([rank], np.array([[0.1]])) for rank in range(4)]
    merged = add_aggregates(three)
    assert merged.columns[0][1] / 3 != 0.1
    (column,) = add_aggregates([one, merged]).columns
    assert column[2] == 0.0
