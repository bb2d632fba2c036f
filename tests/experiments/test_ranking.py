"""Which combination is fastest, and when nothing is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from overlap_callbacks.experiments.tune.combinations import Axis, Kind
from overlap_callbacks.experiments.tune.ranking import ranked
from overlap_callbacks.experiments.tune.sweep import Tune
from overlap_callbacks.experiments.tune.view import line_to_use, verdict
from tests.experiments.tune_results import CTAS, results, tuning

HERE = Path("here")


def test_a_combination_that_is_faster_beyond_its_interval_wins() -> None:
    found = results(HERE, [(100, 101), (50.1, 50), (80, 81)])
    ranking = ranked(found)
    assert [row.number for row in ranking.rows] == [1, 2, 0]
    assert (ranking.baseline, ranking.winner, ranking.as_good) == (0, 1, ())
    change = ranking.rows[0].change
    assert change is not None
    assert change.value == pytest.approx(-0.502, abs=0.002)
    words = verdict(found, ranking)
    assert words.startswith("bucket-mb=5 saves 50.5 ms a step against bucket-mb=25: 50.0 ms against 100.5 ms (50.2%, ")
    assert line_to_use(found, ranking) == "torchrun train.py --bucket-mb 5"


def test_others_that_are_as_good_are_named() -> None:
    found = results(HERE, [(100, 101), (50, 51), (50.6, 50.5)])
    assert verdict(found, ranked(found)).endswith("Inconclusive against it: bucket-mb=1.")


def test_without_a_difference_there_is_no_line_to_use() -> None:
    found = results(HERE, [(100, 102), (99, 101), (101, 100)])
    ranking = ranked(found)
    assert line_to_use(found, ranking) is None
    assert verdict(found, ranking).startswith("Which is faster, bucket-mb=5 or bucket-mb=25: inconclusive ")


def test_a_first_combination_that_is_faster_than_all_is_said_to_be() -> None:
    found = results(HERE, [(50, 50.2), (100, 101), (90, 91)])
    assert verdict(found, ranked(found)).startswith("bucket-mb=25 is the fastest")


def test_one_run_each_shows_nothing() -> None:
    found = results(HERE, [(100,), (50,)])
    assert verdict(found, ranked(found)).startswith("Inconclusive so far")


def test_a_combination_that_failed_is_a_row_that_never_wins() -> None:
    found = results(HERE, [(), (50, 50.1), (80, 81)], failed=(0, 1))
    ranking = ranked(found)
    assert ranking.baseline == 2
    assert {row.number for row in ranking.failed} == {0, 1}
    assert ranking.winner is None
    assert verdict(found, ranking).startswith("Only bucket-mb=1 gave step times")
    assert verdict(found, ranked(results(HERE, [], failed=(0, 1, 2)))) == "No combination was measured."


def test_a_value_left_as_it_is_is_not_in_the_line() -> None:
    found = results(HERE, [(100, 101), (50, 50.2), (40, 40.1)], CTAS)
    assert line_to_use(found, ranked(found)) == "NCCL_MAX_CTAS=16 torchrun train.py"


def test_where_nothing_differs_a_winner_is_found_in_few_tunings() -> None:
    """Of 95 in 100 tunings without any difference, none may name a winner, however many values were tried."""
    chance = np.random.default_rng(0)
    axis = Axis(Kind.ENV, "X", tuple("abcdefgh"))
    num_tunings = 300
    winners = sum(
        ranked(results(HERE, chance.normal(100, 2, (8, 4)).tolist(), axis)).winner is not None
        for _ in range(num_tunings)
    )
    # A winner is a difference on one side only: 2.5 in 100, and some chance.
    assert winners / num_tunings < 0.05
    assert len(Tune(HERE, tuning(axis)).combinations) == 8
