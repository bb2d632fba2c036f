from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from overlap_callbacks.analysis.bottleneck import bottleneck_of
from overlap_callbacks.analysis.headline import (
    CONTROL,
    NO_SEQUENTIAL_ARM,
    NOTHING_YET,
    answer,
    cause_in_words,
    run_headline,
    run_verdict,
    settled_in_words,
    summary,
)
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import SlowdownCause
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.settled import Settled, Verdict
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import Facts
from overlap_callbacks.report.views.quality import quality
from tests.report.runs import run_info, window


def estimate(value: float, low: float | None, high: float | None) -> Estimate:
    return Estimate(value, low, high, 8, 4)


@pytest.mark.parametrize(
    ("speedup", "sentence", "state"),
    [
        # 1.25 times as long without overlap: with it, a fifth shorter.
        ((0.25, 0.1, 0.6), "Overlap saves 25.0 ms a step: 100.0 ms with it, 125.0 ms without (20.0%, 9.1 to 37.5).",
         "clear"),
        ((-0.02, -0.03, -0.01), "Overlap costs 2.00 ms a step: 100.00 ms with it, 98.00 ms without (2.0%, 1.0 to 3.1).",
         "clear"),
        ((0.01, -0.01, 0.03), "What overlap saves: inconclusive (a difference of 2% would show); 100.0 ms with it, "
         "101.0 ms without.", "inconclusive"),
        ((0.2, -0.9, 9.0), "What overlap saves: inconclusive (even a difference of 100% would not show); 100.0 ms with "
         "it, 120.0 ms without.", "inconclusive"),
        ((0.001, -0.003, 0.005), "What overlap saves: within noise (no difference above 0.5%); 100.0 ms with it, "
         "100.1 ms without.", "within noise"),
        # A bound is rounded up; what is clear, however small, is not shown as nothing.
        ((0.0, -0.00341, 0.0001), "What overlap saves: within noise (no difference above 0.4%); 100.0 ms with it, "
         "100.0 ms without.", "within noise"),
        ((0.0, 0.0, 0.0), "What overlap saves: within noise (no difference above 0.1%); 100.0 ms with it, "
         "100.0 ms without.", "within noise"),
        ((0.0003, 0.0002, 0.0004),
         "Overlap saves 0.030 ms a step: 100.000 ms with it, 100.030 ms without (0.03%, 0.02 to 0.04).", "clear"),
        ((0.25, None, None), "What overlap saves: too few blocks for an interval; 100.0 ms with it, 125.0 ms without.",
         "not measured"),
    ],
)  # fmt: skip
def test_a_saving_is_in_ms_and_in_percent_of_a_step_without_overlap_and_only_if_it_is_clear(
    speedup: tuple[float, float | None, float | None], sentence: str, state: str
) -> None:
    figures = {"speedup_vs_sequential": estimate(*speedup), "e2e_overlapped_ms": estimate(100.0, 99.0, 101.0)}
    found = answer(figures)
    assert (found.sentence, found.state) == (sentence, state)
    saved, less, more = (float(ms) for ms in re.findall(r"([\d.]+) ms", sentence)) if state == "clear" else (0, 0, 0)
    assert saved == pytest.approx(abs(more - less))  # a reader who subtracts finds the same
    del figures["e2e_overlapped_ms"]
    share = re.search(r"\(([\d.]+%), (.*)\)", sentence)
    verb = "saves" if speedup[0] > 0 else "costs"
    short = f"Overlap {verb} {share[1]} of a step without it ({share[2]})" if share else sentence.partition("; 1")[0]
    assert answer(figures).sentence == f"{short}."


