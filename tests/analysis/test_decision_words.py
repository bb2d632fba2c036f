"""What was decided about arms, in words."""

from __future__ import annotations

from overlap_callbacks.analysis.decision_words import decision_in_words
from overlap_callbacks.analysis.results.decision import Decision, LeftOut, Why, Winner
from overlap_callbacks.analysis.results.estimate import Estimate


def decision(**fields: object) -> Decision:
    made = {
        "window": 9,
        "first_step": 20,
        "keeps": True,
        "wrong": 0.05,
        "budget": 0.005,
        "cost_s": 0.0,
        "training_s": 0.0,
    }
    return Decision(**{**made, **fields})


FAST = Winner("fast", 9, 6, Estimate(0.048, 0.031, 0.066, 96, 6), "fast()")
SLOW = LeftOut("slow", 4, Why.BEHIND, 1, None, "fast")


def test_an_arm_that_is_kept_has_its_gain_its_certainty_and_its_line() -> None:
    assert decision_in_words(decision(best=FAST, left=("fast",), left_out=(SLOW,), cost_s=1.234, training_s=240.0)) == (
        "fast is turned on between windows, as the budget allows, with a speed-up of +4.8% (+3.1% to +6.6%) over 6 "
        "windows; to have it in all steps: fast(); no longer measured: slow (slower than fast); "
        "arms cost at most 1.23 s in 4 min of training so far (0.5% and the dearest window are allowed)"
    )


def test_a_recommendation_turns_nothing_on() -> None:
    assert decision_in_words(decision(keeps=False, best=FAST)).startswith("fast is recommended, with")
    assert decision_in_words(decision(advised=FAST)).startswith("fast is recommended, with")


def test_without_a_winner_it_says_what_is_still_measured() -> None:
    assert decision_in_words(decision(left=("a", "b"))) == (
        "none is known to be faster than the job as configured; still measured: a and b"
    )
    assert decision_in_words(decision()) == "none is faster than the job as configured"
