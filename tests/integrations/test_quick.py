"""A quick answer first: windows back to back in a real job, then the schedule as usual."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch.distributed as dist

from overlap_callbacks import Estimate, JsonlSink, Schedule, record
from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.headline import run_verdict, step_change
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.monitor.background import quick
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.quick import QuickLook, quick_schedule
from overlap_callbacks.monitor.background.reporter import Reporter
from overlap_callbacks.report.run_json import run_as_json
from overlap_callbacks.report.views.quality import cost_in_words
from overlap_callbacks.report.views.short import short_of
from overlap_callbacks.sinks.jsonl import has_answer
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import Training, digest_without_library, own_threads
from tests.report.runs import run_info, write
from tests.report.runs import window as window_report

# Windows of 11 steps. Back to back one begins every 75 steps, as many as they take and 64 ordinary ones.
OPTIONS: dict[str, Any] = {
    "every_n_steps": 200, "first_step": 5, "repeats": 2, "profiled_steps": 0, "power": False, "max_overhead": 1e-6,
    "advanced": {"steps_per_block": 1, "warmup_steps": 0},
}  # fmt: skip
SCHEDULE = Schedule(
    every_n_steps=200, first_step=5, repeats=2, profiled_steps=0, steps_per_block=1, warmup_steps=0
)  # fmt: skip
STEPS = 640


def train_quickly(rank: int, folder: str, by: str, narrow: float, longest_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {"quick": True} if by == "option" else {}
    if by == "environment":
        os.environ["OVERLAP_CALLBACKS"] = "Quick"
    training = Training(rank)
    limits = mock.patch.multiple(quick, NARROW=narrow, LONGEST_S=longest_s)
    with (
        limits,
        captured_log(logging.INFO) as lines,
        attach(training.optimizer, run_dir=folder, **OPTIONS, **options) as monitor,
    ):
        for _ in range(STEPS):
            training.step()
            dist.barrier()  # reports come as soon as on a job whose steps are longer
        active = monitor.active
    return {
        "lines": [line for line in lines if "quick" in line and "left out" not in line],
        "active": active, "threads": own_threads(),
        "same": training.digest() == digest_without_library(rank, STEPS),
    }  # fmt: skip


def first_steps(folder: Path) -> list[tuple[int, int]]:
    """Number and first step of each window."""
    return [(each.window, each.first_step) for each in record.read(folder).windows]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Folder and ranks of a job that was asked by its option, and has its answer."""
    folder = tmp_path_factory.mktemp("answered")
    return folder, run_ranks(train_quickly, 2, str(folder), "option", 1e9, 600.0, timeout_s=120.0)


