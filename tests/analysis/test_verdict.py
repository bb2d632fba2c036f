from __future__ import annotations

import msgspec
import pytest

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.power import SlowdownCause
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.analysis.verdict import (
    CONTROL,
    NO_WINDOW_COUNTS,
    NOTHING_YET,
    cause_in_words,
    run_verdict,
    summary,
    verdict,
)
from overlap_callbacks.monitor.schedule import Schedule
from tests.report.runs import run_info, window


def estimate(value: float, low: float | None, high: float | None) -> Estimate:
    return Estimate(value, low, high, 8, 4)


@pytest.mark.parametrize(
    ("speedup", "sentence"),
    [
        (
            (0.136, 0.1, 0.17),
            "Overlap is worth it here: without it, steps take 13.6% longer (95% interval +10.0% to +17.0%).",
        ),
        (
            (-0.02, -0.03, -0.01),
            "Overlap costs more than it saves here: without it, steps take 2.0% less time "
            "(95% interval -3.0% to -1.0%).",
        ),
        (
            (0.01, -0.01, 0.03),
            "Whether overlap is worth it here is undecided: without it, steps take 1.0% longer "
            "(95% interval -1.0% to +3.0%).",
        ),
        ((0.05, None, None), "Without overlap, steps take 5.0% longer: too few blocks to say more."),
    ],
)
def test_the_interval_of_the_speed_up_decides(speedup: tuple[float, float | None, float | None], sentence: str) -> None:
    assert verdict({"speedup_vs_sequential": estimate(*speedup)}) == sentence


@pytest.mark.parametrize(
    ("slowdown", "words"),
    [
        ((0.14, 0.1, 0.2), "; compute kernels run 14.0% slower with overlap."),
        ((0.01, -0.1, 0.1), "; compute kernels run 1.0% slower with overlap, which may be chance."),
        ((-0.01, -0.02, -0.005), "; compute kernels run 1.0% faster with overlap."),
        ((0.14, None, None), "; compute kernels run 14.0% slower with overlap."),
    ],
)
def test_the_slowdown_stands_beside_it(slowdown: tuple[float, float | None, float | None], words: str) -> None:
    figures = {"speedup_vs_sequential": estimate(0.1, 0.05, 0.2), "compute_slowdown": estimate(*slowdown)}
    assert verdict(figures).endswith(words)


def test_without_a_speed_up_nothing_is_claimed() -> None:
    assert verdict({}) == "Not enough was measured to say whether overlap is worth it here."


def test_a_run_without_a_window_that_counts() -> None:
    invalid = msgspec.structs.replace(window(0), valid=False)
    assert run_verdict(RunSummary(run_info(), [])) == NOTHING_YET
    assert run_verdict(RunSummary(run_info(), [invalid])) == NO_WINDOW_COUNTS
    assert run_verdict(RunSummary(None, [])) == NOTHING_YET


def test_a_control_run_is_named_as_one() -> None:
    control = msgspec.structs.replace(window(0), control=True)
    run = run_info(schedule=Schedule(control=True).as_dict())
    assert run_verdict(RunSummary(run, [control])) == CONTROL
    assert run_verdict(RunSummary(None, [control])) == CONTROL


def test_an_unfinished_window_is_named_as_one() -> None:
    cut = msgspec.structs.replace(window(0), complete=False)
    assert run_verdict(RunSummary(run_info(), [cut])).endswith(" That is of one unfinished window.")
    unchecked = msgspec.structs.replace(cut, residual_overlap=None)
    assert run_verdict(RunSummary(run_info(), [], unchecked)).endswith(
        " That is of one unfinished window, whose sequential steps no profile has checked."
    )
    few = msgspec.structs.replace(cut, speedup_vs_sequential=None)
    assert (
        run_verdict(RunSummary(run_info(), [], few))
        == "Too few blocks were measured to say whether overlap is worth it here."
    )


def test_the_cause_comes_with_its_evidence() -> None:
    assert cause_in_words(None) is None
    assert cause_in_words(SlowdownCause("contention", (), 0.1)) == "contention"
    assert cause_in_words(SlowdownCause("contention", ("a", "b"), 0.1)) == "contention: a; b"


def test_the_log_has_a_line_for_each_window() -> None:
    report = msgspec.structs.replace(
        window(0, timed=(), profiled=()),
        valid=True,
        problems=(),
        e2e_overlapped_ms=estimate(412.04, 411.27, 412.8),
        compute_slowdown=estimate(0.143, 0.138, 0.148),
        speedup_vs_sequential=estimate(0.1, None, None),
        residual_overlap=estimate(0.001, None, None),
    )
    assert summary(report) == (
        "overlap window 0 (step 20), overlapped 412.0 ms [411.3 to 412.8 ms], "
        "compute slowdown +14.3% [+13.8% to +14.8%], speed-up of overlap +10.0%, 2 of 2 ranks"
    )
    report = msgspec.structs.replace(report, valid=False, complete=False, control=True)
    assert summary(report).startswith("overlap window 0 (step 20) INVALID INCOMPLETE A/A control, ")


def test_a_comparison_that_no_profile_has_verified_says_so() -> None:
    verified = window(0)
    unverified = msgspec.structs.replace(window(1, profiled=()), residual_overlap=None)
    assert (verified.verified, unverified.verified) == (True, False)
    assert (unverified.valid, unverified.metrics()["overlap/verified"]) == (True, 0.0)
    sentence = "No profile has verified that the sequential steps"
    assert sentence not in run_verdict(RunSummary(run_info(), [verified]))
    assert run_verdict(RunSummary(run_info(), [unverified])).endswith(f" {sentence} were sequential.")
    both = run_verdict(RunSummary(run_info(), [verified, unverified]))
    assert both.endswith(f" {sentence} of 1 of 2 windows were sequential.")
    assert "NOT VERIFIED" in summary(unverified)
    assert "NOT VERIFIED" not in summary(verified)


def test_a_control_run_has_no_sequential_steps_to_verify() -> None:
    control = msgspec.structs.replace(window(0, profiled=()), control=True, residual_overlap=None)
    assert control.verified
    assert "NOT VERIFIED" not in summary(control)
