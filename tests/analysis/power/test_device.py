"""Figures against scripts whose exact answer is known: pure, without threads or drivers."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_callbacks.analysis.power.device import power_figures, steps_needed
from overlap_callbacks.analysis.power.mean_power import counted_power
from overlap_callbacks.analysis.power.readings import Reading, Readings, Segment, Utilisation, hold
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import REASONS, Cause, DevicePower, SourceInfo

OVERLAPPED, SEQUENTIAL = Mode.OVERLAPPED, Mode.SEQUENTIAL
S = 1_000_000_000


def info(averaging_s: float | None = 0.0, energy_lag_s: float | None = None, tdp_w: float | None = 400) -> SourceInfo:
    return SourceInfo("fake", "Fake", "fake-0", "instantaneous", averaging_s, energy_lag_s, 0.1, tdp_w=tdp_w)


def segment(start_s: float, end_s: float, arm: Mode = OVERLAPPED, steps: int = 1) -> Segment:
    return Segment(round(start_s * S), round(end_s * S), arm, steps)


def read(times_s, power: Callable[[float], float | None], **columns: Callable[[float], object]) -> Readings:
    """Readings of a script at some times."""
    return Readings.of(
        [
            Reading(round(t * S), power_w=power(t), **{name: value(t) for name, value in columns.items()})
            for t in times_s
        ]
    )


def ticks(start_s: float, end_s: float, interval_s: float = 0.1) -> list[float]:
    return [start_s + i * interval_s for i in range(round((end_s - start_s) / interval_s) + 1)]


def figures_of(readings: Readings, *segments: Segment, source: SourceInfo | None = None, **options) -> DevicePower:
    return power_figures(source or info(), readings, segments, interval_s=0.1, **options)


def mode_of(figures: DevicePower, mode: Mode = OVERLAPPED):
    found = figures.of(mode)
    assert found is not None
    return found


# -- power


def test_constant_power_is_that_power_in_every_figure_however_often_the_value_repeats() -> None:
    found = mode_of(figures_of(read(ticks(0, 10), lambda t: 250.0), segment(1, 9, steps=16)))
    assert (found.avg_w, found.peak_w, found.p99_w) == (pytest.approx(250), 250, 250)
    assert found.energy_per_step_j == pytest.approx(250 * 8 / 16)
    assert (found.num_steps, found.energy_method) == (16, "samples")
    assert found.measured_s == pytest.approx(8)
    assert (found.avg_tdp_fraction, found.peak_tdp_fraction) == (pytest.approx(0.625), 0.625)


def test_a_step_between_modes_is_exact_in_both() -> None:
    readings = read(ticks(0, 20), lambda t: 100.0 if t < 10 else 300.0)
    figures = figures_of(readings, segment(0, 10, SEQUENTIAL, 10), segment(10, 20, OVERLAPPED, 20))
    assert mode_of(figures, SEQUENTIAL).avg_w == pytest.approx(100)
    assert mode_of(figures, SEQUENTIAL).peak_w == 100  # the reading at 10.0 s is of the other mode
    assert mode_of(figures, SEQUENTIAL).energy_per_step_j == pytest.approx(100)
    assert mode_of(figures).avg_w == pytest.approx(300)
    assert mode_of(figures).energy_per_step_j == pytest.approx(150)


def test_a_mode_without_a_figure_by_the_other_mode_s_method_says_so() -> None:
    # The sensor fails in overlapped steps, the counter in sequential ones.
    readings = read(
        ticks(0, 20), lambda t: None if t < 10 else 300.0, energy_j=lambda t: 400.0 * t if t < 10.01 else None
    )
    blocks = (segment(0, 10, OVERLAPPED, 20), segment(10.05, 20, SEQUENTIAL, 20))
    figures = figures_of(readings, *blocks, source=info(energy_lag_s=0.02))
    assert mode_of(figures).avg_w == pytest.approx(400)
    assert mode_of(figures, SEQUENTIAL).avg_w is None
    assert mode_of(figures, SEQUENTIAL).missing == "it has no figure by the method that the other mode has one by"


def test_a_step_within_a_mode_adds_up_to_the_joule() -> None:
    # 100 W for 10 s, then 300 W for 10 s: 4,000 J, of which a trapezoid over changed values finds half.
    found = mode_of(figures_of(read(ticks(0, 20), lambda t: 100.0 if t < 9.9999 else 300.0), segment(0, 20)))
    assert found.energy_per_step_j == pytest.approx(4000)
    assert (found.avg_w, found.peak_w) == (pytest.approx(200), 300)


def test_the_first_and_the_last_reading_reach_to_the_edges() -> None:
    readings = read([0.3, 0.6], lambda t: 100.0 if t < 0.5 else 300.0)
    held = hold(readings, segment(0, 1), readings.power_w, readings.since_ns)
    assert held.seconds == pytest.approx([0.6, 0.4])


@pytest.mark.parametrize(
    ("late", "said"), [(1, "1 reading of power came late and was"), (6, "6 readings of power came late and were")]
)
def test_late_readings_are_reported(late: int, said: str) -> None:
    figures = figures_of(read(ticks(0, 1), lambda t: 1.0), segment(0, 1), late=late)
    assert figures.late == late
    assert figures.problems == (f"{said} left out [OC418]",)


def test_a_reading_that_averages_over_two_modes_belongs_to_neither() -> None:
    def average(t: float) -> float:  # over 1 s of 100 W until 10 s, then 300 W
        return 100 + 200 * min(1.0, max(0.0, t - 10))

    readings = Readings.of([Reading(round(t * S), averaging_s=1.0, power_w=average(t)) for t in ticks(0, 20)])
    figures = figures_of(readings, segment(5, 10, SEQUENTIAL), segment(10, 15), source=info(averaging_s=1.0))
    assert mode_of(figures, SEQUENTIAL).peak_w == 100
    assert mode_of(figures).avg_w == pytest.approx(300)
    assert mode_of(figures).num_readings == 40  # from 11.0 to before 15.0 s
    assert mode_of(figures).energy_per_step_j == pytest.approx(300 * 5)


def test_a_mean_since_the_reading_before_counts_for_that_time_and_not_for_the_next() -> None:
    # 100 W until 0.2 s, 500 W to 0.9 s, 200 W to 1 s, read at those times.
    readings = Readings.of(
        [
            Reading(round(t * S), averaging_s=averaging_s, power_w=power_w)
            for t, averaging_s, power_w in ((0.2, 0.2, 100), (0.9, 0.7, 500), (1.0, 0.1, 200))
        ]
    )
    found = mode_of(figures_of(readings, segment(0, 1), source=info(averaging_s=None)))
    assert found.avg_w == pytest.approx(100 * 0.2 + 500 * 0.7 + 200 * 0.1)
    assert found.peak_w == 500


def test_blocks_add_up_by_their_time_and_their_steps() -> None:
    readings = read(ticks(0, 10), lambda t: 100.0 if t < 4.9999 else 400.0)
    found = mode_of(figures_of(readings, segment(1, 2, steps=1), segment(6, 9, steps=3)))
    assert found.power_error is not None
    assert found.avg_w == pytest.approx((100 * 1 + 400 * 3) / 4)
    assert found.energy_per_step_j == pytest.approx((100 * 1 + 400 * 3) / 4)
    assert found.num_steps == 4


def test_the_99th_percentile_is_by_time_not_by_readings() -> None:
    def power(t: float) -> float:
        return 900.0 if 4.9999 < t < 5.0999 else 100.0 + t  # one reading of 101: 0.1 s of 10 s

    found = mode_of(figures_of(read(ticks(0, 10), power), segment(0, 10)))
    assert found.peak_w == 900
    assert found.p99_w == pytest.approx(109.9)
    times = [*ticks(0, 10), 1.001, 1.002, 1.003]  # three readings are high, for 3 ms
    found = mode_of(figures_of(read(sorted(times), lambda t: 500.0 if 0.99 < t < 1.0025 else 100.0), segment(0, 10)))
    assert (found.peak_w, found.p99_w) == (500, 100)


def test_a_reading_without_power_is_skipped_and_the_one_before_is_held() -> None:
    readings = read([0, 0.5, 1.0], lambda t: None if t == 0.5 else 100.0 + 100 * t)
    held = hold(readings, segment(0, 1.5), readings.power_w, readings.since_ns)
    assert held.rows.tolist() == [0, 2]
    assert held.seconds == pytest.approx([1.0, 0.5])


@settings(max_examples=200, deadline=None)
@given(
    times=st.lists(st.integers(0, 5_000), min_size=1, max_size=40, unique=True),
    averaging_ms=st.integers(0, 800),
    bounds=st.tuples(st.integers(0, 5_000), st.integers(1, 3_000)),
    seed=st.integers(0, 2**16),
)
def test_holding_covers_a_segment_exactly_and_uses_only_what_lies_within(times, averaging_ms, bounds, seed) -> None:
    power = np.random.default_rng(seed).uniform(50, 700, len(times))
    readings = Readings.of(
        [Reading(t * 10**6, averaging_ms / 1e3, p) for t, p in zip(sorted(times), power.tolist(), strict=True)]
    )
    block = Segment(bounds[0] * 10**6, sum(bounds) * 10**6, OVERLAPPED, 1)
    held = hold(readings, block, readings.power_w, readings.since_ns)
    inside = [t for t in sorted(times) if bounds[0] <= t - averaging_ms and t <= sum(bounds)]
    if len(inside) > 1 and averaging_ms == 0 and inside[-1] == sum(bounds):
        inside.pop()  # momentary, at the very end
    assert [int(t) // 10**6 for t in readings.time_ns[held.rows]] == inside
    if not inside:
        return
    assert held.seconds.sum() == pytest.approx(bounds[1] / 1e3)
    assert (held.seconds >= 0).all()
    # By the millisecond: each goes to the reading that speaks of it, else to the last one before, else to the first.
    expected = np.zeros(len(inside))
    for ms in range(bounds[0], sum(bounds)):
        speaking = [i for i, t in enumerate(inside) if t - averaging_ms <= ms < t]
        before = [i for i, t in enumerate(inside) if t <= ms]
        expected[speaking[0] if speaking else before[-1] if before else 0] += 1e-3
    assert held.seconds == pytest.approx(expected, abs=1e-9)


# -- blocks that are too short


def test_blocks_that_are_too_short_give_no_figure_but_what_would_help() -> None:
    readings = Readings.of([Reading(round(t * S), averaging_s=1.0, power_w=100.0) for t in ticks(0, 10)])
    figures = figures_of(readings, segment(2, 2.3, steps=2), segment(4, 4.3, steps=2), source=info(averaging_s=1.0))
    found = mode_of(figures)
    assert figures.min_block_s == pytest.approx(1.2)
    assert (found.avg_w, found.peak_w, found.energy_per_step_j, found.measured_s) == (None, None, None, 0)
    assert found.missing == (
        "blocks of 0.3 s are too short: a power figure needs 1.2 s in one mode, which takes 8 steps per block"
    )
    # And so many do.
    blocks = [segment(start, start + 8 * 0.15, steps=8) for start in (2, 4, 6)]
    found = mode_of(figures_of(readings, *blocks, source=info(averaging_s=1.0)))
    assert (found.avg_w, found.missing) == (pytest.approx(100), "")


@settings(max_examples=100, deadline=None)
@given(
    averaging_ms=st.integers(0, 1_500),
    interval_ms=st.integers(1, 500),
    offset=st.floats(0, 1),
    jitter=st.lists(st.floats(0, 0.99), min_size=60, max_size=60),
)
def test_a_block_of_the_least_length_has_a_reading_wherever_it_starts(averaging_ms, interval_ms, offset, jitter):
    # Ticks may come late by up to one interval.
    times = [round((i + late) * interval_ms * 1e6) for i, late in enumerate(jitter)]
    readings = Readings.of([Reading(t, averaging_ms / 1e3, 100.0) for t in times])
    source = info(averaging_s=averaging_ms / 1e3)
    length_s = source.min_block_s(interval_ms / 1e3)
    start_ns = round(offset * 10 * interval_ms * 1e6)
    if start_ns + length_s * 1e9 > times[-1]:
        return
    block = Segment(start_ns, start_ns + math.ceil(length_s * 1e9), OVERLAPPED, 1)
    assert len(hold(readings, block, readings.power_w, readings.since_ns).rows) >= 1


def test_clocks_need_no_averaging_time() -> None:
    readings = Readings.of(
        [Reading(round(t * S), averaging_s=1.0, power_w=100.0, sm_clock_mhz=1500.0) for t in ticks(0, 4)]
    )
    found = mode_of(figures_of(readings, segment(2, 2.5), source=info(averaging_s=1.0)))
    assert (found.avg_w, found.sm_clock_mhz) == (None, 1500)


def test_no_readings_at_all_are_said() -> None:
    figures = figures_of(Readings.of([]), segment(0, 1), segment(1, 2, SEQUENTIAL))
    assert [mode.missing for mode in figures.modes] == ["there are no readings of power"] * 2
    assert figures.limit_w is None


def test_long_blocks_that_no_reading_falls_into_are_said() -> None:
    found = mode_of(figures_of(read(ticks(10, 20), lambda t: 100.0), segment(0, 5)))
    assert found.missing == "no reading of power falls into these blocks"


@pytest.mark.parametrize(
    ("step_s", "min_block_s", "steps"), [(0.15, 1.2, 8), (0.16, 1.2, 8), (5, 1.2, 1), (0.1, 0.3, 3)]
)
def test_steps_needed(step_s, min_block_s, steps) -> None:
    assert steps_needed(step_s, min_block_s) == steps


def test_steps_needed_refuses_steps_that_take_no_time() -> None:
    with pytest.raises(ValueError, match=r"step_s must be positive, got 0\.0"):
        steps_needed(0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [((2, 2, 1), "end_ns must be after start_ns (2), got 2"), ((1, 2, 0), "num_steps must be at least 1, got 0")],
)
def test_a_segment_that_cannot_be_is_refused(values, message) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Segment(values[0], values[1], OVERLAPPED, values[2])
    assert str(caught.value) == message


# -- energy


def energy(power: Callable[[float], float], step_s: float = 1e-3) -> Callable[[float], float]:
    """The integral of a power that is constant over every millisecond."""
    return lambda t: sum(power(i * step_s + step_s / 2) * step_s for i in range(round(t / step_s)))


def test_the_counter_is_exact_on_both_sides_of_a_step() -> None:
    def power(t: float) -> float:
        return 100.0 if t < 5 else 300.0

    readings = read(ticks(0, 10), lambda t: 777.0 if t == 0 else power(t), energy_j=energy(power))
    figures = figures_of(
        readings,
        segment(0.05, 4.95, SEQUENTIAL, 7),
        segment(5.03, 9.98, OVERLAPPED, 5),
        source=info(energy_lag_s=0.1),
    )
    assert mode_of(figures).energy_method == mode_of(figures, SEQUENTIAL).energy_method == "counter"
    assert mode_of(figures, SEQUENTIAL).energy_per_step_j == pytest.approx(100 * 4.9 / 7)
    assert mode_of(figures).energy_per_step_j == pytest.approx(300 * 4.95 / 5)
    assert mode_of(figures).energy_steps == 5


def test_a_late_counter_still_measures_only_its_own_mode() -> None:
    def power(t: float) -> float:
        return 100.0 if t < 5 else 300.0

    exact = energy(power)
    # Its value is up to 0.1 s old: at 5.05 s it is still that of 5.0 s.
    readings = read(ticks(0, 10, 0.05), power, energy_j=lambda t: exact(math.floor(t * 10 + 1e-6) / 10))
    # No joule of the 100 W is in it; the ages of the first and the last read differ by 0.05 s.
    found = counted_power(readings, [segment(5, 10)], info(energy_lag_s=0.1))
    assert found is not None
    assert found.power_w == pytest.approx(300, rel=0.011)


@pytest.mark.parametrize("length_s", [0.6, 1.0, 2.5])
def test_a_block_of_few_periods_of_the_counter_uses_the_readings(length_s) -> None:
    readings = read(ticks(0, 10), lambda t: 250.0, energy_j=lambda t: 250.0 * t)
    found = mode_of(figures_of(readings, segment(1, 1 + length_s), source=info(energy_lag_s=0.1)))
    assert found.energy_method == "samples"
    assert found.energy_per_step_j == pytest.approx(250 * length_s)


@pytest.mark.parametrize("lag_s", [0.001, 0.1])
def test_blocks_that_are_too_short_for_the_sensor_are_pooled_by_the_counter(lag_s) -> None:
    # Blocks of 0.4 s, and a sensor that averages over 1 s: only the counter can tell, and of all blocks together.
    def power(t: float) -> float:
        return 300.0 if int(t / 0.5) % 2 else 100.0

    exact = energy(power, step_s=0.01)
    readings = Readings.of(
        [Reading(round(t * S), averaging_s=1.0, power_w=200.0, energy_j=exact(t)) for t in ticks(0, 9, 0.01)]
    )
    blocks = [segment(n / 2 + 0.1, n / 2 + 0.5, OVERLAPPED if n % 2 else SEQUENTIAL, steps=4) for n in range(16)]
    figures = figures_of(readings, *blocks, source=info(averaging_s=1.0, energy_lag_s=lag_s))
    for mode, watts in ((OVERLAPPED, 300), (SEQUENTIAL, 100)):
        found = mode_of(figures, mode)
        if lag_s == 0.001:
            assert (found.avg_w, found.energy_method) == (pytest.approx(watts, rel=1e-3), "counter")
            assert found.energy_per_step_j == pytest.approx(watts * 0.1, rel=1e-3)
            assert found.peak_w is None  # that is of readings of power
        else:
            assert found.avg_w is None
            assert found.missing


def test_both_modes_use_one_method() -> None:
    # The overlapped blocks are long enough for the counter, the sequential ones are not.
    readings = read(ticks(0, 10), lambda t: 250.0, energy_j=lambda t: 260.0 * t)
    figures = figures_of(readings, segment(0, 4), segment(5, 5.6, SEQUENTIAL), source=info(energy_lag_s=0.1))
    assert mode_of(figures).energy_method == mode_of(figures, SEQUENTIAL).energy_method == "samples"
    assert mode_of(figures).energy_per_step_j == pytest.approx(1000)


def test_a_counter_that_was_reset_in_a_block_is_not_used_there() -> None:
    readings = read(ticks(0, 10), lambda t: 250.0, energy_j=lambda t: None if 2.95 < t < 3.05 else 250.0 * t)
    source = info(energy_lag_s=0.01)
    assert counted_power(readings, [segment(2, 4)], source) is None
    found = mode_of(figures_of(readings, segment(2, 4), segment(5, 8, steps=3), source=source))
    assert (found.energy_method, found.num_steps, found.energy_steps) == ("counter", 3, 4)
    assert found.energy_per_step_j == pytest.approx(250 * 5 / 4)


@pytest.mark.parametrize(("factor", "words"), [(0.0, "gave 0 times"), (1000.0, "gave 1e+03 times")])
def test_a_counter_that_cannot_be_true_is_not_used_and_that_is_said(factor, words) -> None:
    readings = read(ticks(0, 10), lambda t: 250.0, energy_j=lambda t: 250.0 * factor * t)
    figures = figures_of(readings, segment(0, 5, steps=5), source=info(energy_lag_s=0.1))
    assert mode_of(figures).energy_method == "samples"
    assert mode_of(figures).energy_per_step_j == pytest.approx(250)
    assert "the energy counter is not used" in figures.problems[0]
    assert words in figures.problems[0]


def test_the_counter_is_used_if_averages_are_too_long_for_the_blocks() -> None:
    readings = Readings.of(
        [Reading(round(t * S), averaging_s=9.0, power_w=250.0, energy_j=250.0 * t) for t in ticks(0, 10)]
    )
    figures = figures_of(readings, segment(2, 8, steps=6), source=info(averaging_s=9.0, energy_lag_s=0.1))
    found = mode_of(figures)
    assert (found.avg_w, found.peak_w, found.energy_method) == (pytest.approx(250), None, "counter")
    assert found.energy_per_step_j == pytest.approx(250)
    assert figures.problems == (
        "the highest power of overlapped steps is not known: no reading of power is of one block alone [OC415]",
    )


# -- clocks, reasons, utilisation


def test_clocks_are_means_over_time() -> None:
    readings = read([0, 1, 3], lambda t: 1.0, sm_clock_mhz=lambda t: 1000.0 + 500 * t, limit_w=lambda t: 700.0 - t)
    figures = figures_of(readings, segment(0, 4))
    assert mode_of(figures).sm_clock_mhz == pytest.approx((1000 * 1 + 1500 * 2 + 2500 * 1) / 4)
    assert mode_of(figures).memory_clock_mhz is None
    assert figures.limit_w == 697


def test_fractions_of_reasons_are_of_time() -> None:
    def reasons(t: float):
        if t < 0.999:
            return frozenset({"gpu_idle"})
        return frozenset({"sw_power_cap", "hw_thermal_slowdown"} if t < 2.999 else {"sw_power_cap"})

    found = mode_of(figures_of(read([0, 1, 3], lambda t: 1.0, reasons=reasons), segment(0, 4)))
    assert found.reasons == pytest.approx({"gpu_idle": 0.25, "sw_power_cap": 0.75, "hw_thermal_slowdown": 0.5})
    assert found.throttle_fraction == pytest.approx(0.75)
    causes = [found.cause_fraction(cause) for cause in (Cause.POWER, Cause.TEMPERATURE, Cause.HARDWARE)]
    assert causes == pytest.approx([0.75, 0.5, 0])


@pytest.mark.parametrize("word", REASONS)
def test_only_what_holds_the_clock_back_is_throttling(word) -> None:
    found = mode_of(figures_of(read(ticks(0, 1), lambda t: 1.0, reasons=lambda t: frozenset({word})), segment(0, 1)))
    benign = {"gpu_idle", "application_clocks", "sync_boost", "display_clocks"}
    assert found.throttle_fraction == (0 if word in benign else 1)


def test_a_device_that_gives_no_reasons_has_no_fractions() -> None:
    found = mode_of(figures_of(read(ticks(0, 1), lambda t: 1.0), segment(0, 1)))
    assert (found.reasons, found.throttle_fraction, found.cause_fraction(Cause.POWER)) == (None, None, None)


def test_reasons_of_the_moment_that_failed_in_one_mode_are_not_said_to_need_longer_blocks() -> None:
    readings = read(ticks(0, 2), lambda t: 1.0, reasons=lambda t: frozenset() if t < 1 else None)
    figures = figures_of(readings, segment(0, 0.95), segment(1.05, 2, SEQUENTIAL))
    assert [mode_of(figures, mode).reasons for mode in (OVERLAPPED, SEQUENTIAL)] == [{}, None]
    assert figures.problems == ()


def test_a_device_that_gives_reasons_but_has_none_is_not_throttled() -> None:
    found = mode_of(figures_of(read(ticks(0, 1), lambda t: 1.0, reasons=lambda t: frozenset()), segment(0, 1)))
    assert (found.reasons, found.throttle_fraction) == ({}, 0)


def test_utilisation_of_an_interval_that_reaches_into_another_mode_is_left_out() -> None:
    def use(t: float) -> Utilisation | None:
        dram = 0.9 if t > 1.15 else 0.2  # 1.1 to 1.2 is all in the second mode
        return Utilisation(round((t - 0.1) * S), sm=1.0, dram=dram)

    readings = read(ticks(0.1, 2), lambda t: 1.0, utilisation=use)
    figures = figures_of(readings, segment(0, 1.05, SEQUENTIAL), segment(1.1, 2))
    sequential, overlapped = mode_of(figures, SEQUENTIAL).parts, mode_of(figures).parts
    assert sequential is not None
    assert overlapped is not None
    assert (sequential.dram, sequential.measured_s) == (pytest.approx(0.2), pytest.approx(1.0))
    assert (overlapped.dram, overlapped.measured_s) == (pytest.approx(0.9), pytest.approx(0.9))
    assert (overlapped.sm, overlapped.tensor) == (1, None)


def test_figures_can_be_written_down_and_read_back() -> None:
    readings = read(
        ticks(0, 4), lambda t: 250.0, energy_j=lambda t: 250.0 * t, reasons=lambda t: frozenset({"gpu_idle"})
    )
    figures = figures_of(readings, segment(0, 2), segment(2, 4, SEQUENTIAL), source=info(energy_lag_s=0.1))
    data = msgspec.json.encode(figures)
    assert b"NaN" not in data
    assert msgspec.json.decode(data, type=DevicePower) == figures


# -- by place in the block


def test_clock_and_power_by_place_in_the_block_are_of_single_steps() -> None:
    # Blocks of two steps of a second: the clock falls in the second step, and power with it.
    blocks = [segment(start, start + 2.0, steps=2) for start in (0.0, 4.0)]
    readings = read(
        [t + 0.05 for t in ticks(0, 7.9)],
        lambda t: 300.0 if t % 2 < 1 else 280.0,
        sm_clock_mhz=lambda t: 1900.0 if t % 2 < 1 else 1800.0,
    )
    first, second = mode_of(figures_of(readings, *blocks)).positions
    assert (first.position, first.num_clocks, first.sm_clock_mhz, first.avg_w) == (0, 20, 1900.0, 300.0)
    assert (second.position, second.num_readings, second.sm_clock_mhz, second.avg_w) == (1, 20, 1800.0, 280.0)


def test_a_sensor_that_averages_over_more_than_a_step_gives_no_power_within_steps() -> None:
    readings = read(ticks(0.05, 3.95), lambda t: 300.0, averaging_s=lambda t: 1.2, sm_clock_mhz=lambda t: 1900.0)
    positions = mode_of(figures_of(readings, segment(0, 4, steps=4), source=info(1.2))).positions
    assert [each.position for each in positions] == [0, 1, 2, 3]
    assert {each.avg_w for each in positions} == {None}
    assert {each.sm_clock_mhz for each in positions} == {1900.0}


def test_a_stretch_after_a_gap_goes_on_where_its_block_was() -> None:
    later = Segment(0, S, OVERLAPPED, 1, position=3)
    (found,) = mode_of(figures_of(read(ticks(0.05, 0.95), lambda t: 300.0), later)).positions
    assert found.position == 3


def test_positions_are_distinguished_up_to_the_limit_of_the_record() -> None:
    readings = read(ticks(0.05, 99.95), lambda t: 300.0)
    assert len(mode_of(figures_of(readings, segment(0, 100, steps=100))).positions) == 32
