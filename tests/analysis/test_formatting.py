from __future__ import annotations

import pytest

from overlap_callbacks.analysis import formatting
from overlap_callbacks.analysis.formatting import PAGE, PLAIN, Style
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.report.views.elements import drawn_value, line

N, M, D = formatting.NBSP, formatting.MINUS, formatting.DASH


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0.00"), (0.1234, "0.123"), (1.5, "1.50"), (123.46, "123.5"), (12345.6, "12,346"), (-0.5, f"{M}0.500")],
)
def test_on_the_page_milliseconds_have_some_four_digits_whatever_their_size(value: float, shown: str) -> None:
    assert PAGE.quantity(value, "ms") == f"{shown}{N}ms"


# A value in its unit, and how it is shown everywhere: tests/report/html/test_browser.py draws the same.
SHOWN = [
    (12345.678, "ms", "12346 ms"),
    (468.123, "ms", "468.1 ms"),
    (41.239, "ms", "41.24 ms"),
    (-0.0004, "ms", "0.000 ms"),
    (-0.5, "ms", "-0.500 ms"),
    (641.2, "W", "641 W"),
    (61.23, "W", "61.2 W"),
    (528.46, "J", "528.5 J"),
    (1695.4, "MHz", "1695 MHz"),
    (980.4, "MHz", "980 MHz"),
    (61.04, "GB/s", "61.04 GB/s"),
    (0.1234, "fraction", "12.3%"),
    (12.34, "fraction", "1234%"),
]


@pytest.mark.parametrize(("value", "unit", "shown"), SHOWN)
def test_a_figure_has_the_same_digits_in_every_medium(value: float, unit: str, shown: str) -> None:
    assert PLAIN.quantity(value, unit) == shown
    assert PAGE.quantity(value, unit).replace(N, " ").replace(M, "-").replace(",", "") == shown


def test_the_ends_of_an_interval_have_the_decimals_of_its_figure() -> None:
    assert (
        PLAIN.with_interval(Estimate(99.95, 99.1, 100.84, 8, 4), "ms") == "99.95 ms (95% interval 99.10 to 100.84 ms)"
    )
    assert PLAIN.with_interval(Estimate(1.01, 0.98, 1.04, 8, 4), "ms") == "1.01 ms (95% interval 0.98 to 1.04 ms)"


def test_the_cost_of_measuring_has_two_decimals_everywhere() -> None:
    assert PLAIN.share_of_training(0.00417) == PAGE.share_of_training(0.00417) == "0.42%"
    assert PLAIN.figure(figure_named("measurement_overhead"), 0.00417) == "0.42%"


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0012345, "0.00123"), (1.5, "1.50"), (42.0, "42.0"), (1234.5, "1234"), (0.0, "0")]
)
def test_figures_of_benchmarks_have_three_digits_whatever_their_size(value: float, shown: str) -> None:
    assert formatting.three_digits(value) == shown
    assert formatting.three_digits(value, PAGE).replace(",", "") == shown


@pytest.mark.parametrize(("style", "minus", "thousand"), [(PLAIN, "-", "1550"), (PAGE, M, "1,550")])
@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0621, "+6.2%"), (-0.0621, "-6.2%"), (0.0, "0.0%"), (-0.0001, "0.0%"), (0.0001, "0.0%"), (15.5, "+1550%")],
)
def test_changes_have_their_sign_unless_they_show_as_zero(
    style: Style, minus: str, thousand: str, value: float, shown: str
) -> None:
    assert style.percent(value, signed=True) == shown.replace("-", minus).replace("1550", thousand)


def test_an_interval_names_its_unit_once() -> None:
    times = Estimate(100.0, 95.0, 105.5, 8, 4)
    assert PAGE.interval(times, "ms") == f"95.0 to 105.5{N}ms"
    assert PLAIN.interval(times, "ms") == "95.0 to 105.5 ms"
    assert PAGE.interval(Estimate(0.1, -0.05, 0.25, 8, 4), "fraction", signed=True) == f"{M}5.0% to +25.0%"
    assert PAGE.interval(Estimate(0.1, None, None, 8, 4), "fraction") == ""


def test_a_figure_has_the_unit_and_the_sign_of_the_catalogue() -> None:
    estimate = Estimate(0.1, -0.05, 0.25, 8, 4)
    assert PLAIN.figure(figure_named("compute_slowdown"), 0.1) == "+10.0%"
    assert PLAIN.figure(figure_named("overlap_ratio"), 0.1) == "10.0%"
    assert PLAIN.figure(figure_named("exposed_comm_ms"), 0.1) == "0.100 ms"
    assert PLAIN.figure_interval(figure_named("compute_slowdown"), estimate) == "-5.0% to +25.0%"
    assert PLAIN.with_interval(estimate, "fraction", signed=True) == "+10.0% (95% interval -5.0% to +25.0%)"


def test_a_change_in_words_has_no_sign() -> None:
    assert formatting.change_in_words(0.062, "longer", "less") == "6.2% longer"
    assert formatting.change_in_words(-0.062, "longer", "less") == "6.2% less"


def test_numbers_that_follow_each_other_are_drawn_together() -> None:
    assert formatting.ranges([3, 1, 2, 7, 7, 9]) == f"1{D}3, 7, 9"
    assert formatting.ranges(range(0, 100, 2), max_ranges=2) == "0, 2, …"
    assert formatting.ranges([]) == ""