@pytest.mark.parametrize(
    ("slowdown", "words"),
    [
        ((0.14, 0.1, 0.2), "Compute slowdown: kernels take 14.0% longer than without overlap (10.0 to 20.0)."),
        ((0.01, -0.05, 0.05), "Compute slowdown: inconclusive (a difference of 5% would show)."),
        ((0.0, -0.004, 0.001), "Compute slowdown: within noise (no difference above 0.4%)."),
        ((0.0003, 0.0002, 0.0004), "Compute slowdown: kernels take 0.03% longer than without overlap (0.02 to 0.04)."),
        ((-0.01, -0.02, -0.005), "Compute slowdown: kernels take 1.0% less than without overlap (0.5 to 2.0)."),
        ((0.14, None, None), "Compute slowdown: too few blocks for an interval."),
    ],
)
def test_the_slowdown_follows(slowdown: tuple[float, float | None, float | None], words: str) -> None:
    found = answer({"speedup_vs_sequential": estimate(0.1, 0.05, 0.2), "compute_slowdown": estimate(*slowdown)})
    assert found.also == (words,)


def profiled(exposed: tuple[float, ...], hidden: tuple[float, ...], ratio: float = 0.4) -> dict[str, Estimate]:
    """A profiled step of 100 ms."""
    return {
        "compute_busy_ms": estimate(95 - exposed[0], None, None),
        "idle_ms": estimate(5.0, None, None),
        "exposed_comm_ms": estimate(*exposed),
        "hidden_comm_fraction": estimate(*hidden),
        "overlap_ratio": estimate(ratio, ratio, ratio),
        "comm_ms": estimate(40.0, 30.0, 50.0),
    }


@pytest.mark.parametrize(
    ("exposed", "hidden", "sentence"),
    [
        ((19.0, 11.0, 27.0), (0.6, 0.55, 0.65),
         "60% of communication is hidden; exposed communication takes 19% of a step (11 to 27; profiled steps)."),
        ((19.0, 11.0, 27.0), (0.6, 0.3, 0.9),
         "60% (30 to 90) of communication is hidden; exposed communication takes 19% of a step (11 to 27; profiled "
         "steps)."),
        ((19.0, 11.0, 27.0), (0.6, -0.1, 1.0), "Exposed communication takes 19% of a step (11 to 27; profiled steps)."),
        ((19.0, 11.0, 27.0), (0.06, -0.1, 0.213),
         "At most 22% of communication is hidden; exposed communication takes 19% of a step (11 to 27; profiled "
         "steps)."),
        ((33.0, -5.0, 76.0), (0.6, 0.0, 1.0), "Exposed communication: inconclusive (up to 76% of a profiled step)."),
        ((0.1, 0.0, 0.4), (0.99, 0.98, 1.0),
         "99% of communication is hidden; exposed communication: within noise (below 0.4% of a profiled step)."),
        # Never all that is not all, and no end of 0 where the interval excludes it.
        ((0.0, 0.0, 0.0), (0.998, 0.99, 1.0),
         "99.8% of communication is hidden; exposed communication: within noise (below 0.1% of a profiled step)."),
        ((19.0, 0.3, 40.0), (0.998, None, None),
         "99.8% of communication is hidden; exposed communication takes 19.0% of a step (0.3 to 40.0; profiled "
         "steps)."),
        ((33.0, -5.0, 76.4), (0.6, 0.0, 1.0), "Exposed communication: inconclusive (up to 77% of a profiled step)."),
        ((19.0, None, None), (0.6, None, None),
         "60% of communication is hidden; exposed communication takes 19% of a step (too few blocks; profiled steps)."),
    ],
)  # fmt: skip
def test_what_is_exposed_comes_first_with_its_base_and_how_certain_it_is(exposed, hidden, sentence) -> None:
    figures = profiled(exposed, hidden)
    found = answer({**figures, "speedup_vs_sequential": estimate(0.1, 0.05, 0.2)})
    assert found.sentence == sentence
    assert found.also == ("Overlap saves 9.1% of a step without it (4.8 to 16.7).",)
    del figures["comm_ms"]
    assert answer(figures).sentence == sentence


