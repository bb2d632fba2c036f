"""``benchmarks/intervals.py``: its quick form works, and its committed table holds what docs/method.md promises."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import intervals as bench
from benchmarks import measuring_cost as costs
from overlap_callbacks.analysis.results.window import Rhythm
from overlap_callbacks.analysis.run_summary import RunSummary
from tests.samples import aggregate_windows

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_a_quick_run_holds_the_truth_in_most_windows() -> None:
    found, others = bench.measure_noises(["white", "drift"], quick=True), bench.measure_others(quick=True)
    rhythms = bench.measure_rhythms(quick=True)
    for row in (found["white, repeats 4"]["one_window"], rhythms["repeats 4"]["over_all"]["1"]):
        assert row["share"] > 0.8
    assert "one_window" not in found["white, repeats 1"]
    assert all(row["share"] > 0.5 for row in others["profiled"].values())


def test_runs_are_pooled_as_the_library_pools_them() -> None:
    part = bench.Schedule().part(bench.Part.TIMED)
    logs = np.random.default_rng(3).standard_t(3, (4, len(part))) * 0.03  # heavy tails
    windows = [bench._window(part, log, bench.EFFECT, 0) for log in logs]
    found = bench._measured(iter(windows), np.zeros(4))
    point, *halves = bench.run_intervals(found.draw(np.arange(4).reshape(1, 4)))
    reports = [aggregate_windows([window], world_size=1, every_n_steps=500) for window in windows]
    for half, pooling in zip(halves, (bench.ONE_LOOK, bench.ALL_LOOKS), strict=True):
        figure = RunSummary(None, reports).pooled(pooling)["speedup_vs_sequential"]
        expected = [float(np.expm1(end[0])) for end in (point - half, point, point + half)]
        assert [figure.ci_low, figure.value, figure.ci_high] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("known", [(), (Rhythm(3, 1, 50.0, 100.0), Rhythm(7, 2, 50.0, 100.0))])
def test_windows_of_one_design_have_the_librarys_figures(known) -> None:
    part = bench.Schedule(repeats=8).part(bench.Part.TIMED)
    logs = np.random.default_rng(3).standard_t(3, (6, len(part))) * 0.03  # some by logarithms, some by times
    logs += sum((0.4 * rhythm.hits(100 + np.arange(len(part))) for rhythm in known), start=np.zeros(len(part)))
    found = bench.of_one_design(part, logs, 100, known)
    expected = bench._measured(
        iter([bench._window(part, log, bench.EFFECT, 100, known) for log in logs]), np.full(6, bench.EFFECT)
    )
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5)


def test_stalls_are_left_out_of_a_window_that_knows_no_rhythm() -> None:
    part = bench.Schedule().part(bench.Part.TIMED)
    logs = np.random.default_rng(3).normal(0, 0.01, len(part)) + 0.4 * (np.arange(len(part)) % 10 == 4)
    left = bench._without_stalls(part, logs, 100, ())
    hit = [plan.offset for plan in part if plan.counted and plan.offset % 10 == 4]
    assert [plan.offset for plan, kept in zip(part, left, strict=True) if plan.counted > kept.counted] == hit


def test_a_share_below_its_goal_is_reported() -> None:
    assert not bench.judged(900, 1000, bench.STRICT)["met"]
    assert bench.judged(950, 1000, bench.STRICT)["met"]
    assert bench.not_met({"a": {"b": bench.judged(900, 1000, bench.STRICT)}}) == ["a / b"]


def test_the_table_has_no_run_for_all_looks_that_is_wrong_too_often() -> None:
    found = json.loads((BENCHMARKS / "results/intervals.json").read_text())
    of_noises = [row["run"]["wrong_at_some_look"] for row in found["noises"].values()]
    assert all(row["all_looks_intervals"] <= 0.05 for row in of_noises)
    assert all(share <= 0.05 for row in found["ever_wrong"].values() for share in row["by_windows"].values())


@pytest.mark.parametrize("repeats", [4, 8])
def test_the_table_holds_the_truth_in_every_rhythm_from_2_to_64_steps(repeats: int) -> None:
    table = json.loads((BENCHMARKS / "results/intervals.json").read_text())["rhythms"][f"repeats {repeats}"]
    looks = ["first window", "1", "2", "4", "12", "50"]
    assert list(table["over_all"]) == looks
    assert all(row["share"] >= 0.94 for row in table["over_all"].values())
    assert list(table["by_period"]) == [str(period) for period in range(2, 65)]
    for row in table["by_period"].values():
        assert [cell["of"] for cell in row.values()] == [200, 10_000, 200, 200, 200, 200]
        assert min(cell["share"] for cell in row.values()) >= 0.90


# -- cost at equal width


def test_a_default_window_costs_eleven_steps_and_the_second_has_a_long_block() -> None:
    # 24 timed and 8 profiled steps are sequential, 16 are profiled; the library's own work takes 3 steps.
    assert costs.steps_lost(5) == pytest.approx([11.0, 11.0 + 41 * 0.2, 11.0, 11.0, 11.0])


def test_windows_cost_no_more_than_before_at_equal_width_but_in_white_noise() -> None:
    found = costs.at_equal_width(600)
    ratios = {(row["noise"], row["windows"]): row["cost_at_equal_width"] for row in found}
    table = json.loads((BENCHMARKS / "results/measuring-cost.json").read_text())["at_equal_width"]
    assert {(row["noise"], row["windows"]) for row in table} == set(ratios)
    for row in table:
        ratio, place = row["cost_at_equal_width"], (row["noise"], row["windows"])
        assert ratios[place] == pytest.approx(ratio, rel=0.12)
        # docs/method.md names what is dearer: white noise, and runs of many windows, by random effects.
        assert ratio <= (1.12 if row["noise"] == "white" or row["windows"] > 4 else 1.01), place
        assert row["before"]["commit"] == costs.COMMIT_BEFORE