def test_text_of_the_page_keeps_its_lines_and_is_cut() -> None:
    assert formatting.page_text("a\x1b[31m\u202eb\ud800\u2028") == "a�[31m�b��"
    assert formatting.page_text("x" * 1000) == "x" * (formatting.MAX_TEXT - 1) + "…"
    assert formatting.page_text("tab\tand\nline") == "tab\tand\nline"


def test_a_plain_sentence_gets_true_minus_signs_on_the_page() -> None:
    sentence = "A/A, -1.5% to +2%, all-reduce, run-2"
    assert formatting.page_sentence(sentence) == f"A/A, {M}1.5% to +2%, all-reduce, run-2"
    assert formatting.page_sentence("2 ms for 13.5 MiB, 3 Bytes") == f"2{N}ms for 13.5{N}MiB, 3 Bytes"


def test_a_kernels_name_loses_what_all_of_torchs_kernels_share() -> None:
    name = "void at::native::(anonymous namespace)::softmax<c10::Half>(int)"
    assert formatting.short_kernel_name(name) == "softmax<Half>(int)"
    assert formatting.short_kernel_name("c10::") == "c10::"


def test_numbers_for_charts_are_short_and_never_nan() -> None:
    assert formatting.rounded(1 / 3) == 0.333333
    assert formatting.rounded(float("nan")) is None
    assert formatting.rounded(None) is None


# A figure, its unit, whether it is a change, the most that it can be as a part of the step, and its interval in words.
INTERVALS = [
    (Estimate(380.2, 1.7, 86274.0, 8, 4), "ms", False, None, "not resolved"),
    (Estimate(100.0, 60.0, 199.0, 8, 4), "ms", False, None, "60.0 to 199.0 ms"),
    (Estimate(100.0, 60.0, 201.0, 8, 4), "ms", False, None, "not resolved"),
    (Estimate(100.0, 0.0, 110.0, 8, 4), "W", False, None, "not resolved"),
    (Estimate(5000.0, 40.0, 9e9, 8, 4), "tokens/s", False, None, "not resolved"),
    (Estimate(21.0, -300.0, 342.0, 8, 4), "J", False, None, "not resolved"),
    (Estimate(0.5, 0.0, 1.5, 8, 4), "ms", False, 130.0, "0.000 to 1.500 ms"),
    (Estimate(0.5, 0.0, 140.0, 8, 4), "ms", False, 130.0, "not resolved"),
    (Estimate(0.3, 0.02, 0.9, 8, 4), "fraction", False, None, "2.0% to 90.0%"),
    (Estimate(0.5, 0.02, 0.98, 8, 4), "fraction", False, None, "not resolved"),
    (Estimate(0.2, -0.7, 1.2, 8, 4), "fraction", True, None, "-70.0% to +120.0%"),
    (Estimate(0.2, -0.97, 862.0, 8, 4), "fraction", True, None, "not resolved"),
    (Estimate(0.8, 0.5, 862.0, 8, 4), "fraction", True, None, "at least +50.0%"),
    (Estimate(8.0, 6.5, 9.6, 8, 4), "fraction", True, None, "+650.0% to +960.0%"),
    (Estimate(8.0, None, None, 8, 4), "fraction", True, None, ""),
]


@pytest.mark.parametrize(("figure", "unit", "signed", "most", "words"), INTERVALS)
def test_an_interval_that_says_nothing_has_no_ends(
    figure: Estimate, unit: str, signed: bool, most: float | None, words: str
) -> None:
    assert PLAIN.interval(figure, unit, signed=signed, most=most) == words
    assert formatting.says_nothing(figure, unit, signed=signed, most=most) is ("not" in words or "least" in words)


def test_an_interval_that_would_hide_a_charts_values_is_not_drawn() -> None:
    wide, narrow = Estimate(0.1, -0.9, 50.0, 8, 4), Estimate(0.1, -0.4, 0.6, 8, 4)
    assert drawn_value(wide) == [0.1, None, None]
    assert drawn_value(narrow) == [0.1, -0.4, 0.6]
    of_parts = line("exposed", "ink", [(1, 0, Estimate(0.5, 0.0, 9.0, 8, 4)), (2, 1, Estimate(80.0, 1.0, 9e4, 8, 4))])
    assert of_parts["points"] == [[1, 0, 0.5, 0.0, 9.0], [2, 1, 80.0, None, None]]


@pytest.mark.parametrize("length", [20, 24, 40, 59, 60, 61])
def test_a_shortened_message_keeps_its_code(length: int) -> None:
    text = "cut short: an exception in the user's step of training [OC311]"
    shown = formatting.shortened(text, length)
    assert len(shown) <= length
    assert shown.endswith("… [OC311]")
    assert text.startswith(shown.partition("…")[0])
    # Of several messages, the code is that of the one that is cut.
    two = formatting.shortened(f"first [OC101]; {text}; last [OC102]", length + 15)
    assert two.startswith("first [OC101]; ")
    assert two.endswith("… [OC311]")
    assert formatting.shortened("x" * 99, length) == "x" * (length - 1) + "…"