def test_where_nothing_overlaps_the_headline_says_that_and_what_to_try() -> None:
    figures = profiled((45.0, 41.0, 49.0), (0.0, 0.0, 0.0), 0.0)
    sentence = "Nothing overlaps in this job: all communication (45% of a profiled step, 41 to 49) is exposed."
    assert (answer(figures).sentence, answer(figures).state) == (sentence, "nothing overlaps")
    report = msgspec.structs.replace(window(0), **figures)
    for settings, todo in (
        ({"ddp_bucket_cap_bytes": 1}, "Lower DDP's bucket_cap_mb"),
        (
            {"ddp_bucket_cap_bytes": 25 * 2**20, "parameters": 3 * 2**19, "parameter_types": "float32"},
            "Lower DDP's bucket_cap_mb, so that reductions begin during the backward pass. Try 1.5 or 3 MiB.",
        ),
        ({"zero_stage": 2}, "Set overlap_comm to true"),
        ({"zero_stage": 2, "zero_overlap_comm": False}, "Set overlap_comm to true"),
        ({"zero_stage": 3, "zero_overlap_comm": True}, "Lower ZeRO's reduce_bucket_size"),
        (
            {"ddp_bucket_size": 1, "ddp_overlap_grad_reduce": False},
            "Reduce gradients during the backward pass: Megatron",
        ),
        ({"ddp_bucket_size": 1, "ddp_overlap_grad_reduce": True}, "Lower Megatron's --ddp-bucket-size"),
        ({"fsdp_units": 1}, "Wrap layers as FSDP units"),
        ({}, "Issue collectives with async_op=True"),
    ):
        found = run_headline(RunSummary(run_info(configuration=settings), [report]))
        assert found.sentence.startswith("Nothing overlaps in this job: all communication (")
        assert (found.state, found.what_to_do.startswith(todo)) == ("nothing overlaps", True)
    # Without communication, or where some is hidden, it is not so.
    silent = {**figures, "comm_ms": estimate(0.0, 0.0, 0.0)}
    some = {**figures, "overlap_ratio": estimate(0.0, 0.0, 0.04)}
    assert all("Nothing overlaps" not in answer(other).sentence for other in (silent, some))


def test_without_a_speed_up_nothing_is_claimed() -> None:
    found = answer({})
    assert found.sentence == "Not enough was measured to say what overlap saves here."
    assert found.why
    assert found.what_to_do


RESIDUAL = (
    "in sequential steps 30.0% of compute ran during communication, above 2%: some communication escaped the gate "
    "(CUDA graphs)"
)


@pytest.mark.parametrize(
    ("problem", "todo"),
    [
        (RESIDUAL, "Switch off for a measurement what this library cannot hold back"),
        ("in sequential steps 55% of communication time ran during compute, above 30%", "Switch off for a measurement"),
        ("rank 2 measured something else than rank 0: the schedule differs", "Give all ranks the same Schedule"),
        ("of another kind", "Look up the notes in docs/troubleshooting.md."),
    ],
)
def test_a_run_whose_windows_are_invalid_says_so_and_why_and_what_to_do(problem: str, todo: str) -> None:
    invalid = [msgspec.structs.replace(window(i), valid=False, problems=(problem, "another")) for i in range(2)]
    found = run_headline(RunSummary(run_info(), invalid))
    assert found.sentence == "None of the 2 windows counts, so what overlap saves here is not known."
    assert found.why == f"2 windows are not valid: {problem}."
    assert found.what_to_do.startswith(todo)
    assert found.more == (f"Why: {found.why}", f"What to do: {found.what_to_do}")
    alone = run_headline(RunSummary(run_info(), invalid[:1]))
    assert alone.sentence.startswith("The only window does not count")
    assert run_verdict(RunSummary(run_info(), invalid)) == found.text


def test_if_all_windows_were_left_out_the_reason_replaces_an_answer() -> None:
    reason = "its recorded steps were skipped (its gradients overflowed)"
    found = run_headline(RunSummary(run_info(), [], left_out=[reason] * 3))
    assert found.sentence == "Nothing has been measured: all 3 windows were left out."
    assert found.why == f"{reason}."
    assert found.what_to_do.startswith("Start windows where steps are no longer skipped")
    one = run_headline(RunSummary(run_info(), [], left_out=["why"]))
    assert one.sentence == "Nothing has been measured: the only window was left out."


