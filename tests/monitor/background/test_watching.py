"""Where something has changed a window is asked for: off the grid of the schedule, once, and out of the same budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from overlap_callbacks import Schedule
from overlap_callbacks.analysis.job.frontier import RunFrontier
from overlap_callbacks.analysis.results.request import WINDOW, JobAnswer, Request, Status
from overlap_callbacks.analysis.step_vectors import StepVectors
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.desk import CHANGED, Desk, View
from overlap_callbacks.monitor.background.watching import Watching
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.course import Course
from tests.analysis.test_watch import STEPS, stretch
from tests.distributed import captured_log
from tests.monitor.background.test_plans import RANKS, Ranks

EVERY, STEP_S, QUIET = 1000, 0.04, 30


class FakeParts:
    """Stretches of a job of which rank 3 computes 4 ms more from ``QUIET`` on."""

    is_rank_0, exchange = True, None

    def __init__(self) -> None:
        self.run = RunFrontier()

    def vectors(self) -> StepVectors:
        return StepVectors.joined([])

    def gather(self, number: int, key: str, stop: Callable[[], bool]) -> Any:
        return stretch(number, {("forward", 3): 4.0} if number >= QUIET else {})


class Job:
    """Rank 0's watching and desk, and the plans of all ranks over a real store."""

    def __init__(self, **schedule: int) -> None:
        self.ranks = Ranks()
        self.budget = WindowBudget(0.005, now_ns=lambda: round(self.ranks.steps[0] * STEP_S * 1e9))
        schedule = Schedule(every_n_steps=EVERY, **schedule)
        config = MonitorConfig(schedule=schedule)
        course = Course(config)

        def view() -> View:
            step = self.ranks.steps[0]
            status = Status(state="windows", step=step, running_s=None, every_n_steps=EVERY, num_windows=1,
                            step_ms=1e3 * STEP_S)  # fmt: skip
            return status, course

        def submit(task: Callable[[], object]) -> bool:
            task()
            return True

        desk = Desk(config, self.budget, self.ranks.each[0], view, submit, RANKS)
        self.answers: list[JobAnswer] = []
        self.asked = 0

        def ask(reply: Callable[[JobAnswer], None]) -> None:
            self.asked += 1

            def both(answer: JobAnswer) -> None:
                self.answers.append(answer)
                reply(answer)

            desk.respond(Request.of(WINDOW), both, CHANGED)

        self.watching = Watching(FakeParts(), self.budget, ask)  # type: ignore[arg-type]
        self.sinks = SimpleNamespace(**{name: lambda *_: None for name in ("frontier", "change", "goodput")})

    def train(self, stretches: range) -> None:
        for number in stretches:
            self.ranks.steps = [(number + 1) * STEPS] * RANKS
            self.watching.stretch(number, "", lambda: False, lambda: self.sinks)  # type: ignore[arg-type,return-value]
            self.ranks.look(1, 2, 0, 1, 2)


def test_a_window_opens_at_a_change_off_the_grid_on_all_ranks() -> None:
    job = Job()
    job.train(range(QUIET))
    assert not job.asked
    with captured_log(logging.INFO) as lines:
        job.train(range(QUIET, QUIET + 20))
    assert job.asked == 1, "once for a change"
    (answer,) = job.answers
    assert answer.outcome == "done"
    assert answer.from_step % EVERY, "off the grid"
    assert QUIET * STEPS < answer.from_step < (QUIET + 14) * STEPS
    assert [held.first_step for held in (plans.at(answer.from_step) for plans in job.ranks.each)] == [
        answer.from_step
    ] * RANKS
    assert any("to measure what has changed: window; a window opens at step" in line for line in lines), lines


def test_the_window_waits_until_earlier_ones_are_paid_for() -> None:
    job = Job()
    job.train(range(QUIET))
    paid_s = 1.0 + 1.0 / 0.005
    opened_ns = round(job.ranks.steps[0] * STEP_S * 1e9)
    job.budget.charge(3, opened_ns, 1.0)
    job.train(range(QUIET, QUIET + 20))
    (answer,) = job.answers
    assert "the budget forbids a window now" in answer.text
    assert "--now" not in answer.text, "of overlap ask"
    assert answer.from_step * STEP_S >= opened_ns / 1e9 + paid_s


def test_it_asks_again_while_another_request_is_decided() -> None:
    job = Job()
    answers = iter(["busy", "busy", "refused"])
    status = Status(state="windows", step=0, running_s=None, every_n_steps=EVERY, num_windows=0)
    asked = []

    def ask(reply: Callable[[JobAnswer], None]) -> None:
        asked.append(next(answers))
        reply(JobAnswer(id="", text="", outcome=asked[-1], status=status))

    job.watching._ask = ask
    job.train(range(QUIET + 20))
    assert asked == ["busy", "busy", "refused"]


def test_a_rank_that_is_not_the_first_asks_for_nothing() -> None:
    job = Job()
    job.watching._parts.is_rank_0 = False
    job.train(range(QUIET + 20))
    assert not job.asked
