from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlap_callbacks.analysis.power import cause as words
from overlap_callbacks.analysis.power.cause import attribute, explain, shares_in_words, slowdown_shares
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import (
    CLOCK,
    MEMORY,
    SMS,
    UNEXPLAINED,
    WAVES,
    SlowdownCause,
    SlowdownShares,
)
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, ModePower, SourceInfo, UnitUtilisation
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import SmLoss
from tests.samples import aggregate_windows, window


def parts(**use: float) -> UnitUtilisation:
    all_parts = dict.fromkeys(("sm", "sm_occupancy", "tensor", "dram", "nvlink_rx_gb_s", "nvlink_tx_gb_s"))
    return UnitUtilisation(**{**all_parts, **use}, measured_s=1.0)


def mode(
    mhz: float | None, reasons: dict[str, float] | None = None, use: UnitUtilisation | None = None, arm=Mode.OVERLAPPED
):
    return ModePower(arm, sm_clock_mhz=mhz, reasons=reasons, parts=use)


def test_a_slowdown_by_the_clock_alone_is_all_the_clocks() -> None:
    found = attribute(0.25, mode(1600, {"sw_power_cap": 0.9}), mode(2000, {}))
    assert found is not None
    assert found.verdict == "clock throttled by power cap"
    assert (found.from_clock, found.contention, found.clock_share) == pytest.approx((0.25, 0.0, 1.0))
    assert "SM clock 1600 MHz overlapped, 2000 MHz sequential: it explains at most 25.0% (100% of the slowdown)" in (
        found.evidence
    )
    assert "throttled by power cap for 90.0% of overlapped and 0.0% of sequential time" in found.evidence


def test_the_clock_counts_while_kernels_compute_not_while_only_communication_runs() -> None:
    overlapped = msgspec.structs.replace(mode(1700), compute_clock_mhz=1800.0, compute_clock_readings=7)
    sequential = msgspec.structs.replace(mode(1950), compute_clock_mhz=1800.0, compute_clock_readings=5)
    found = attribute(0.2, overlapped, sequential)
    assert found is not None
    assert (found.from_clock, found.contention) == (0, pytest.approx(0.2))
    assert "SM clock 1800 MHz overlapped, 1800 MHz sequential" in found.evidence[1]
    assert found.evidence[2] == (
        "these clocks are means over readings that fall into compute (7 overlapped, 5 sequential)"
    )


@pytest.mark.parametrize("readings", [(4, 50), (50, 4), (50, 0)])
def test_with_few_readings_in_compute_the_modes_means_count_and_the_evidence_says_so(readings) -> None:
    sides = (
        msgspec.structs.replace(mode(mhz), compute_clock_mhz=1800.0 if count else None, compute_clock_readings=count)
        for mhz, count in zip((1700.0, 1950.0), readings, strict=True)
    )
    found = attribute(0.2, *sides)
    assert found is not None
    assert found.from_clock == pytest.approx(1950 / 1700 - 1)
    assert "communication alone included, in which a clock may rise" in found.evidence[2]


def test_shares_multiply() -> None:
    found = attribute(0.32, mode(1800), mode(1980))
    assert found is not None
    assert found.from_clock == pytest.approx(0.1)
    assert found.contention == pytest.approx(0.2)
    assert (1 + found.from_clock) * (1 + found.contention) == pytest.approx(1.32)