def test_a_run_that_has_just_begun_says_so() -> None:
    for run in (run_info(), None):
        found = run_headline(RunSummary(run, []))
        assert (found.sentence, found.what_to_do) == (NOTHING_YET, "Let the job run on until a window ends.")
    assert run_headline(RunSummary(run_info(), []), num_arms=1).sentence == NO_SEQUENTIAL_ARM


def test_a_control_run_is_named_as_one() -> None:
    control = msgspec.structs.replace(window(0), control=True)
    run = run_info(schedule=Schedule(control=True).as_dict())
    assert run_verdict(RunSummary(run, [control])) == CONTROL
    assert run_verdict(RunSummary(None, [control])) == CONTROL


def test_an_unfinished_run_says_so_and_why_and_what_to_do() -> None:
    cut = msgspec.structs.replace(window(0), complete=False, problems=("an exception in the user's step",))
    found = run_headline(RunSummary(run_info(), [cut]))
    assert found.sentence.startswith("Unfinished: 72.8% of communication is hidden; ")
    assert found.also[0].startswith("Overlap saves 56.0 ms a step: ")
    assert found.why == "no window is whole, and this is window 0 alone (an exception in the user's step)."
    assert found.what_to_do == "Let the job run on until a window ends."
    unchecked = msgspec.structs.replace(cut, residual_overlap=None)
    assert run_headline(RunSummary(run_info(), [], unchecked)).why.endswith(
        ", and no profile has checked its sequential steps."
    )
    few = msgspec.structs.replace(cut, speedup_vs_sequential=None)
    found = run_headline(RunSummary(run_info(), [], few))
    assert found.sentence == "Unfinished: too few blocks were measured to say what overlap saves."


def test_a_run_of_one_window_says_so_next_to_its_intervals() -> None:
    said = " All of this rests on one window."
    assert run_headline(RunSummary(run_info(), [window(0)])).interval.endswith(said)
    assert said not in run_headline(RunSummary(run_info(), [window(0), window(1)])).text
    states = [run_headline(RunSummary(run_info(), [window(i) for i in range(n)])).state for n in (1, 2)]
    assert states == ["one window", "clear"]


def test_the_headline_says_at_how_many_looks_its_intervals_hold() -> None:
    windows = [window(0), window(1)]
    assert run_headline(RunSummary(run_info(), windows)).interval == "95% intervals."
    found = run_headline(RunSummary(run_info(), windows, running=True))
    assert found.interval == "95% intervals, valid however often you look."
    assert "Windows differ" not in found.interval


def test_windows_that_differ_are_said_to() -> None:
    def with_speedup(number: int, value: float) -> OverlapReport:
        return msgspec.structs.replace(
            window(number), speedup_vs_sequential=Estimate(value, value - 0.01, value + 0.01, 8, 16, 0.004, 11.0)
        )

    windows = [with_speedup(number, value) for number, value in enumerate((0.05, 0.3, 0.1))]
    assert "Windows differ by more than their intervals say" in run_headline(RunSummary(run_info(), windows)).interval


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
        "overlap window 0 (step 20): What overlap saves: too few blocks for an interval; 412.0 ms with it, 453.2 ms "
        "without. Compute slowdown: kernels take 14.3% longer than without overlap (13.8 to 14.8). 2 of 2 ranks."
    )
    report = msgspec.structs.replace(report, speedup_vs_sequential=estimate(0.1, 0.095, 0.105))
    said = run_headline(RunSummary(run_info(), [report]))
    assert summary(report) == f"overlap window 0 (step 20): {said.sentence} {said.also[0]} 2 of 2 ranks."
    report = msgspec.structs.replace(report, valid=False, complete=False, problems=("residual overlap 0.3",))
    assert summary(report) == (
        "overlap window 0 (step 20) INVALID INCOMPLETE: It does not count: residual overlap 0.3. What to do: Switch "
        "off for a measurement what this library cannot hold back (CUDA graphs, symmetric memory, communication of "
        "other threads), or compare two traces: overlap compare. 2 of 2 ranks."
    )
    report = msgspec.structs.replace(report, valid=True, complete=True, control=True)
    assert summary(report) == f"overlap window 0 (step 20) A/A control: {CONTROL} 2 of 2 ranks."


