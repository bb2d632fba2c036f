"""Jobs that end before they are done: killed, stopped by a signal, by themselves, or by an error."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import time
from typing import Any

from tests.campaign.case import CASES, Case, Job, case
from tests.campaign.job import Rank, Training, kept
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU

GROUP = "The job ends early"
# Steps that a job would train if nobody ended it.
FAR = 600
# Longest wait after a step's end, so that the moment lies anywhere in a step or in the work of our threads.
_MOMENT_S = 0.04
# If a window was open, its end is logged at level INFO.
CUT_SHORT = (
    r"window \d+ was cut short: an exception in the user's step|window left out: an exception in the user's step"
)


def train_on(rank: Rank) -> None:
    """Train until something happens; closes nothing, as most scripts."""
    rank.start()
    training = Training(rank.number)
    kept.append(training)
    kept.append(rank.attach(training))
    rank.train(training, FAR)


def strike(number: int, victim: int, job: Job, chance: random.Random, *, first: int = 2, last: int = 40) -> None:
    """Send a signal at a random moment of a random step."""
    step, delay_s = chance.randint(first, last), chance.uniform(0.0, _MOMENT_S)
    if job.await_step(max(victim, 0), step):
        time.sleep(delay_s)
        job.signal(victim, number)


def _enter(name: str, what: str, number: int, victim: int, **attributes: object) -> None:
    disturb = functools.partial(strike, number, victim)
    CASES[name] = Case(name, GROUP, what, train_on, disturb=disturb, record="maybe", **attributes)  # type: ignore[arg-type]


# Whichever rank ends first, the others' collectives fail.
_PEER_GONE = "1 RuntimeError"
# A signal to all reaches one after the other. Whoever is last may see the first one gone.
_ONE_BY_ONE: dict[str, dict[str, Any]] = {
    name: {"also": (_PEER_GONE, f"-{name} RuntimeError"), "ends": True, "device_runs": 3}
    for name in ("SIGKILL", "SIGTERM")
}
# On a device NCCL's watchdog ends a rank that waits in vain for another.
_ENDED = (_PEER_GONE, "-SIGABRT") if ON_SIMULATED_GPU else (_PEER_GONE,)
_SILENT = {"says": CUT_SHORT, "may_be_silent": True, "also": _ENDED, "ends": True, "device_runs": 3}
_enter(
    "kill-rank-0",
    "SIGKILL of rank 0, which serves the store",
    signal.SIGKILL,
    0,
    runs=30,
    **_SILENT,
)
_enter("kill-another", "SIGKILL of rank 1", signal.SIGKILL, 1, runs=30, **_SILENT)
_enter("kill-all", "SIGKILL of all ranks", signal.SIGKILL, -1, runs=30, **_ONE_BY_ONE["SIGKILL"])
_enter("sigterm-one", "SIGTERM to rank 1", signal.SIGTERM, 1, runs=5, **_SILENT)
_enter("sigterm-all", "SIGTERM to all ranks", signal.SIGTERM, -1, runs=5, **_ONE_BY_ONE["SIGTERM"])
_enter("sigint-random", "SIGINT to all ranks (Ctrl-C)", signal.SIGINT, -1, runs=5, **_SILENT)


@case(
    "sigterm-handler", GROUP, "SIGTERM to all ranks, whose handler calls `sys.exit(7)`", runs=5,
    disturb=functools.partial(strike, signal.SIGTERM, -1), record="maybe", **_SILENT,
)  # fmt: skip
def exit_on_sigterm(rank: Rank) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    train_on(rank)


def _end(rank: Rank, how: object, *, alone: bool = True) -> None:
    step = rank.some_step()
    rank.start()
    training = Training(rank.number)
    kept.append(training)
    kept.append(rank.attach(training))
    rank.train(training, FAR, {step: how} if rank.number == 1 or not alone else {})  # type: ignore[dict-item]


@case("sigint-in-step", GROUP, "SIGINT within the same step of all ranks", runs=5, record="maybe", **_SILENT)
def interrupt(rank: Rank) -> None:
    _end(rank, lambda: signal.raise_signal(signal.SIGINT), alone=False)


@case("os-exit", GROUP, "`os._exit(5)` of rank 1 within a step", runs=5, record="maybe", **_SILENT)
def leave(rank: Rank) -> None:
    _end(rank, lambda: os._exit(5))


@case("sys-exit", GROUP, "`sys.exit(3)` of rank 1 within a step", runs=5, record="maybe", **_SILENT)
def exit_one(rank: Rank) -> None:
    _end(rank, lambda: sys.exit(3))


@case("sys-exit-all", GROUP, "`sys.exit(3)` of all ranks within the same step", runs=5, record="maybe", **_SILENT)
def exit_all(rank: Rank) -> None:
    _end(rank, lambda: sys.exit(3), alone=False)


@case("exception", GROUP, "an exception in rank 1 within a step", runs=5, record="maybe", **_SILENT)
def fail(rank: Rank) -> None:
    def error() -> None:
        raise KeyError("of the user")

    _end(rank, error)


@case(
    "no-close", GROUP, "the script ends without `close()`", runs=5, record="maybe",
    says=r"record is in", may_be_silent=True, device_runs=3,
)  # fmt: skip
def end_without_close(rank: Rank) -> None:
    num_steps = rank.some_step()
    rank.start()
    training = Training(rank.number)
    kept.append(training)
    kept.append(rank.attach(training))
    rank.train(training, num_steps)
