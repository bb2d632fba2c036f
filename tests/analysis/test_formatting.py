from __future__ import annotations

import pytest

from overlap_callbacks.analysis import formatting
from overlap_callbacks.analysis.results.report import Estimate

N, M, D = formatting.NBSP, formatting.MINUS, formatting.DASH


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0.00"), (0.1234, "0.123"), (1.5, "1.50"), (123.46, "123.5"), (12345.6, "12,346"), (-0.5, f"{M}0.500")],
)
def test_milliseconds_have_some_four_digits_whatever_their_size(value: float, shown: str) -> None:
    assert formatting.milliseconds(value) == f"{shown}{N}ms"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0621, "+6.2%"), (-0.0621, f"{M}6.2%"), (0.0, "0.0%"), (-0.0001, "0.0%"), (0.0001, "0.0%"), (15.5, "+1,550%")],
)
def test_changes_have_their_sign_unless_they_show_as_zero(value: float, shown: str) -> None:
    assert formatting.percent(value, signed=True) == shown


def test_an_interval_names_its_unit_once() -> None:
    found = Estimate(100.0, 95.0, 105.5, 8, 4)
    assert formatting.interval(found, "ms") == f"95.00 to 105.5{N}ms"
    assert formatting.interval(Estimate(0.1, -0.05, 0.25, 8, 4), "fraction", signed=True) == f"{M}5.0% to +25.0%"
    assert formatting.interval(Estimate(0.1, None, None, 8, 4), "fraction") == ""


def test_numbers_that_follow_each_other_are_drawn_together() -> None:
    assert formatting.ranges([3, 1, 2, 7, 7, 9]) == f"1{D}3, 7, 9"
    assert formatting.ranges(range(0, 100, 2), most=2) == "0, 2, …"
    assert formatting.ranges([]) == ""


def test_text_that_could_act_stays_text() -> None:
    assert formatting.clean("a\x00b\x1b[31m\u202ec\ud800\u2028") == "a�b�[31m�c�\u2028"
    assert formatting.clean("x" * 1000) == "x" * (formatting.MAX_TEXT - 1) + "…"
    assert formatting.clean("tab\tand\nline") == "tab\tand\nline"


def test_a_sentence_of_the_terminal_gets_true_minus_signs() -> None:
    assert formatting.sentence("A/A, -1.5% to +2%, all-reduce, run-2") == f"A/A, {M}1.5% to +2%, all-reduce, run-2"


def test_numbers_for_charts_are_short_and_never_nan() -> None:
    assert formatting.rounded(1 / 3) == 0.333333
    assert formatting.rounded(float("nan")) is None
    assert formatting.rounded(None) is None
