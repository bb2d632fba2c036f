"""What rank 0 answers to each request, wherever the job is; and how it hears of one."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from overlap_callbacks.analysis.results.request import ANSWERS_FILE, JobAnswer, Request, Status
from overlap_callbacks.cli.ask import _leave
from overlap_callbacks.gate.arms import Arm, Keep
from overlap_callbacks.monitor.background import listener as listener_module
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.desk import Desk
from overlap_callbacks.monitor.background.listener import Listener
from overlap_callbacks.monitor.background.mailbox import Mailbox
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.course import Course
from overlap_callbacks.monitor.faults import Notices
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import captured_log
from tests.monitor.background.test_plans import RANKS, Ranks
from tests.monitor.jobs import wait_until

# Steps of 0.1 s, so that all ranks hear within 100 steps. A window costs 1 s, which 200 s of training pay for.
STEP, STEP_MS, LEAD_STEPS, MAX_OVERHEAD, COST_S, PAID_S = 100, 100.0, 100, 0.005, 1.0, 201.0
LOOK_S = listener_module._LOOK_S


class Asked:
    """The desk of a job of three ranks, whose plans go through a real store."""

    def __init__(self, state: str = "windows", costs: bool = False, **options: Any) -> None:
        self.ranks = Ranks()
        config = MonitorConfig(
            schedule=Schedule(every_n_steps=500, first_step=20), max_overhead=MAX_OVERHEAD, **options
        )
        self.course = Course(config)
        self.budget = WindowBudget(MAX_OVERHEAD, lambda: 0)
        if costs:
            self.budget.charge(0, 0, COST_S)
        self.status = Status(
            state=state, step=STEP, running_s=0.0, every_n_steps=500, num_windows=1, step_ms=STEP_MS, next_window=520
        )
        self.answers: list[JobAnswer] = []

        def submit(task: Any) -> bool:
            task()
            return True

        self.desk = Desk(config, self.budget, self.ranks.each[0], lambda: (self.status, self.course), submit, RANKS)
        self.config = config

    def at(self, **status: Any) -> Asked:
        self.status = msgspec.structs.replace(self.status, **status)
        return self

    def ask(self, text: str, *, now: bool = False, agree: bool = True) -> JobAnswer:
        """The answer, after all ranks have voted if they must; without ``agree``, one rank does not hear in time."""
        before = len(self.answers)
        self.desk.respond(Request.of(text, now=now), self.answers.append)
        if len(self.answers) == before:
            self.ranks.look(*([1, 2] if agree else [1]))
            self.ranks.steps[0] += 0 if agree else LEAD_STEPS - 1
            self.ranks.look(0, 1, 2)
        (answer,) = self.answers[before:]
        return answer


CHANGES = [
    ("window", "windows", "a window opens at step 200, in about 10 s", 200),
    ("stop", "windows", "nothing is measured from step 200 on", 200),
    ("stop", "quick", "nothing is measured from step 200 on", 200),
    ("quick", "windows", "windows follow one another from step 200 on", 200),
    ("quick", "stopped", "windows follow one another from step 200 on", 200),
    ("resume", "stopped", "the next window opens at step 520, if the budget allows it", 520),
    ("every=300", "windows", "windows open every 300 steps from step 320 on, if the budget allows it", 320),
    ("every=120", "windows", "windows open every 120 steps from step 200 on, if the budget allows it", 200),
]


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize(("text", "state", "said", "from_step"), CHANGES)
def test_all_ranks_follow_from_the_step_that_is_answered_or_none(
    text: str, state: str, said: str, from_step: int, agree: bool
) -> None:
    asked = Asked(state)
    answer = asked.ask(text, now=text == "window", agree=agree)
    if agree:
        assert (answer.outcome, answer.text, answer.from_step) == ("done", said, from_step)
        held = [plans.at(STEP + LEAD_STEPS) for plans in asked.ranks.each]
        assert len({plan and plan.name for plan in held}) == 1
        assert held[0] is not None
        assert held[0].first_step == from_step
    else:
        assert (answer.outcome, answer.from_step) == ("refused", None)
        assert "not all ranks agreed in time, and none follows" in answer.text
        assert asked.ranks.hold(10**6) == [False] * RANKS
    assert asked.budget.is_exempt(1) == (agree and text == "window")


@pytest.mark.parametrize(
    ("text", "status", "outcome", "said"),
    [
        ("window", {"state": "stopped"}, "refused", "ask to resume"),
        ("every=200", {"state": "stopped"}, "refused", "ask to resume"),
        ("every=200", {"state": "quick"}, "refused", "ask again later"),
        ("every=5", {}, "refused", "every_n_steps"),
        ("stop", {"state": "stopped"}, "done", "stopped already"),
        ("quick", {"state": "quick"}, "done", "already"),
        ("resume", {}, "done", "not stopped"),
        ("window", {"window": 1}, "done", "window 1 is open"),
        ("window", {"step": 450}, "done", "a window opens at step 520, in about 7 s"),
        ("stop", {"state": "off"}, "refused", "only status is answered"),
        ("stop", {"state": "pinned"}, "refused", "only status is answered"),
        ("status", {"state": "off"}, "done", "measuring is switched off"),
        ("status", {}, "done", "step 100, 100.0 ms each; a window every 500 steps, 1 opened so far; the next one at"),
        ("stop", {"num_windows": 0}, "busy", "from the first window on"),
    ],
)
def test_what_needs_no_plan_is_answered_at_once(text: str, status: dict[str, Any], outcome: str, said: str) -> None:
    asked = Asked().at(**status)
    asked.desk.respond(Request.of(text), asked.answers.append)
    (answer,) = asked.answers
    assert answer.outcome == outcome
    assert said in answer.text
    assert asked.ranks.hold(10**6) == [False] * RANKS


def test_a_window_that_the_budget_forbids_comes_when_it_is_paid_for() -> None:
    answer = Asked(costs=True).ask("window")
    assert answer.text.startswith("the budget forbids a window now: a window opens at step ")
    assert answer.text.endswith("; --now measures at once, outside the budget")
    assert answer.from_step is not None
    assert PAID_S <= (answer.from_step - STEP) * STEP_MS / 1e3 <= 1.1 * PAID_S


def test_an_open_window_is_no_answer_where_the_budget_will_leave_it_out() -> None:
    asked = Asked(costs=True).at(window=0, steps_left=150)
    answer = asked.ask("window", now=True)
    assert answer.from_step == STEP + 151  # after the open one
    assert asked.budget.is_exempt(1)
    assert asked.at(window=1, step=STEP + 160).ask("window").outcome == "busy"  # that plan is not followed yet
    for plans in asked.ranks.each:
        plan = plans.at(10**6)
        assert plan is not None
        plans.followed(plan)
    assert asked.ask("window").text == "window 1 is open"


def test_where_the_job_decides_a_window_is_promised_only_if_an_arm_is_due() -> None:
    arms = [Arm("fast", lambda: None, lambda: None, equal_results=True)]
    asked = Asked(arms=arms, decide=Keep())
    assert asked.ask("window").text.endswith("if an arm is due then")
    asked = Asked(arms=arms, decide=Keep())
    assert asked.ask("window", now=True).text.endswith("if an arm is left to measure")


def test_a_request_that_the_jobs_end_overtakes_is_answered_and_holds_nobody_up() -> None:
    asked = Asked()
    asked.desk.respond(Request.of("stop"), asked.answers.append)
    assert asked.answers == []
    asked.desk.respond(Request.of("quick"), asked.answers.append)
    assert asked.answers.pop().outcome == "busy"
    asked.ranks.look(1, 2)
    for plans in asked.ranks.each:
        plans.leave()
    (answer,) = asked.answers
    assert answer.outcome == "refused"
    assert answer.text.startswith("the job ended first")
    assert asked.ranks.keys == 0


# -- how it hears of a request


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    return run


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    with mock.patch.object(listener_module, "_LOOK_S", 0.02):
        yield


def answers_in(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / ANSWERS_FILE).read_bytes()) if (run / ANSWERS_FILE).exists() else []


def test_status_is_answered_within_two_looks_whatever_the_step_does(run: Path) -> None:
    asked = Asked().at(running_s=1000.0)  # a step that hangs
    listener = Listener(asked.desk, MonitorConfig(sinks=[JsonlSink(run)]), Notices())
    take, answer, looks, answered_at = Mailbox.take, Mailbox.answer, [0], list[int]()

    def counted(mailbox: Mailbox) -> Request | None:
        looks[0] += 1
        return take(mailbox)

    def noted(mailbox: Mailbox, given: JobAnswer) -> None:
        answered_at.append(looks[0])
        answer(mailbox, given)

    with mock.patch.object(Mailbox, "take", counted), mock.patch.object(Mailbox, "answer", noted):
        listener.start()
        wait_until(lambda: looks[0] > 1)
        _leave(run, Request.of("status"))
        before = looks[0]  # a look that was under way may have missed it, and no later one
        wait_until(lambda: bool(answered_at))
        assert "which has been running for 17 min" in answers_in(run)[0]["text"]
        listener.close(10.0)
    assert answered_at[0] - before <= 2  # the next may come before the answer
    assert 2 * LOOK_S <= 2.0
    assert list(run.iterdir()) == []


def test_a_request_of_a_job_before_is_not_followed_and_asked_again_by_whoever_waits(run: Path) -> None:
    asked = Asked()
    _leave(run, Request.of("stop"))
    listener = Listener(asked.desk, MonitorConfig(sinks=[JsonlSink(run)]), Notices())
    listener.start()
    wait_until(lambda: bool(answers_in(run)))
    listener.close(10.0)
    assert asked.ranks.hold(10**6) == [False] * RANKS
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("ask", ["user", "group", "off"])
def test_requests_of_the_group_are_read_only_where_that_is_allowed(ask: str, run: Path) -> None:
    asked = Asked()
    config = MonitorConfig(sinks=[JsonlSink(run)], ask=ask)
    _leave(run, Request.of("status"))
    with (
        captured_log() as lines,
        mock.patch("os.geteuid", return_value=os.geteuid() + 1),
    ):
        listener = Listener(asked.desk, config, Notices())
        listener._look()
    assert bool(answers_in(run)) == (ask == "group")
    assert any("a request from outside is not read: it is another user's" in line for line in lines) == (ask != "group")


@pytest.mark.parametrize("is_users", [True, False])
def test_a_signal_asks_for_a_window_and_reaches_the_users_handler(is_users: bool, run: Path) -> None:
    caught: list[int] = []

    def users(number: int, frame: Any) -> None:
        caught.append(number)

    before = signal.signal(signal.SIGUSR1, users if is_users else signal.SIG_IGN)
    try:
        asked = Asked().at(step=450)
        listener = Listener(asked.desk, MonitorConfig(ask_signal="SIGUSR1"), Notices())
        with captured_log(logging.INFO) as lines:
            listener.start()
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: any("asked from outside: window; a window opens at step 520" in line for line in lines))
            listener.close(10.0)
        assert len(caught) == is_users
        assert signal.getsignal(signal.SIGUSR1) == (users if is_users else signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_desk_that_fails_ends_the_listening_with_a_word_and_nothing_else(run: Path) -> None:
    asked = Asked()
    listener = Listener(asked.desk, MonitorConfig(sinks=[JsonlSink(run)]), Notices())
    with captured_log() as lines, mock.patch.object(Desk, "respond", side_effect=ZeroDivisionError("oh")):
        listener.start()
        _leave(run, Request.of("status"))
        wait_until(lambda: any("requests from outside are heard no more: ZeroDivisionError" in line for line in lines))
        listener.close(10.0)
    assert answers_in(run) == []