@pytest.mark.parametrize(
    ("overlapped", "sequential", "verdict"),
    [
        ({"sw_power_cap": 0.9}, {}, words.POWER_CAP),
        ({"sw_power_cap": 0.9}, {"sw_power_cap": 0.9}, words.POWER_CAP),  # capped in both, more deeply in one
        ({"hw_thermal_slowdown": 0.5}, {}, words.TEMPERATURE),
        ({"sw_thermal_slowdown": 0.3, "sw_power_cap": 0.9}, {"sw_power_cap": 0.9}, words.TEMPERATURE),
        ({"hw_slowdown": 0.5}, {}, words.HARDWARE),
        ({"hw_power_brake": 0.5}, {}, words.HARDWARE),
        ({"package_power_limit": 0.5}, {}, words.POWER_CAP),
        ({"memory_thermal": 0.5}, {}, words.TEMPERATURE),
        ({"throttled": 0.5}, {}, words.UNDECIDED),
        ({"gpu_idle": 0.9, "sync_boost": 0.9}, {}, words.UNDECIDED),  # no throttling
        ({"sw_power_cap": 0.05}, {}, words.UNDECIDED),  # too rarely
        ({}, {}, words.UNDECIDED),
        (None, None, words.UNDECIDED),
    ],
)
def test_why_the_clock_was_lower(overlapped, sequential, verdict) -> None:
    found = attribute(0.25, mode(1600, overlapped), mode(2000, sequential))
    assert found is not None
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("use", "verdict"),
    [
        ({"dram": 0.75, "sm": 0.95}, words.MEMORY_BANDWIDTH),
        ({"dram": 0.25, "sm": 0.95}, words.SM_CONTENTION),
        ({"dram": 0.25, "sm": 0.5}, words.UNDECIDED),
        ({"dram": 0.5, "sm": 0.95}, words.UNDECIDED),
        ({"dram": 0.25}, words.UNDECIDED),
        ({"sm": 0.95}, words.UNDECIDED),
        (None, words.UNDECIDED),
    ],
)
def test_what_kernels_contend_for_at_an_equal_clock(use, verdict) -> None:
    overlapped = mode(1980, {"sw_power_cap": 1.0}, parts(**use) if use is not None else None)
    found = attribute(0.2, overlapped, mode(1980, {}, parts(dram=0.2, tensor=0.6)))
    assert found is not None
    assert found.verdict == verdict
    assert (found.from_clock, found.contention, found.clock_share) == (0, pytest.approx(0.2), 0)


def test_evidence_names_the_figures_that_it_rests_on() -> None:
    overlapped = mode(1980, {}, parts(dram=0.75, sm=0.95, tensor=0.4, nvlink_rx_gb_s=120.4, nvlink_tx_gb_s=119.6))
    found = attribute(0.2, overlapped, mode(1980, {}, parts(dram=0.2, tensor=0.6)))
    assert found is not None
    assert found.evidence == (
        "compute kernels take 20.0% longer in overlapped steps",
        "SM clock 1980 MHz overlapped, 1980 MHz sequential: it explains at most 0.0% (0% of the slowdown)",
        "these clocks are means over all of the steps' time, communication alone included, in which a clock may rise: "
        "too few readings fall into compute",
        "memory bandwidth used to 75.0% (20.0% in sequential steps)",
        "SMs busy for 95.0%",
        "tensor cores busy for 40.0%, 60.0% in sequential steps",
        "NVLink 120.4 GB/s in, 119.6 GB/s out",
    )


def test_between_clock_and_contention_it_is_undecided() -> None:
    found = attribute(0.21, mode(1800, {"sw_power_cap": 1.0}, parts(dram=0.9, sm=1.0)), mode(1980, {}))
    assert found is not None
    assert found.clock_share == pytest.approx(0.5)
    assert found.verdict == words.UNDECIDED
    assert found.evidence[-1] == "the clock and contention have similar shares"


def test_a_higher_clock_in_overlapped_steps_makes_contention_larger_than_the_slowdown() -> None:
    found = attribute(0.2, mode(2000, {}, parts(dram=0.8)), mode(1800, {}))
    assert found is not None
    assert found.from_clock == pytest.approx(-0.1)
    assert found.contention == pytest.approx(1.2 / 0.9 - 1)
    assert (found.clock_share, found.verdict) == (0, words.MEMORY_BANDWIDTH)


def test_a_clock_that_explains_more_than_there_is_has_the_whole_share() -> None:
    found = attribute(0.05, mode(1600, {"sw_power_cap": 1.0}), mode(2000, {}))
    assert found is not None
    assert found.clock_share == 1
    assert found.contention is not None
    assert found.contention < 0  # kernels lost less than their clock: they wait for memory in part


@pytest.mark.parametrize("slowdown", [0.0, 0.019, -0.3])
def test_without_a_slowdown_there_is_nothing_to_explain(slowdown) -> None:
    found = attribute(slowdown, mode(1600, {"sw_power_cap": 1.0}), mode(2000, {}))
    assert found is not None
    assert (found.verdict, found.clock_share) == ("no slowdown", None)


def test_without_clocks_only_used_up_memory_is_reported() -> None:
    busy = attribute(0.2, mode(None, None, parts(dram=0.8, sm=1.0)), mode(None))
    free = attribute(0.2, mode(None, None, parts(dram=0.1, sm=1.0)), mode(None))
    assert busy is not None
    assert free is not None
    assert (busy.verdict, free.verdict) == (words.MEMORY_BANDWIDTH, words.UNDECIDED)
    assert (busy.from_clock, busy.contention) == (None, None)
    assert "a lower clock is not ruled out" in busy.evidence[1]