def test_windows_come_back_to_back_until_the_answer_is_there_and_then_by_the_schedule(
    answered: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = answered
    for found in ranks:
        assert found["active"]
        assert found["same"]
        assert found["threads"] == []
    assert ranks[1]["lines"] == []
    at_attach, answer = ranks[0]["lines"]
    back_to_back = quick_schedule(SCHEDULE).every_n_steps
    assert "; quick: windows back to back from step 5, until the interval of the step time is below" in at_attach
    assert (
        "outside the budget: training is slower meanwhile; then every 200 steps, at most 0.00% of training" in at_attach
    )
    assert answer.startswith("overlap-callbacks: the quick answer: ")
    assert answer.endswith(f" The page is {folder / 'report.html'}")
    assert (folder / "report.html").stat().st_size > 100_000
    windows = first_steps(folder)
    assert windows[0] == (0, 5)
    # The windows after the quick ones are those of the schedule, and no number comes twice.
    # The budget, which one window exceeds for ever, is not charged for them: one of the schedule is measured.
    assert windows[-1][1] in (205, 405, 605)
    assert len(windows) > 1
    assert [number for number, _ in windows] == [(step - 5) // back_to_back for _, step in windows]
    assert len({number for number, _ in windows}) == len(windows)


def test_it_goes_on_while_the_answer_is_not_narrow_and_is_given_at_the_end_of_the_job(tmp_path: Path) -> None:
    ranks = run_ranks(train_quickly, 2, str(tmp_path), "option", 0.0, 600.0, timeout_s=120.0)
    assert all(found["same"] for found in ranks)
    assert ranks[0]["lines"][1].startswith("overlap-callbacks: the quick answer: ")
    assert not has_answer(tmp_path / "overlap.jsonl")  # the job has ended before it was over: it may go on
    back_to_back = quick_schedule(SCHEDULE).every_n_steps
    steps = [step for _, step in first_steps(tmp_path)]
    assert len(steps) > STEPS // 200 + 1
    assert all((step - 5) % back_to_back == 0 for step in steps)


# When its time is over is told without a job below.
@pytest.mark.nightly
def test_it_ends_after_its_time(tmp_path: Path) -> None:
    ranks = run_ranks(train_quickly, 2, str(tmp_path), "option", 0.0, 0.0, timeout_s=120.0)
    assert all(found["same"] for found in ranks)
    assert len(ranks[0]["lines"]) == 2
    assert all((step - 5) % 200 == 0 for _, step in first_steps(tmp_path))


def test_a_job_that_is_started_again_does_not_measure_the_answer_twice(
    answered: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    shutil.copytree(answered[0], tmp_path, dirs_exist_ok=True)
    before = first_steps(tmp_path)
    ranks = run_ranks(train_quickly, 2, str(tmp_path), "environment", 0.0, 600.0, timeout_s=120.0)
    assert all(found["same"] for found in ranks)
    assert ranks[1]["lines"] == []
    at_attach, said = ranks[0]["lines"]
    assert at_attach.endswith("; the record has the quick answer of an earlier start") or (
        "; the record has the quick answer of an earlier start;" in at_attach
    )
    assert "back to back" not in at_attach
    assert said == (
        "overlap-callbacks: the record has the quick answer of an earlier start; another run_dir asks anew [OC306]"
    )
    # The first window makes room for the schedule; no other is back to back.
    assert {step for _, step in first_steps(tmp_path)[len(before) :]} <= {205, 405, 605}
    read = record.read(tmp_path)
    assert read.broken_lines == 0
    by_schedule = (205, 405, 605)
    assert [window.quick for window in read.windows[: len(before)]] == [step not in by_schedule for _, step in before]


def test_the_cost_of_quick_windows_is_apart_from_that_within_the_budget(tmp_path: Path) -> None:
    def costing(number: int, cost: float, quick_window: bool) -> Any:
        bounds = {
            f"measurement_overhead{end}": cost + half
            for end, half in (("", 0.0), ("_ci_low", -1e-4), ("_ci_high", 1e-4))
        }
        return msgspec.structs.replace(window_report(number), quick=quick_window, lost_ms=1.0, **bounds)

    windows = [costing(0, 0.4, True), costing(1, 0.5, True), costing(10, 0.01, False)]
    for kept, words in (
        (
            windows,
            "1.00% of training (0.99 to 1.01); 45.00% of training (44.99 to 45.01) while quick windows ran, outside",
        ),
        (windows[2:], "1.00% of training (0.99 to 1.01)"),
        (windows[:2], "45.00% of training (44.99 to 45.01) while quick windows ran, outside the budget"),
    ):
        read = record.read(write(tmp_path / str(len(kept)), *kept))
        for text in (cost_in_words(read, PLAIN), short_of(read).cost):
            assert words in text
            assert ("quick" in text) == (len(kept) != 1)
        found = run_as_json(read)
        assert (found["quick_cost"] is None) == (len(kept) == 1)
        assert (found["measuring_cost"] is None) == (len(kept) == 2)


# -- what rank 0 decides


def test_quick_windows_begin_as_soon_as_they_can() -> None:
    assert quick_schedule(Schedule()).every_n_steps == 65 + 64
    assert quick_schedule(Schedule(every_n_steps=80)).every_n_steps == 80


def test_windows_of_the_schedule_are_numbered_like_those_back_to_back() -> None:
    schedule = Schedule(every_n_steps=500).numbered_by(129)
    found = [schedule.plan(step) for step in (20, 520, 1020)]
    assert [plan.window for plan in found if plan is not None] == [0, 500 // 129, 1000 // 129]
    assert Schedule(every_n_steps=500).plan(1020).window == 2  # type: ignore[union-attr]


def test_it_ends_once_and_for_all_after_ten_minutes() -> None:
    now = [0.0]
    look = QuickLook(lambda: now[0])
    assert look.goes_on()
    assert look.skip() is None
    now[0] = 600.0
    assert not look.goes_on()
    now[0] = 0.0
    assert not look.goes_on()
    assert look.skip() is not None


def test_it_is_over_as_it_begins_where_the_record_has_an_answer(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    for answered in (False, True):
        look = QuickLook(lambda: 0.0, [sink])
        assert (look.goes_on(), look.was_answered) == (not answered, answered)
        assert (look.skip() is None) is not answered
        sink.open(run_info())
        sink.answer("it saves 5%")
        sink.close()
    assert not has_answer(Path("/dev/full"))


def test_it_ends_once_the_interval_that_holds_at_all_looks_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [window_report(number) for number in range(6)]
    looks, one_look = [RunSummary(None, reports, running=running).pooled() for running in (True, False)]
    width, smaller = [_width(step_change(pooled)) for pooled in (looks, one_look)]
    assert smaller < width
    look = QuickLook(lambda: 0.0)
    for report in reports:
        look.record(report)
    assert look.goes_on()
    monkeypatch.setattr(quick, "NARROW", (smaller + width) / 2)
    assert look.goes_on()
    monkeypatch.setattr(quick, "NARROW", 1.001 * width)
    assert not look.goes_on()
    assert look.answer() == run_verdict(RunSummary(None, reports, running=True))


def _width(change: Estimate | None) -> float:
    assert change is not None
    assert change.ci_low is not None
    assert change.ci_high is not None
    return change.ci_high - change.ci_low


def test_windows_wait_for_the_reports_of_earlier_ones() -> None:
    look = QuickLook(lambda: 0.0)
    for _ in range(3):
        look.submitted()
    assert look.skip() is not None
    look.done()
    assert look.skip() is None


def test_windows_do_not_wait_for_a_report_that_is_lost() -> None:
    look = QuickLook(lambda: 0.0)
    reporter: Any = object.__new__(Reporter)
    reporter.quick, reporter._budget = look, WindowBudget(None)
    reporter._worker = SimpleNamespace(submit=lambda task: False)  # too many reports are waiting
    lost: Any = SimpleNamespace(quick=True, number=0, cost=None)
    for _ in range(3):
        reporter.submit_window(lost, "0/quick0", None)
    assert look.skip() is None
