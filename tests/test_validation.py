from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from overlap_callbacks import _validation


@pytest.mark.parametrize("value", [0, 7, np.int32(7), np.int64(0), np.uint8(255)])
def test_whole_numbers_of_any_integer_type_become_plain_ints(value):
    found = _validation.count("repeats", value, minimum=0)
    assert type(found) is int
    assert found == value


def test_the_minimum_itself_is_allowed():
    assert _validation.count("repeats", 3, minimum=3) == 3


@pytest.mark.parametrize(
    ("value", "kind"), [(True, "bool"), (2.0, "float"), ("2", "str"), (None, "NoneType"), ([2], "list")]
)
def test_an_invalid_count_is_refused_by_name_value_and_type(value, kind):
    message = f"repeats must be a whole number of at least 1, got {value!r} (a {kind})"
    with pytest.raises(TypeError, match=re.escape(message)):
        _validation.count("repeats", value, minimum=1)


@pytest.mark.parametrize("value", [np.True_, np.array(True), torch.tensor(True), np.float64(2.0), math.nan])
def test_other_libraries_booleans_and_floats_are_refused_too(value):
    with pytest.raises(TypeError, match="repeats must be a whole number of at least 1, got"):
        _validation.count("repeats", value, minimum=1)


class OldBool:
    """``numpy.bool_`` before NumPy 2.3, which passes for an index."""

    dtype = np.dtype(bool)

    def __index__(self) -> int:
        return 1


def test_a_boolean_of_an_older_numpy_is_refused_though_it_passes_for_an_index():
    assert [10, 11][OldBool()] == 11
    with pytest.raises(TypeError, match=r"repeats must be a whole number of at least 1, got .* \(a OldBool\)"):
        _validation.count("repeats", OldBool(), minimum=1)


@pytest.mark.parametrize("value", [0, -1, np.int64(-5)])
def test_a_count_below_its_minimum_is_refused_with_both_numbers(value):
    with pytest.raises(ValueError, match=f"^repeats must be at least 1, got {int(value)}$"):
        _validation.count("repeats", value, minimum=1)


def test_numbers_that_no_record_or_wait_takes_are_refused():
    with pytest.raises(ValueError, match="repeats must be at most 9007199254740992, got"):
        _validation.count("repeats", 10**20, minimum=1)
    for check in (_validation.seconds, _validation.positive, _validation.fraction):
        with pytest.raises(ValueError, match="timeout must be a"):
            check("timeout", 10**400)
    with pytest.raises(ValueError, match=r"timeout must be at most 1e\+09 seconds, got 10000000000.0"):
        _validation.seconds("timeout", 1e10)


@pytest.mark.parametrize("value", [np.True_, np.array(True), torch.tensor(True), True])
def test_booleans_of_other_libraries_are_flags(value):
    assert _validation.flag("strict", value) is True
    with pytest.raises(TypeError, match="strict must be True or False"):
        _validation.flag("strict", np.array([True]))


@pytest.mark.parametrize("value", [1, 0.25, 1e-9, np.float64(3.5)])
def test_positive_seconds_become_plain_floats(value):
    found = _validation.seconds("timeout", value)
    assert type(found) is float
    assert found == value


@pytest.mark.parametrize(("value", "kind"), [(True, "bool"), ("5", "str"), (None, "NoneType"), (1j, "complex")])
def test_an_invalid_number_of_seconds_is_refused_by_name_value_and_type(value, kind):
    message = f"timeout must be a positive number of seconds, got {value!r} (a {kind})"
    with pytest.raises(TypeError, match=re.escape(message)):
        _validation.seconds("timeout", value)


@pytest.mark.parametrize("value", [0, 0.0, -1.5, math.inf, -math.inf, math.nan])
def test_seconds_that_are_not_positive_and_finite_are_refused(value):
    message = f"timeout must be a positive, finite number of seconds, got {value!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        _validation.seconds("timeout", value)


def test_zero_seconds_pass_where_they_are_allowed():
    assert _validation.seconds("timeout", 0, zero=True) == 0
    assert _validation.seconds("timeout", 1.5, zero=True) == 1.5
    for value in (-1, math.inf, math.nan):
        with pytest.raises(ValueError, match="timeout must be a finite number of seconds of at least 0"):
            _validation.seconds("timeout", value, zero=True)