def test_a_comparison_that_no_profile_has_verified_says_so() -> None:
    verified = window(0)
    unverified = msgspec.structs.replace(window(1, profiled=()), residual_overlap=None)
    assert (verified.verified, unverified.verified) == (True, False)
    assert (unverified.valid, unverified.metrics()["overlap/verified"]) == (True, 0.0)
    sentence = "no profile has verified that the sequential steps"
    assert sentence not in run_verdict(RunSummary(run_info(), [verified]))
    for profiled, what in (
        (0, "Set profiled_steps to 4."),
        (4, "Steps were to be profiled, but their profile is missing."),
    ):
        run = run_info(schedule=Schedule(profiled_steps=profiled).as_dict())
        found = run_headline(RunSummary(run, [unverified]))
        assert found.why == f"{sentence} were sequential."
        assert found.what_to_do.startswith(what)
    both = run_headline(RunSummary(run_info(), [verified, unverified]))
    assert both.why == f"{sentence} of 1 of 2 windows were sequential."
    assert "NOT VERIFIED" in summary(unverified)
    assert "NOT VERIFIED" not in summary(verified)


def test_a_control_run_has_no_sequential_steps_to_verify() -> None:
    control = msgspec.structs.replace(window(0, profiled=()), control=True, residual_overlap=None)
    assert control.verified
    assert "NOT VERIFIED" not in summary(control)


def settled(verdict: Verdict, at_least: float | None = None, num_windows: int = 2) -> Settled:
    """Without overlap a step takes 25 % longer once that has lasted, and 10 % in blocks of three steps."""
    return Settled(0.25, 0.2, 0.3, 0.1, 3, 8.0, verdict, at_least, 27, 194, num_windows)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            settled(Verdict.SETTLED),
            "Settled: 20.0% shorter (16.7% to 23.1% shorter); in blocks of 3 steps 9.1% shorter.",
        ),
        (
            settled(Verdict.NOT_SETTLED, 0.2),
            "Not settled after 27 steps: at least 16.7% shorter; in blocks of 3 steps 9.1% shorter.",
        ),
        (settled(Verdict.NOT_SETTLED), "Not settled after 27 steps: in blocks of 3 steps 9.1% shorter."),
        (
            settled(Verdict.SHORT),
            "No change along a block is seen: settled 20.0% shorter (16.7% to 23.1% shorter); in blocks of 3 steps "
            "9.1% shorter.",
        ),
        # Of a difference that its own interval does not support, no percentage is printed.
        (
            msgspec.structs.replace(settled(Verdict.SETTLED), ci_low=-0.05),
            "Settled: inconclusive (a difference of 14% would show); in blocks of 3 steps 9.1% shorter.",
        ),
        (
            msgspec.structs.replace(settled(Verdict.SETTLED), value=-0.98, ci_low=-0.999, ci_high=800.0),
            "Settled: inconclusive (even a difference of 100% would not show); in blocks of 3 steps 9.1% shorter.",
        ),
    ],
)
def test_the_settled_difference_has_its_own_line(found: Settled, words: str) -> None:
    assert settled_in_words(found) == words
    report = msgspec.structs.replace(window(0), settled=found)
    (line,) = [part for part in run_headline(RunSummary(run_info(), [report])).more if part.startswith(words)]
    advice = bottleneck_of([report])
    assert advice is not None
    assert summary(report).endswith(f"{words} To try first: {advice.advice[0].what}")
    assert run_verdict(RunSummary(run_info(), [report])).endswith(f" To try first: {advice.advice[0].what}")
    # Where something follows a mode slowly, that of kernels was not waited for.
    slow = found.verdict in (Verdict.SETTLED, Verdict.NOT_SETTLED)
    assert line.removeprefix(words) == (" The slowdown is of short blocks, not settled." if slow else "")
    alone = msgspec.structs.replace(report, compute_slowdown=None)
    assert words in run_headline(RunSummary(run_info(), [alone])).more


