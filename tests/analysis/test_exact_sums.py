from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlap_callbacks.analysis.exact_sums import sum_of, sums_by

# Sums of a few of these do not fit into 64 bits, nor are they whole in a floating-point number.
values = st.integers(-(2**62), 2**62)


@given(st.lists(st.tuples(st.integers(0, 4), values), max_size=20))
def test_sums_are_those_of_whole_numbers_of_any_size(rows):
    group, of_group = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
    assert sum_of(of_group) == sum(value for _, value in rows)
    expected = [sum(value for number, value in rows if number == wanted) for wanted in range(6)]
    assert sums_by(group, of_group, 6) == expected