def test_missing_measurements_give_no_verdict() -> None:
    assert attribute(None, mode(1), mode(1)) is None
    assert attribute(0.2, None, mode(1)) is None
    assert attribute(0.2, mode(1), None) is None


def test_a_slowdown_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="slowdown must be a fraction above -1, got -1"):
        attribute(-1, mode(1), mode(1))


def test_it_can_be_written_down_and_read_back() -> None:
    found = attribute(0.25, mode(1600, {"sw_power_cap": 0.9}), mode(2000, {}))
    assert msgspec.json.decode(msgspec.json.encode(found), type=SlowdownCause) == found


COMPUTE_MS = 60.0


def clock(mhz: float | None, dram: float | None = None) -> ModePower:
    parts = UnitUtilisation(0.9, None, None, dram, None, None, 1.0)
    return ModePower(Mode.OVERLAPPED, compute_clock_mhz=mhz, compute_clock_readings=9, parts=parts)


def loss(sms_ms: float, waves_ms: float) -> SmLoss:
    return SmLoss(132, 16.0, 30.0, 24.0, sms_ms, waves_ms)


def shares(slowdown: float, losses: list[SmLoss], mhz: tuple[float, float] | None, **more: Any) -> SlowdownShares:
    sides = (None, None) if mhz is None else (clock(mhz[0], **more), clock(mhz[1]))
    found = slowdown_shares(slowdown, COMPUTE_MS, losses, *sides)
    assert found is not None
    assert sum(share.fraction for share in found.shares) == pytest.approx(slowdown)
    return found


def test_each_cause_has_its_share_and_its_basis() -> None:
    found = shares(0.32, [loss(1.2, 3.0), loss(1.2, 3.0)], (1800, 1980))
    assert found.of(CLOCK) == pytest.approx(0.1)
    assert found.of(SMS) == pytest.approx(1.1 * 0.02)
    assert found.of(WAVES) == pytest.approx(1.1 * 0.05)
    assert found.of(UNEXPLAINED) == pytest.approx(0.32 - 0.1 - 1.1 * 0.07)
    assert found.of(MEMORY) is None
    assert found.notes == ()
    assert [share.basis for share in found.shares] == [
        "measured: SM clocks, means over readings that fall into compute (9 overlapped, 9 sequential)",
        *["modelled from the grids of 80% of the compute during communication, which holds 16 of 132 SMs"] * 2,
        "what remains; memory bandwidth has no counter here",
    ]
    assert shares_in_words(found) == "of the 32.0%: lower clock 10.0%, SMs taken 2.2%, waves 5.5%, unexplained 14.3%"
    assert msgspec.json.decode(msgspec.json.encode(found), type=SlowdownShares) == found


def test_a_model_that_predicts_more_than_remains_is_scaled_down_and_that_is_said() -> None:
    found = shares(0.15, [loss(6.0, 6.0)], (1800, 1980))
    assert found.of(SMS) == found.of(WAVES) == pytest.approx(0.025)
    assert found.of(UNEXPLAINED) == pytest.approx(0)
    (note,) = found.notes
    assert note == (
        "the model predicts 22.0% from SMs taken and waves, more than the 5.0% that remain: its shares are scaled "
        "down to that"
    )


def test_a_clock_that_would_explain_more_than_there_is_gets_all_and_that_is_said() -> None:
    found = shares(0.1, [loss(1.0, 0.0)], (1500, 1980))
    assert (found.of(CLOCK), found.of(SMS)) == (0.1, 0)
    assert found.notes[0].startswith("the clocks would explain 32.0%, more than there is")


def test_a_higher_clock_in_overlapped_steps_leaves_more_to_the_rest() -> None:
    found = shares(0.2, [], (2000, 1800))
    assert found.of(CLOCK) == pytest.approx(-0.1)
    assert found.of(UNEXPLAINED) == pytest.approx(0.3)


def test_memory_gets_what_remains_where_its_counter_says_that_it_was_exhausted() -> None:
    found = shares(0.2, [loss(3.0, 0.0)], (1800, 1800), dram=0.75)
    assert (found.of(MEMORY), found.of(UNEXPLAINED)) == (pytest.approx(0.15), 0)
    found = shares(0.2, [loss(3.0, 0.0)], (1800, 1800), dram=0.3)
    assert (found.of(MEMORY), found.of(UNEXPLAINED)) == (None, pytest.approx(0.15))
    assert found.shares[-1].basis == "what remains; memory bandwidth was used to 30.0%"


