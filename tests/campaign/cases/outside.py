"""A job that is asked from outside, when something goes wrong meanwhile."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable, Mapping

from tests.campaign.case import Job, case
from tests.campaign.cases.deciding import train_and_decide
from tests.campaign.cases.endings import CUT_SHORT, strike
from tests.campaign.job import RUN_FOLDER, Rank, Training, kept

GROUP = "A job that is asked from outside"
STEPS, STEP_S = 500, 0.008
# Steps at which rank 0 is asked, and what: windows open every 16 steps and take nine. A request is seen after some 12
# steps, and holds some 120 later.
_QUESTIONS = {40: "every=40", 180: "stop", 320: "resume"}
# About when ranks vote on the first ones.
_FIRST, _LAST = 55, 260


def ask_within(rank: Rank, questions: Mapping[int, str]) -> dict[int, Callable[[], object]]:
    """By step, functions that ask the job, as ``overlap ask`` does; nothing on other ranks and without the library."""
    if not rank.library:
        return {}
    from overlap_callbacks.monitor.background import listener, plans

    # All ranks hear of a plan within a second here, so that a job of seconds shows it.
    plans.LOOK_S, plans._LEAD_S, listener._LOOK_S = 0.1, 1.0, 0.1
    if rank.number:
        return {}
    return {step: functools.partial(_leave, rank, text) for step, text in questions.items()}


def _leave(rank: Rank, text: str) -> None:
    from overlap_callbacks.analysis.results.request import Request
    from overlap_callbacks.cli.ask import _leave

    _leave(rank.folder / RUN_FOLDER, Request.of(text))


def train_and_ask(rank: Rank, questions: Mapping[int, str] = _QUESTIONS) -> None:
    rank.start()
    training = Training(rank.number, extra=lambda _: time.sleep(STEP_S))
    kept.append(training)
    within = ask_within(rank, questions)
    monitor = rank.attach(training)
    rank.train(training, STEPS, within)
    monitor.close()


@case(
    "ask-to-the-end", GROUP, "nothing: other windows are asked for, none, and windows again",
    nightly="it is as long as four others, and tests/monitor/test_asked.py has such a job",
)  # fmt: skip
def ask(rank: Rank) -> None:
    train_and_ask(rank)


def _late_strike(victim: int, job: Job, chance: random.Random) -> None:
    strike(signal.SIGKILL, victim, job, chance, first=_FIRST, last=_LAST)


@case(
    "ask-rank-killed", GROUP, "SIGKILL of rank 1 while the ranks agree", runs=5,
    disturb=functools.partial(_late_strike, 1), record="maybe", may_be_silent=True,
    says=f"{CUT_SHORT}|rank 1 did not report",  # where it is killed as a window begins
    also=("1 RuntimeError",), ends=True,
)  # fmt: skip
def lose_a_rank(rank: Rank) -> None:
    train_and_ask(rank)


def _stop_store(job: Job, chance: random.Random) -> None:
    if job.await_step(0, chance.randint(_FIRST, _LAST)):
        time.sleep(chance.uniform(0.0, STEP_S))
        job.signal_store(signal.SIGSTOP)


@case(
    "ask-store-stopped", GROUP, "the store stops for good while the ranks agree", server=True,
    disturb=_stop_store, record="maybe", bound_s=25.0, says=r"the job's store does not answer", sentences=2,
    may_be_silent=True,
)  # fmt: skip
def lose_the_store(rank: Rank) -> None:
    train_and_ask(rank)


@case(
    "ask-often",
    GROUP,
    "a request every few steps, the last as the job ends",
    runs=5,
    nightly="ask-to-the-end for longer",
)
def ask_often(rank: Rank) -> None:
    words = ["stop", "resume", "every=20", "window", "quick", "status"]
    questions = {step: rank.random.choice(words) for step in range(20, STEPS, 7)}
    train_and_ask(rank, {**questions, STEPS - 2: "stop"})


@case(
    "ask-files", GROUP, "links, pipes, folders and bytes by chance where a request would be",
    says="a request from outside is not read", nightly="strange files are tried at the mailbox too",
)  # fmt: skip
def ask_by_strange_files(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number, extra=lambda _: time.sleep(STEP_S))
    kept.append(training)
    ask_within(rank, {})
    monitor = rank.attach(training)
    path = rank.folder / RUN_FOLDER / "overlap.ask"

    def put(kind: int) -> None:
        if not rank.library or rank.number:
            return
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        match kind % 4:
            case 0:
                path.symlink_to("/dev/zero")
            case 1:
                os.mkfifo(path)
            case 2:
                path.mkdir()
            case 3:
                path.write_bytes(random.Random(kind).randbytes(500))

    rank.train(training, 200, {step: functools.partial(put, step // 15) for step in range(30, 200, 15)})
    monitor.close()


@case(
    "ask-decide", GROUP, "a window, a stop and `resume` while the job decides, or keeps an arm",
    nightly="takes as long as a search",
)  # fmt: skip
def ask_while_deciding(rank: Rank) -> None:
    first = rank.some_step(20, 120)
    train_and_decide(rank, within=ask_within(rank, {first: "window", first + 180: "stop", first + 320: "resume"}))