def test_a_settled_difference_that_is_not_resolved_is_no_news() -> None:
    found = msgspec.structs.replace(settled(Verdict.SHORT), ci_low=-0.8, ci_high=100.0)
    record = Record(Path(), [run_info()], [msgspec.structs.replace(window(0), settled=found)], ended=True)
    assert "esolved" not in run_headline(record.summary).text + summary(record.windows[-1])
    (facts,) = [block for block in quality(record).blocks if isinstance(block, Facts)]
    words = "Not resolved: the interval is too wide to show whether the difference changes."
    assert dict(facts.facts)["Change along a block"] == words == settled_in_words(found)


def test_a_settled_difference_is_the_headline_and_others_are_not() -> None:
    def sentence(verdict: Verdict) -> str:
        report = msgspec.structs.replace(window(0), settled=settled(verdict))
        return run_headline(RunSummary(run_info(), [report])).also[0]

    plain = run_headline(RunSummary(run_info(), [window(0)])).also[0]
    assert "(20.0%, 16.7 to 23.1)" in sentence(Verdict.SETTLED)
    assert sentence(Verdict.SHORT) == sentence(Verdict.NOT_SETTLED) == plain
    unsettled = msgspec.structs.replace(window(0), settled=settled(Verdict.NOT_SETTLED))
    assert run_headline(RunSummary(run_info(), [unsettled])).state == "not settled"


ALL_LOOKS, ONE_LOOK = "95% intervals, valid however often you look", "95% intervals"


@pytest.mark.parametrize(
    ("running", "words"),
    [(True, f"{ALL_LOOKS}."), (False, f"{ONE_LOOK} (the saving's: valid however often you look).")],
)
def test_a_settled_headline_has_the_interval_for_all_looks_and_says_so(running: bool, words: str) -> None:
    known = msgspec.structs.replace(settled(Verdict.SETTLED), all_looks_low=0.1, all_looks_high=0.6)
    report = msgspec.structs.replace(window(0), settled=known)
    found = run_headline(RunSummary(run_info(), [report], running=running))
    assert words in found.interval
    assert "(20.0%, 9.1 to 37.5)" in found.also[0]
    assert "(9.1% to 37.5% shorter)" in found.settled


@pytest.mark.parametrize(
    ("running", "words"), [(True, f"{ALL_LOOKS} (the saving's: for one look)."), (False, f"{ONE_LOOK}.")]
)
def test_a_settled_headline_of_an_earlier_version_says_that_it_is_for_one_look(running: bool, words: str) -> None:
    report = msgspec.structs.replace(window(0), settled=settled(Verdict.SETTLED))
    assert words in run_headline(RunSummary(run_info(), [report], running=running)).interval
    assert ALL_LOOKS in run_headline(RunSummary(run_info(), [window(0)], running=True)).interval


def test_a_runs_settled_difference_is_of_the_start_that_knows_most_windows() -> None:
    known = [settled(Verdict.SETTLED, num_windows=number) for number in (1, 2, 1, 2)]
    windows = [msgspec.structs.replace(window(i), settled=each) for i, each in enumerate(known)]
    # The job was started again before the third window.
    assert RunSummary(run_info(), windows[:3]).settled() is known[1]
    assert RunSummary(run_info(), windows).settled() is known[3]
    assert RunSummary(run_info(), [window(0)]).settled() is None


def test_a_control_run_says_nothing_of_it() -> None:
    report = msgspec.structs.replace(window(0), settled=settled(Verdict.SETTLED), control=True)
    assert "ettled" not in run_headline(RunSummary(None, [report])).text
    assert "ettled" not in summary(report)
