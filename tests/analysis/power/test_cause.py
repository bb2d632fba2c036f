from __future__ import annotations

import msgspec
import pytest

from overlap_callbacks.analysis.power import cause as words
from overlap_callbacks.analysis.power.cause import attribute
from overlap_callbacks.analysis.results.kernel_times import SlowdownCause
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import ModePower, UnitUtilisation


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


def test_what_was_not_measured_has_no_verdict() -> None:
    assert attribute(None, mode(1), mode(1)) is None
    assert attribute(0.2, None, mode(1)) is None
    assert attribute(0.2, mode(1), None) is None


def test_a_slowdown_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="slowdown must be a fraction above -1, got -1"):
        attribute(-1, mode(1), mode(1))


def test_it_can_be_written_down_and_read_back() -> None:
    found = attribute(0.25, mode(1600, {"sw_power_cap": 0.9}), mode(2000, {}))
    assert msgspec.json.decode(msgspec.json.encode(found), type=SlowdownCause) == found
