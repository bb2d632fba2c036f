from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlap_callbacks.analysis.aggregate import aggregate_windows
from overlap_callbacks.analysis.power.cause import explain, shares_in_words, slowdown_shares
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import CLOCK, MEMORY, SMS, UNEXPLAINED, WAVES, SlowdownShares
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, ModePower, SourceInfo, UnitUtilisation
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import SmLoss
from tests.samples import window

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


def test_each_cause_has_its_share_and_says_what_it_rests_on() -> None:
    found = shares(0.32, [loss(1.2, 3.0), loss(1.2, 3.0)], (1800, 1980))
    assert found.of(CLOCK) == pytest.approx(0.1)
    assert found.of(SMS) == pytest.approx(1.1 * 0.02)
    assert found.of(WAVES) == pytest.approx(1.1 * 0.05)
    assert found.of(UNEXPLAINED) == pytest.approx(0.32 - 0.1 - 1.1 * 0.07)
    assert found.of(MEMORY) is None
    assert found.notes == ()
    assert [share.basis for share in found.shares] == [
        "measured: SM clocks, means over readings that fall into compute (9 overlapped, 9 sequential)",
        *["modelled from the grids of 80% of the compute beside communication, which holds 16 of 132 SMs"] * 2,
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


def test_causes_of_which_nothing_is_known_are_part_of_what_is_unexplained() -> None:
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
    keys = [metrics[f"device/slowdown_{name}"] for name in names]
    assert sum(keys) == pytest.approx(metrics["overlap/compute_slowdown"])
    assert metrics["device/slowdown_from_waves"] == pytest.approx(2 * metrics["device/slowdown_from_sms"])
    assert "device/slowdown_from_memory" not in metrics
    assert found.power_verdict is not None
    assert found.power_verdict.evidence[-1].startswith("shares of the 9.9%: lower clock 4.2%, SMs taken")


@pytest.mark.parametrize(("bounds", "said"), [((-0.01, 0.2), False), ((0.0, 0.2), False), ((0.01, 0.2), True)])
def test_a_slowdown_that_may_be_chance_has_no_verdict(bounds, said) -> None:
    slowdown = Estimate(0.1, *bounds, 8, 8)
    power = report().power
    assert power is not None
    found = explain({"compute_slowdown": slowdown}, power, [loss(0.6, 1.2)], COMPUTE_MS)
    assert (found.verdict is not None) is said


def test_without_power_the_model_still_has_its_shares() -> None:
    metrics = report(power=False).metrics()
    assert metrics["device/slowdown_from_waves"] > 0
    assert "device/slowdown_from_clock" not in metrics


@pytest.mark.parametrize("changes", [{"valid": False}, {"control": True}])
def test_a_window_that_compares_nothing_has_no_shares(changes) -> None:
    found = report(**changes)
    assert found.slowdown_shares is None
    assert not [key for key in found.metrics() if "slowdown_from" in key or "slowdown_unexplained" in key]


def test_the_peak_has_a_key() -> None:
    assert report().metrics()["power/peak_w_vs_sequential"] == pytest.approx(0.05)
    assert "power/peak_w_vs_sequential" not in report(valid=False).metrics()
    assert "power/peak_w_vs_sequential" not in report(power=False).metrics()
