"""``benchmarks/against.py``: its table meets the goals, and replays of the real windows in it go as the table says."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.experiments.against import Side, judged

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
RESULT = json.loads((FOLDER / "results" / "against.json").read_text())
ROWS = RESULT["rows"]


@pytest.fixture(scope="module")
def against() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        spec = importlib.util.spec_from_file_location("against_benchmark", FOLDER / "against.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "against_benchmark", module)
        spec.loader.exec_module(module)
    return module


def test_of_a_thousand_equal_pairs_one_in_a_hundred_at_most_is_a_regression(against: ModuleType) -> None:
    assert [{name: row[name] for name in against.Row._fields} for row in ROWS] == [
        one._asdict() for one in against.ROWS
    ]
    for row in ROWS:
        assert row["times"] == sum(row["equal"].values()) == sum(row["longer"].values()) == 1000
        assert against.failures(row) == [], row
    # It is not right by silence: rows of either unit have data enough.
    assert {row["baselines"] > 1 for row in ROWS if row["data_enough"]} == {True, False}
    # Runs of one job, as in the sources, scatter by 0.9 %.
    means = [np.mean([step[0] for step in source["steps"]]) for source in RESULT["sources"]]
    assert np.std(np.log(means), ddof=1) == pytest.approx(0.009, abs=0.001)


def test_a_row_that_misses_a_goal_is_told(against: ModuleType) -> None:
    row = {**ROWS[-1], "equal_and_anything_slower": 0, "data_enough": True}
    longer = {"regression": 949, "no regression": 11, "not enough data": 40}
    found = against.failures({**row, "equal": {"regression": 11}, "longer": longer})
    assert found == ["false regressions", "missed", "not found"]
    assert against.failures({**row, "equal": {"regression": 10}, "longer": {"regression": 950}}) == []
    # Without data enough, to say so is right, and to say no regression is not.
    few, row = {"regression": 2, "not enough data": 997}, {**row, "equal": {}, "data_enough": False}
    assert against.failures({**row, "longer": few}) == []
    assert against.failures({**row, "longer": {**few, "no regression": 1}}) == ["missed"]


@pytest.mark.parametrize("place", [2, 3, 6])
def test_replays_are_judged_as_the_command_judges(against: ModuleType, place: int) -> None:
    """The first replays of a row, by arrays and one by one."""
    row = against.ROWS[place]
    rng = np.random.default_rng(5)
    run, baselines = against.replays(rng, against.arrays(RESULT["sources"]), row, 20)
    half_of_all, seen = against.changes(run, baselines, 0, against.CONFIDENCE)[1], []
    for replay in range(20):
        of_run, *of_others = [side(drawn, replay) for drawn in (run, *baselines)]
        found = judged(of_run, of_others)
        assert found.change is not None
        low, high = found.change.ci_low, found.change.ci_high
        seen.append((math.log1p(high) - math.log1p(low)) / 2 if low is not None and high is not None else math.inf)
    # An end beyond what a float holds, or below nothing, is no interval.
    wide = ~np.isfinite(seen)
    assert np.asarray(seen)[~wide] == pytest.approx(half_of_all[~wide], rel=1e-4)  # errors have six digits
    assert (half_of_all[wide] > 5).all()


def side(drawn: Any, replay: int) -> Side:
    return Side(
        [Estimate(*each[:1], None, None, 16, 8, *each[1:]) for each in drawn.times[:, 0, replay].T.tolist()], {}
    )


def test_a_replay_finds_nothing_where_nothing_differs(against: ModuleType) -> None:
    found = against.replayed(RESULT["sources"], against.Row(1, 64, 0.0), 100)
    assert found["equal"]["regression"] <= 3  # 1 in 200 by design
    assert found["longer"]["no regression"] <= 3
