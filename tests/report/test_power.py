from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

from overlap_callbacks.analysis.formatting import NBSP
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, ModePower, SourceInfo
from overlap_callbacks.report.terminal import drawn
from overlap_callbacks.report.views.elements import Document, RunPage
from overlap_callbacks.report.views.power import power_answer, power_blocks
from tests.samples import aggregate_windows, window

SOURCE = SourceInfo("nvml", "H200", "GPU-1", "instantaneous", 0.1, 0.1, 0.1, tdp_w=700.0)


def figures(**changes) -> DevicePower:
    modes = [
        ModePower(
            mode,
            avg_w=watts,
            peak_w=1.2 * watts,
            p99_w=1.1 * watts,
            avg_tdp_fraction=watts / 700,
            peak_tdp_fraction=1.2 * watts / 700,
            energy_per_step_j=joules,
            energy_method="counter",
            sm_clock_mhz=mhz,
            throttle_fraction=capped,
            reasons={"sw_power_cap": capped},
        )
        for mode, watts, joules, mhz, capped in (
            (Mode.OVERLAPPED, 660.0, 66.0, 1500.0, 0.8),
            (Mode.SEQUENTIAL, 600.0, 72.0, 1650.0, 0.1),
        )
    ]
    return DevicePower(SOURCE, 0.1, 0.3, **{"modes": tuple(modes), **changes})


def powered(*figures_of_ranks: DevicePower, tokens_per_step: int | None = None, **changes):
    samples = [window(rank, power=(found,), **changes) for rank, found in enumerate(figures_of_ranks)]
    return aggregate_windows(samples, world_size=len(samples), every_n_steps=500, tokens_per_step=tokens_per_step)


def printed(shown) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    blocks = power_blocks([shown] if shown.valid else [], [shown], None)
    console.print(drawn(Document("", (RunPage("", "", "", "", tuple(blocks), ()),), ""), everything=True))
    return " ".join(console.export_text().split())


def said(shown) -> str:
    return power_answer([shown] if shown.valid else []).replace(NBSP, " ")


def test_the_table_has_both_modes_and_what_overlap_changes() -> None:
    text = printed(powered(figures()))
    for line in (
        "660 W",
        "600 W",
        "+10.0%",
        "94.3%",
        "85.7%",
        "energy of a step",
        "Energy by counter.",
        "66.00 J",
        "72.00 J",
        "-8.3%",
        "1500 MHz",
        "1650 MHz",
    ):
        assert line in text
    assert "memory bandwidth" not in text  # not measured in either mode


def test_energy_comes_next_to_time_in_text() -> None:
    assert "Energy of a step with overlap: too few blocks for an interval." in said(powered(figures()))
    assert "A token costs 0.066 J." in said(powered(figures(), tokens_per_step=1000))
    # 66 J where a sequential step takes 72 J.
    assert powered(figures()).metrics()["power/energy_saving_vs_sequential"] == pytest.approx(1 - 66 / 72)


def test_a_slowdown_that_goes_with_the_clock_under_a_power_cap_is_said_with_its_evidence() -> None:
    # 10 % slowdown, and a clock that is a tenth higher in sequential steps.
    shown = powered(figures())
    assert shown.power_verdict is not None
    assert shown.power_verdict.verdict == "clock throttled by power cap"
    assert shown.power_verdict.from_clock == pytest.approx(0.1)
    assert shown.metrics()["gpu/slowdown_from_clock"] == pytest.approx(0.1)
    assert "throttled by power cap for 80.0% of overlapped and 10.0% of sequential time" in printed(shown)


def test_an_invalid_window_says_nothing_of_its_sequential_steps() -> None:
    blocks = tuple(msgspec.structs.replace(b, covered_compute_ms=30.0) for b in window().profiled)
    shown = powered(figures(), profiled=blocks)
    assert not shown.valid
    assert said(shown) == ""
    assert "sequential" not in printed(shown)
    keys = [key for key in shown.metrics() if key.startswith(("power/", "gpu/"))]
    assert keys
    assert not any("sequential" in key for key in keys)


