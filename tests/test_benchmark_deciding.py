"""``benchmarks/deciding.py``: some of its jobs keep what they should."""

from __future__ import annotations

import numpy as np

from benchmarks import deciding as bench


def jobs_of(scenario: str, number: int = 8) -> list[bench.Replay]:
    errors = bench.recorded()
    return [bench.replay(np.random.default_rng([7, job]), bench.SCENARIOS[scenario], errors) for job in range(number)]


def test_the_best_of_four_arms_is_kept_within_the_budget() -> None:
    jobs = jobs_of("four arms")
    assert sum(job.kept == "faster" for job in jobs) >= 6
    assert all(job.over_s <= 0 for job in jobs)
    assert np.median([job.won_s for job in jobs]) > 0


def test_nothing_is_kept_where_nothing_differs() -> None:
    assert sum(bool(job.chosen) for job in jobs_of("nothing differs")) <= 1


def test_an_arm_that_turns_slower_is_given_up_before_it_costs_what_it_won() -> None:
    for job in jobs_of("turns slower"):
        assert job.kept != "faster"
        if job.chosen[:1] and job.chosen[0][1] < 40:
            assert job.won_s > 0