def test_unknown_causes_are_part_of_the_unexplained_rest() -> None:
    assert [share.cause for share in shares(0.2, [loss(1.0, 1.0)], None).shares] == [SMS, WAVES, UNEXPLAINED]
    assert [share.cause for share in shares(0.2, [], (1800, 1980)).shares] == [CLOCK, UNEXPLAINED]
    assert slowdown_shares(0.2, COMPUTE_MS, [], None, None) is None
    assert slowdown_shares(0.2, COMPUTE_MS, [], ModePower(Mode.OVERLAPPED), ModePower(Mode.SEQUENTIAL)) is None
    assert slowdown_shares(None, COMPUTE_MS, [loss(1.0, 1.0)], None, None) is None


def test_without_a_slowdown_there_is_nothing_to_divide() -> None:
    assert slowdown_shares(0.01, COMPUTE_MS, [loss(1.0, 1.0)], clock(1800), clock(1980)) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault of the shares
@given(
    slowdown=st.floats(0.02, 5),
    sms_ms=st.floats(0, 500),
    waves_ms=st.floats(0, 500),
    mhz=st.tuples(st.floats(100, 3000), st.floats(100, 3000)),
    dram=st.none() | st.floats(0, 1),
)
def test_shares_always_add_up_and_no_share_but_the_clocks_is_below_zero(slowdown, sms_ms, waves_ms, mhz, dram) -> None:
    found = shares(slowdown, [loss(sms_ms, waves_ms)], mhz, dram=dram)
    assert all(share.fraction >= -1e-9 for share in found.shares if share.cause != CLOCK)


def report(valid: bool = True, power: bool = True, control: bool = False) -> OverlapReport:
    modes = (
        ModePower(Mode.OVERLAPPED, sm_clock_mhz=1900.0, avg_w=500.0, peak_w=630.0),
        ModePower(Mode.SEQUENTIAL, sm_clock_mhz=1980.0, avg_w=450.0, peak_w=600.0),
    )
    device = DevicePower(SourceInfo("fake", "Fake", "a", "instantaneous", 0.1, None, 0.1), 0.1, 0.3, modes)
    samples = [
        window(
            rank,
            sm_loss=loss(0.6, 1.2),
            power=(device,) if power else (),
            doubts=() if valid else ("nothing is sure",),
        )
        for rank in (0, 1)
    ]
    return aggregate_windows(samples, world_size=2, every_n_steps=500, control=control)


def test_a_report_has_the_shares_as_keys_and_in_its_verdict() -> None:
    found = report()
    metrics = found.metrics()
    names = ("from_clock", "from_sms", "from_waves", "unexplained")
    keys = [metrics[f"gpu/slowdown_{name}"] for name in names]
    assert sum(keys) == pytest.approx(metrics["overlap/compute_slowdown"])
    assert metrics["gpu/slowdown_from_waves"] == pytest.approx(2 * metrics["gpu/slowdown_from_sms"])
    assert "gpu/slowdown_from_memory" not in metrics
    assert found.power_verdict is not None
    assert found.power_verdict.evidence[-1].startswith("shares of the 9.9%: lower clock 4.2%, SMs taken")


@pytest.mark.parametrize(("bounds", "said"), [((-0.01, 0.2), False), ((0.0, 0.2), False), ((0.01, 0.2), True)])
def test_a_slowdown_that_is_not_clear_has_no_verdict(bounds, said) -> None:
    slowdown = Estimate(0.1, *bounds, 8, 8)
    power = report().power
    assert power is not None
    found = explain({"compute_slowdown": slowdown}, power, [loss(0.6, 1.2)], COMPUTE_MS)
    assert (found.verdict is not None) is said


def test_without_power_the_model_still_has_its_shares() -> None:
    metrics = report(power=False).metrics()
    assert metrics["gpu/slowdown_from_waves"] > 0
    assert "gpu/slowdown_from_clock" not in metrics


@pytest.mark.parametrize("changes", [{"valid": False}, {"control": True}])
def test_a_window_that_compares_nothing_has_no_shares(changes) -> None:
    found = report(**changes)
    assert found.slowdown_shares is None
    assert not [key for key in found.metrics() if "slowdown_from" in key or "slowdown_unexplained" in key]


def test_the_peak_has_a_key() -> None:
    assert report().metrics()["power/peak_w_vs_sequential"] == pytest.approx(0.05)
    assert "power/peak_w_vs_sequential" not in report(valid=False).metrics()
    assert "power/peak_w_vs_sequential" not in report(power=False).metrics()