def test_a_control_run_has_no_verdict() -> None:
    shown = aggregate_windows([window(power=(figures(),))], world_size=1, every_n_steps=500, control=True)
    assert shown.power_verdict is None


def test_without_power_there_is_no_table() -> None:
    bare = aggregate_windows([window()], world_size=1, every_n_steps=500)
    assert power_blocks([bare], [bare], None) == []


def test_a_rank_without_a_source_leaves_no_sums_over_all_devices() -> None:
    both = aggregate_windows(
        [window(0, power=(figures(),)), window(1)], world_size=2, every_n_steps=500, tokens_per_step=1000
    )
    metrics = both.metrics()
    assert "power/overlapped_avg_w" in metrics
    for key in ("total_w", "energy_per_step_j", "energy_per_token_j"):
        assert f"power/overlapped_{key}" not in metrics
    assert any("power of rank 1 was not measured: there are no sums" in problem for problem in both.problems)


def test_a_rank_that_was_not_heard_leaves_no_sums_either() -> None:
    one = aggregate_windows([window(0, power=(figures(),))], world_size=2, every_n_steps=500)
    assert "power/overlapped_energy_per_step_j" not in one.metrics()


def test_a_rank_whose_device_another_one_reads_is_not_missing() -> None:
    ranks = [window(0, power=(figures(),)), window(1, power_elsewhere=True)]
    whole = aggregate_windows(ranks, world_size=2, every_n_steps=500)
    assert whole.metrics()["power/overlapped_energy_per_step_j"] == 66.0
    assert not any("sums" in problem for problem in whole.problems)


def test_a_control_run_says_nothing_of_energy() -> None:
    control = aggregate_windows([window(power=(figures(),))], world_size=1, every_n_steps=500, control=True)
    assert said(control) == ""


def test_overlap_s_power_is_compared_in_percent_only_where_an_interval_supports_that() -> None:
    alone = said(powered(figures()))
    assert "%" not in alone
    assert "A device draws 660 W in overlapped steps, 600 W in sequential ones (too few blocks for an inter" in alone
    assert "Highest power of a device with overlap: too few blocks for an interval." in alone
    assert "highest power" not in said(powered(figures(), doubts=("nothing is sure",)))
    watts = (640.0, 650.0, 660.0, 670.0, 680.0)
    sure = power_answer([with_watts(value) for value in watts]).replace(NBSP, " ")
    assert re.search(r"660 W in overlapped steps, 600 W in sequential ones \(10\.0% more \([\d.]+ to [\d.]+\)\)", sure)
    assert re.search(r"The highest power of a device is 10\.0% higher \([\d.]+ to [\d.]+\) with overlap\.", sure)
    unsure = power_answer([with_watts(value) for value in (500.0, 700.0, 550.0, 680.0)]).replace(NBSP, " ")
    assert re.search(r"in sequential ones \(inconclusive \(a difference of \d+% would show\)\)", unsure)
    assert re.search(
        r"Highest power of a device with overlap: inconclusive \(a difference of \d+% would show\)", unsure
    )
    # Every percentage has its interval, or is what would show.
    for text in (sure, unsure):
        assert len(re.findall("%", text)) == len(re.findall(r"% \w+ \(|% would show|energy \(", text))


def test_a_slowdown_that_is_not_clear_has_no_cause() -> None:
    shown = powered(figures())
    assert "power cap lowers the clock; most of it goes with the clock." in said(shown)
    unclear = msgspec.structs.replace(shown, compute_slowdown=Estimate(0.1, -0.1, 0.3, 8, 4))
    assert "clock" not in said(unclear)


def with_watts(overlapped_w: float):
    mode, other = figures().modes
    scale = overlapped_w / 660.0
    changed = msgspec.structs.replace(mode, avg_w=overlapped_w, peak_w=scale * mode.peak_w)
    return powered(figures(modes=(changed, other)))
