"""``benchmarks/intervals.py``: its quick form works, and its committed table holds what docs/method.md promises."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import intervals as bench
from overlap_callbacks.analysis.run_summary import RunSummary
from tests.samples import aggregate_windows

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_a_quick_run_holds_the_truth_in_most_windows() -> None:
    found = bench.measure(quick=True)
    for row in (found["noises"]["white, repeats 4"]["one_window"], found["rhythms"]["over_all"]["1"]):
        assert row["share"] > 0.8
    assert "one_window" not in found["noises"]["white, repeats 1"]


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


def test_a_share_below_its_goal_is_reported() -> None:
    assert not bench.judged(900, 1000, bench.STRICT)["met"]
    assert bench.judged(950, 1000, bench.STRICT)["met"]
    assert bench.not_met({"a": {"b": bench.judged(900, 1000, bench.STRICT)}}) == ["a / b"]


def test_the_table_has_no_run_for_all_looks_that_is_wrong_too_often() -> None:
    found = json.loads((BENCHMARKS / "results/intervals.json").read_text())
    of_noises = [row["run"]["wrong_at_some_look"] for row in found["noises"].values()]
    assert all(row["all_looks_intervals"] <= 0.05 for row in of_noises)
    assert all(share <= 0.05 for row in found["ever_wrong"].values() for share in row["by_windows"].values())
    assert all(row["share"] >= 0.94 for row in found["rhythms"]["over_all"].values())
