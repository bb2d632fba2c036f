"""Scaling by numbers that were worked out by hand."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.scaling import (
    RunFigures,
    in_order,
    is_numeric,
    scaled,
    scaling_efficiency,
    scaling_factor,
)


def run(name: str, ranks: int, work_per_s: float | None = None, value: int | str | None = None) -> RunFigures:
    work = None if work_per_s is None else Estimate(work_per_s, None, None, 8, 1)
    return RunFigures(name, ranks if value is None else value, ranks, work_per_s=work)


def test_factor_and_efficiency() -> None:
    # 8 ranks do 3,000 tokens a second, 2 ranks 1,000: three times as many on four times the ranks, 75 %.
    assert scaling_factor(3000, 1000) == 3
    assert scaling_efficiency(3, ranks=8, base_ranks=2) == 0.75


def test_runs_are_held_against_the_smallest_job() -> None:
    found = scaled([run("a", 8, 3000), run("b", 2, 1000), run("c", 4, 2000), run("d", 16)])
    assert found.keys() == {"a", "b", "c"}
    assert found["a"] == (3, 0.75)
    assert found["b"] == (1, 1)
    assert found["c"] == (2, 1)


def test_of_several_smallest_jobs_the_mean_is_the_base() -> None:
    found = scaled([run("a", 2, 900), run("b", 2, 1100), run("c", 4, 1500)])
    assert found["c"] == (1.5, 0.75)
    assert (found["a"].factor, found["b"].factor) == (pytest.approx(0.9), pytest.approx(1.1))


def test_runs_of_one_size_do_not_scale() -> None:
    assert scaled([run("a", 2, 900), run("b", 2, 1100)]) == {}
    assert scaled([run("a", 2), run("b", 4)]) == {}
    assert scaled([run("a", 2, 1000), run("b", 4)]) == {}
    assert scaled([run("a", 0, 1000), run("b", 4, 1000)]) == {}, "no job has no ranks"


def test_places_stand_by_size_or_by_the_alphabet() -> None:
    numbers = [run("a", 1, value=16), run("b", 1, value=4), run("c", 1, value=8)]
    assert is_numeric(numbers)
    assert [each.name for each in in_order(numbers)] == ["b", "c", "a"]
    words = [run("a", 1, value="fp32"), run("b", 1, value="bf16"), run("c", 1, value=8)]
    assert not is_numeric(words)
    assert [each.name for each in in_order(words)] == ["c", "b", "a"]
