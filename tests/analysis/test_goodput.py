"""Where the time of a run goes, and whether a job waits for input."""

from __future__ import annotations

import numpy as np
import pytest

from overlap_callbacks.analysis.goodput import Spent, goodput_in_words, goodput_sentence, input_bound, shares
from overlap_callbacks.analysis.results.goodput import Goodput
from overlap_callbacks.analysis.step_vectors import PARTS, StepVectors


def vectors(first: int, number: int, **part_ms: float) -> StepVectors:
    steps = np.arange(first, first + number)
    parts = np.zeros((number, len(PARTS)), dtype=np.int64)
    for part, ms in part_ms.items():
        parts[:, PARTS.index(part)] = round(ms * 1e6)
    return StepVectors(steps, steps, parts, np.ones(number, dtype=bool))


def test_times_add_up_and_each_step_counts_once() -> None:
    spent = Spent()
    usual = {"input": 10.0, "forward": 30.0, "backward": 50.0, "optimizer": 10.0}
    spent.add(vectors(0, 100, **usual))
    spent.add(StepVectors.joined([vectors(50, 50, **usual), vectors(100, 1, evaluation=4000.0, forward=1000.0)]))
    found = spent.goodput(1000.0, measuring_s=0.5)
    assert found.total_s == pytest.approx(15.0)
    assert found.begun_s == pytest.approx(985.0)
    assert (found.input_s, found.evaluation_s, found.measuring_s) == (pytest.approx(1.0), pytest.approx(4.0), 0.5)
    assert found.steps_s == pytest.approx(9.5)
    assert sum(shares([found]).values()) == pytest.approx(1.0)


def test_steps_that_begin_again_count_again() -> None:
    spent = Spent()
    spent.add(vectors(100, 10, forward=100.0))
    spent.add(vectors(0, 10, forward=100.0))
    assert spent.goodput(0.0, 0.0).total_s == pytest.approx(2.0)


def start(begun_s: float, total_s: float, **times: float | None) -> Goodput:
    known = {"input_s": 0.0, "evaluation_s": 0.0, "checkpoint_s": 0.0, "paused_s": 0.0, "measuring_s": 0.0} | times
    return Goodput(begun_s=begun_s, total_s=total_s, steps_s=total_s - sum([t or 0.0 for t in known.values()]), **known)


def test_between_two_starts_the_run_waits_for_a_restart() -> None:
    of_run = shares([start(0.0, 60.0, input_s=6.0), start(80.0, 20.0, checkpoint_s=5.0)])
    assert of_run["restart"] == pytest.approx(0.2)
    assert of_run["steps"] == pytest.approx(0.69)
    words = goodput_in_words([start(0.0, 60.0, input_s=6.0), start(80.0, 20.0, checkpoint_s=5.0)])
    assert words == "69.0% in steps, input 6.0%, checkpoints 5.0%, waiting for a restart 20.0%"


def test_a_share_says_what_it_is_a_share_of() -> None:
    """The cost of measuring stands on the same screen: a share of training from one window to the next."""
    sentence = goodput_sentence([start(0.0, 10.0, measuring_s=2.0)])
    assert sentence == (
        "Goodput, of all time since the first step: 80.0% in steps, measuring as charged to max_overhead 20.0%."
    )


def test_input_that_is_not_told_apart_is_not_called_zero() -> None:
    assert goodput_in_words([start(0.0, 10.0, input_s=None)]) == "100.0% in steps; input is within the steps"
    assert goodput_in_words([]) == ""


def test_an_input_bound_job_is_told_and_another_is_not() -> None:
    assert "30.00 ms of a step of 100.0 ms (30.0%) on rank 0, median of 5 steps" in input_bound(
        vectors(0, 10, input=30.0, forward=70.0)
    )
    assert input_bound(vectors(0, 10, input=10.0, forward=90.0)) == ""
    assert input_bound(vectors(0, 10, input_forward_backward=100.0)) == ""  # not told apart
    slow_start = StepVectors.joined([vectors(0, 5, input=900.0, forward=100.0), vectors(5, 6, forward=100.0)])
    assert input_bound(slow_start) == ""
    assert input_bound(vectors(0, 2, input=30.0, forward=70.0)) == ""
