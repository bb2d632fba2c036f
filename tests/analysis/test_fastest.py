"""Which of several runs is the fastest: the sentence, and its error rate for equal runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from overlap_callbacks.analysis.fastest import RunSpeed, fastest
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import LOG, pool


def run(name: str, step_ms: float, half: float | None = 1.0, work_per_s: float | None = None) -> RunSpeed:
    def estimate(value: float) -> Estimate:
        low, high = (None, None) if half is None else (value - half, value + half)
        return Estimate(value, low, high, 64, 32)

    return RunSpeed(name, estimate(step_ms), None if work_per_s is None else estimate(work_per_s))


def test_the_faster_of_two_is_named_with_its_interval_whatever_the_order() -> None:
    slow, fast = run("slow", 100.0), run("fast", 90.0)
    for runs in ((slow, fast), (fast, slow)):
        found = fastest(runs)
        assert found.name == "fast"
        # Half widths of the logarithms: those of 1/100 and 1/90 together, about 0.01 and 0.0111, so 0.0149.
        half = math.hypot(1 / 100, 1 / 90)
        low, high = (1 - 0.9 * math.exp(side * half) for side in (1, -1))
        assert found.headline.sentence == (
            "fast saves 10.0 ms a step against slow: 90.0 ms against 100.0 ms "
            f"(10.0%, {100 * low:.1f} to {100 * high:.1f})."
        )


@pytest.mark.parametrize(
    ("half", "known"),
    [(20.0, "inconclusive (a difference of 29% would show)"), (None, "too few blocks for an interval")],
)
def test_a_difference_within_noise_is_not_claimed(half: float | None, known: str) -> None:
    found = fastest([run("a", 100.0, half), run("b", 98.0, half)])
    assert found.name == ""
    assert found.headline.sentence == f"Which is faster, b or a: {known}; 98.0 ms against 100.0 ms."


def test_the_first_of_several_is_compared_with_all_others() -> None:
    sure = fastest([run("c", 120.0), run("a", 90.0), run("b", 100.0)])
    assert (sure.name, sure.headline.sentence[:36]) == ("a", "a saves 10.0 ms a step against b: 90")
    vague = fastest([run("c", 120.0, 60.0), run("a", 90.0), run("b", 100.0)])
    assert vague.name == ""
    assert vague.headline.sentence.endswith("(10.0%, 8.6 to 11.3). Its lead over c is inconclusive.")
    chance = fastest([run("c", 120.0), run("a", 90.0, 30.0), run("b", 100.0, 30.0)])
    assert chance.headline.sentence.startswith("Which is faster, a or b: inconclusive (a difference of ")


def test_work_a_second_is_compared_where_steps_do_not_do_as_much() -> None:
    small, large = run("small", 50.0, 1.0, 800.0), run("large", 90.0, 1.0, 1000.0)
    found = fastest([small, large], "tokens")
    assert found.name == "large"
    assert found.headline.sentence == (
        "large trains 25.0% more tokens a second than small: 1000 tokens/s against 800.0 tokens/s (24.8 to 25.2)."
    )


def test_a_step_of_no_time_gives_no_verdict() -> None:
    assert fastest([run("a", 0.0), run("b", 1.0)]).name == ""


@pytest.mark.parametrize("runs", [2, 5])
def test_at_most_one_in_twenty_equal_runs_is_called_faster(runs: int) -> None:
    """Runs of six windows each, whose step times scatter by 2 %."""
    chance = np.random.default_rng(17)
    times = 1000
    named = 0
    for _ in range(times):
        found = []
        for number in range(runs):
            windows = [Estimate(value, None, None, 16, 8) for value in 100 * np.exp(chance.normal(0, 0.02, 6))]
            step_ms = pool(windows, LOG)
            assert step_ms is not None
            found.append(RunSpeed(str(number), step_ms))
        named += bool(fastest(found).name)
    # 5 % of 1,000, and three standard deviations of that.
    assert named <= 50 + 3 * math.sqrt(1000 * 0.05 * 0.95)
    # A true lead of 5 % is seen in nearly all: the verdict is not silent.
    sides = [pool([Estimate(v, None, None, 16, 8) for v in m * np.exp(chance.normal(0, 0.02, 6))], LOG)
             for m in (100.0, 95.0) for _ in range(200)]  # fmt: skip
    seen = sum(fastest([RunSpeed("a", a), RunSpeed("b", b)]).name == "b"
               for a, b in zip(sides[:200], sides[200:], strict=True) if a and b)  # fmt: skip
    assert seen > 180
