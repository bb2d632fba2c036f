"""The settled difference: steps whose times follow the mode with a memory, and what the fit says of them."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import settled as bench
from overlap_callbacks.analysis.figures import figures_of
from overlap_callbacks.analysis.headline import settled_in_words
from overlap_callbacks.analysis.results.settled import Settled, StepSeries, Verdict
from overlap_callbacks.analysis.results.window import Rhythm
from overlap_callbacks.analysis.settled import SettledFit, StepSums
from overlap_callbacks.analysis.statistics import ONE_LOOK
from tests import samples

SHORT = 0.05


def fitted(memory: str, num_windows: int, *, seed: int = 1, rhythm: Rhythm | None = None, **changed: float) -> Settled:
    """The settled difference of windows as the benchmark makes them.

    Args:
        memory: key of ``bench.MEMORIES``.
        num_windows: how many.
        seed: of their noise.
        rhythm: steps that take longer.
        changed: by the number of a step after ``step``, its time times so much.
    """
    rng, fit = np.random.default_rng(seed), SettledFit()
    for number in range(num_windows):
        series = bench.window(rng, number, memory, 0.0, long=True).series
        assert series is not None
        times_ms = np.array(series.step_ms)
        first = 500 * number
        if rhythm is not None:
            times_ms[rhythm.hits(np.arange(first, first + len(times_ms)))] *= 1 + rhythm.extra_ms / rhythm.step_ms
        for step, factor in changed.items():
            times_ms[int(step.removeprefix("step"))] *= factor
        fit.add(StepSeries(first, tuple(times_ms.tolist()), series.modes), SHORT, () if rhythm is None else (rhythm,))
    found = fit.result()
    assert found is not None
    return found


def test_a_difference_with_one_time_constant_is_reported_at_its_settled_value() -> None:
    found = fitted("3", 12)
    assert found.verdict is Verdict.SETTLED
    assert found.ci_low < bench.TRUTH < found.ci_high
    assert found.value == pytest.approx(bench.TRUTH, abs=0.01)
    assert 2 <= found.constant_steps <= 5
    assert (found.short, found.short_steps, found.num_windows) == (pytest.approx(SHORT), 3, 12)


def test_without_memory_the_short_blocks_say_it() -> None:
    assert fitted("none", 12).verdict is Verdict.SHORT


@pytest.mark.parametrize("memory", ["10", "40", "1 and 20", f"ramp of {bench.RAMP_STEPS}"])
def test_a_difference_that_is_not_constant_is_not_settled(memory: str) -> None:
    found = fitted(memory, 40)
    assert found.verdict is Verdict.NOT_SETTLED
    assert found.at_least is not None
    assert 0 < found.at_least <= bench.TRUTH
    assert found.after_steps >= bench.BESIDE


def after_one_window(memory: str, correlation: float, seed: int) -> Settled:
    """The settled difference after a window without long blocks."""
    fit = SettledFit()
    series = bench.window(np.random.default_rng(seed), 0, memory, correlation, long=False).series
    assert series is not None
    fit.add(series, SHORT)
    found = fit.result()
    assert found is not None
    return found


@pytest.mark.parametrize(("memory", "correlation"), [(f"ramp of {bench.RAMP_STEPS}", 0.0), ("10", 0.9), ("3", 0.9)])
def test_a_response_in_a_straight_line_and_noise_that_lasts_are_covered(memory: str, correlation: float) -> None:
    found = [after_one_window(memory, correlation, seed) for seed in range(32)]
    assert sum(each.ci_low <= bench.TRUTH <= each.ci_high for each in found) >= 31


@pytest.mark.parametrize(("memory", "correlation"), [("3", 0.0), ("3", 0.5), ("none", 0.0)])
def test_an_interval_for_all_looks_holds_after_each_window(memory: str, correlation: float) -> None:
    told = bench.told_of(np.random.default_rng(1), 1, memory, correlation, looks=12)
    assert list(told) == list(range(1, 13))
    for windows, [(settled, _)] in told.items():
        interval = settled.estimate
        assert (interval.ci_low, interval.ci_high) == (settled.all_looks_low, settled.all_looks_high)
        assert interval.ci_low is not None
        assert interval.ci_high is not None
        assert interval.ci_low < settled.ci_low < settled.ci_high < interval.ci_high
        assert bench.holds(interval)
        one, all_looks = (
            math.log1p(high) - math.log1p(low)
            for low, high in ((settled.ci_low, settled.ci_high), (interval.ci_low, interval.ci_high))
        )
        assert windows == 2 or all_looks < 2.5 * one  # two windows have three degrees of freedom
    assert bench.judged_at_all_looks(told)["wrong_where_settled"] == 0


@pytest.mark.parametrize("long", [False, True])
def test_runs_of_the_benchmark_are_those_of_the_library(long: bool) -> None:
    rng, fit, sums = np.random.default_rng(1), SettledFit(), StepSums.zeros(2)
    figures = []
    for number in range(3):
        own = bench.window(rng, number, "3", 0.5, long)
        assert own.series is not None
        figure = figures_of([own])["speedup_vs_sequential"]
        fit.add(own.series, figure.value)
        log_times = np.log(np.array([np.ones(len(own.series.modes)), own.series.step_ms]))
        log_times[0] += rng.normal(0, 0.02, log_times.shape[1])
        new = bench.windows_of(own.series.modes, log_times)
        sums = sums.plus(new.sums)
        figures.append(new[1:])
        assert np.expm1(new.short[1]) == pytest.approx(figure.value)
        assert (new.error[1], new.degrees[1]) == pytest.approx(
            (figure.standard_error, figure.degrees_of_freedom), rel=1e-5
        )
    found, of_many = fit.result(), bench.told_of_sums(sums, np.array(figures), ONE_LOOK)[1].settled
    assert found is not None
    names = ("value", "ci_low", "ci_high", "all_looks_low", "all_looks_high", "short", "constant_steps")
    assert [getattr(of_many, name) for name in names] == pytest.approx([getattr(found, name) for name in names])
    assert of_many.verdict is found.verdict


def test_a_difference_that_shrinks_has_no_least() -> None:
    rng, fit = np.random.default_rng(1), SettledFit()
    for number in range(40):
        series = bench.window(rng, number, "40", 0.0, long=True).series
        assert series is not None
        at_once = np.array([1.2 if mode == "S" else 1.0 for mode in series.modes])
        # From +20 % at once to +9 % in the long run.
        times_ms = 100.0 * at_once * (100.0 / np.array(series.step_ms))
        fit.add(StepSeries(0, tuple(times_ms.tolist()), series.modes), SHORT)
    found = fit.result()
    assert found is not None
    assert found.verdict is Verdict.NOT_SETTLED
    assert found.at_least is None


def test_a_rhythm_that_is_known_is_taken_out() -> None:
    rhythm = Rhythm(6, 2, 9.0, 100.0)  # less than what is left out by its size
    plain, beating = fitted("3", 8), fitted("3", 8, rhythm=rhythm)
    assert beating.value == pytest.approx(plain.value, abs=0.01)
    assert beating.ci_high - beating.ci_low < 1.3 * (plain.ci_high - plain.ci_low)


def test_a_step_with_a_checkpoint_does_not_count() -> None:
    plain, stalled = fitted("3", 4), fitted("3", 4, step40=30.0)
    assert stalled.num_steps == plain.num_steps - 4
    assert stalled.value == pytest.approx(plain.value, abs=0.01)


def widths_with_a_spell(steps: int, factor: float) -> tuple[float, float]:
    """The width of the interval without, and with so many slow steps at the start of a long sequential block."""
    series = bench.window(np.random.default_rng(1), 1, "3", 0.0, long=True).series
    assert series is not None
    first = series.modes.index("S" * bench.LONG_STEPS)
    plain, stalled = (
        fitted("3", 1, **({} if not slow else {f"step{first + step}": factor for step in range(slow)}))
        for slow in (0, steps)
    )
    assert plain.num_steps - stalled.num_steps == steps
    assert stalled.value == pytest.approx(plain.value, abs=0.015)
    return plain.all_looks_high - plain.all_looks_low, stalled.all_looks_high - stalled.all_looks_low  # type: ignore[operator]


@pytest.mark.parametrize(("steps", "factor"), [(1, 50.0), (6, 1.6), (10, 20.0), (12, 1.3), (15, 20.0)])
def test_slow_steps_in_a_row_do_not_count(steps: int, factor: float) -> None:
    plain, stalled = widths_with_a_spell(steps, factor)
    assert stalled < 1.5 * plain


def test_with_stalls_the_settled_difference_is_right_all_the_same() -> None:
    told = bench.told_of(np.random.default_rng(1), 40, "3", 0.0, stalls=True)
    assert bench.judged([each for runs in told.values() for each in runs])["right"] >= bench.GOAL_RIGHT


def test_an_extrapolated_value_does_not_make_its_own_interval_narrow() -> None:
    """A run without room for long blocks: 34 % longer in blocks of three steps, and 401 % by the fit."""
    found = Settled(4.01, -0.167, 13.69, 0.34, 3, 50.0, Verdict.SETTLED, None, 6, 240, 5, -0.76, 25.6)
    assert not found.resolved
    narrow = {"ci_low": 2.0, "ci_high": 7.0, "all_looks_low": 1.8, "all_looks_high": 7.5}
    assert msgspec.structs.replace(found, **narrow).resolved
    assert not msgspec.structs.replace(found, **(narrow | {"all_looks_high": 12.0})).resolved


def test_steps_that_do_not_count_say_what_the_mode_was_and_no_more() -> None:
    rng = np.random.default_rng(1)
    series = bench.window(rng, 0, "3", 0.0, long=True).series
    assert series is not None
    modes = series.modes[:40] + series.modes[40:43].lower() + series.modes[43:]
    times_ms = (*series.step_ms[:40], 1e9, 0.0, 1.0, *series.step_ms[43:])
    fit = SettledFit()
    fit.add(msgspec.structs.replace(series, step_ms=times_ms, modes=modes), SHORT)
    found = fit.result()
    assert found is not None
    assert found.num_steps == len(modes) - 4
    assert found.ci_low < bench.TRUTH < found.ci_high


@pytest.mark.parametrize("modes", ["", "OOOO", "SSSS", "OS", "oOsS", "OOSS"])
def test_too_little_says_nothing(modes: str) -> None:
    fit = SettledFit()
    fit.add(StepSeries(0, tuple(100.0 + step for step in range(len(modes))), modes), SHORT)
    assert fit.result() is None


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("OSos"), st.floats(0.01, 1e4)), min_size=1, max_size=40),
        min_size=1,
        max_size=3,
    )
)
@example([[(mode, time_ms) for mode, time_ms in zip("OSOSOSOSSOSOSOSO" * 2, [20.0, 20.1] * 16, strict=True)]])
@example([[("O", 5.0), ("S", 6.0), ("S", 6.2), ("O", 5.1), ("O", 5.3), ("S", 6.1), ("O", 5.2), ("O", 1e4)]])
def test_whatever_the_steps_it_says_a_possible_value_or_nothing(windows: list[list[tuple[str, float]]]) -> None:
    fit = SettledFit()
    for number, steps in enumerate(windows):
        times_ms, modes = tuple(time_ms for _, time_ms in steps), "".join(mode for mode, _ in steps)
        fit.add(StepSeries(500 * number, times_ms, modes), SHORT)
    if found := fit.result():
        assert found.ci_low <= found.ci_high
        assert settled_in_words(found)


@pytest.mark.parametrize("name", ["value", "ci_low", "ci_high", "short", "at_least", "all_looks_low", "all_looks_high"])
@pytest.mark.parametrize("impossible", [-1.0, -3.0, math.inf, math.nan])
def test_a_step_cannot_take_less_than_no_time(name: str, impossible: float) -> None:
    found = fitted("3", 2)
    with pytest.raises(ValueError, match="a step cannot take"):
        msgspec.structs.replace(found, **{name: impossible})


def test_times_without_noise_say_nothing() -> None:
    fit = SettledFit()
    modes = "OOO" * 8 + "SSSOOO" * 8
    fit.add(StepSeries(0, tuple([100.0] * len(modes)), modes), SHORT)
    assert fit.result() is None


def test_a_long_run_takes_the_memory_of_a_short_one() -> None:
    def size(num_windows: int) -> int:
        fit, rng = SettledFit(), np.random.default_rng(1)
        for number in range(num_windows):
            series = bench.window(rng, number, "3", 0.0, long=True).series
            assert series is not None
            fit.add(series, SHORT)
        sums, *others = vars(fit).values()
        assert isinstance(sums, StepSums)
        return sum(part.nbytes for part in sums) + sum(len(str(part)) for part in others)

    assert abs(size(40) - size(4)) < 100


def test_windows_that_do_not_count_are_not_fitted() -> None:
    fit, own = SettledFit(), bench.window(np.random.default_rng(1), 0, "3", 0.0, long=True)
    report = samples.window_report()
    assert fit.after(msgspec.structs.replace(report, valid=False), own) is None
    assert fit.after(msgspec.structs.replace(report, complete=False), own) is None
    assert fit.after(report, msgspec.structs.replace(own, series=None)) is None
    found = fit.after(report, own)
    assert found is not None
    assert report.speedup_vs_sequential is not None
    assert found.num_windows == 1
    assert found.short == pytest.approx(report.speedup_vs_sequential.value)
    assert math.isfinite(found.ci_low)


@pytest.mark.parametrize(("seed", "noise", "verdict"), [(4, 0.05, Verdict.SHORT), (5, 0.05, Verdict.NOT_SETTLED)])
def test_windows_that_stay_in_no_mode_for_long_resolve_nothing(seed: int, noise: float, verdict: Verdict) -> None:
    rng, fit = np.random.default_rng(seed), SettledFit()
    for number in (0, 2, 3):  # windows without long blocks
        series = bench.window(rng, number, "3", 0.0, long=False).series
        assert series is not None
        # No overlapped steps beside the blocks; in the second case memory is sure all the same.
        times_ms = np.array(series.step_ms)[25:73] * np.exp(rng.normal(0, noise, 48))
        fit.add(StepSeries(0, tuple(times_ms.tolist()), series.modes[25:73]), SHORT)
    found = fit.result()
    assert found is not None
    assert not found.resolved
    assert found.verdict is verdict
