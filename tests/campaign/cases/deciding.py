"""A job that decides about its arms, and keeps one turned on, when something goes wrong."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from typing import Any

import torch.distributed as dist

from tests.campaign.case import Job, case
from tests.campaign.cases.endings import CUT_SHORT, strike
from tests.campaign.job import Rank, Training, kept

GROUP = "A job that decides"
# A step sleeps for so long as configured; with the arms for another time. So one is kept after some 250 steps.
OWN_S, SLEEPS_S = 0.008, {"faster": 0.0, "slower": 0.016}
STEPS = 600
# About when the arm is chosen and kept.
_FIRST, _LAST = 100, 500


def decide_on(rank: Rank, training: Training, setting: dict[str, float]) -> Any:
    """The user's line, with arms that change how long steps sleep."""
    options: dict[str, Any] = {}
    if rank.library:
        from overlap_callbacks import arms

        made = [
            arms.Arm(
                name,
                functools.partial(setting.update, sleep_s=sleep_s),
                functools.partial(setting.update, sleep_s=OWN_S),
                equal_results=True,
            )
            for name, sleep_s in SLEEPS_S.items()
        ]
        options = {"arms": made, "decide": arms.Keep(budget=1.0), "repeats": 2, "profiled_steps": 0}
    return rank.attach(training, **options)


def train_and_decide(rank: Rank, num_steps: int = STEPS, within: dict[int, Any] | None = None) -> None:
    rank.start()
    setting = {"sleep_s": OWN_S}
    training = Training(rank.number, extra=lambda _: time.sleep(setting["sleep_s"]))
    kept.append(training)
    monitor = decide_on(rank, training, setting)
    try:
        with monitor if rank.library else contextlib.nullcontext():
            rank.train(training, num_steps, within)
    finally:  # of a rank that the fault has left alive
        assert setting["sleep_s"] == OWN_S


@case(
    "decide-to-the-end", GROUP, "nothing: an arm is kept and put back", record="yes", device_runs=3,
    nightly="it is as long as four others, and tests/monitor/test_deciding.py has such a job",
)  # fmt: skip
def decide(rank: Rank) -> None:
    train_and_decide(rank)


def _late_strike(victim: int, job: Job, chance: random.Random) -> None:
    strike(signal.SIGKILL, victim, job, chance, first=_FIRST, last=_LAST)


@case(
    "decide-rank-killed", GROUP, "SIGKILL of rank 1 in the search, or while an arm is kept", runs=10, device_runs=3,
    disturb=functools.partial(_late_strike, 1), record="maybe", may_be_silent=True,
    says=f"{CUT_SHORT}|rank 1 did not report",  # where it is killed as a window begins
    also=("1 RuntimeError",), ends=True,
)  # fmt: skip
def lose_a_rank(rank: Rank) -> None:
    train_and_decide(rank)


def _stop_store(job: Job, chance: random.Random) -> None:
    if job.await_step(0, chance.randint(_FIRST, _LAST)):
        job.signal_store(signal.SIGSTOP)


@case(
    "decide-store-stopped", GROUP, "the store stops for good meanwhile",
    server=True, runs=5, device_runs=3, disturb=_stop_store, record="maybe", bound_s=25.0,
    says=r"the job's store does not answer", sentences=2,
)  # fmt: skip
def lose_the_store(rank: Rank) -> None:
    train_and_decide(rank)


@case(
    "decide-restart", GROUP, "rank 1 is killed meanwhile: `torchrun --max-restarts 1`",
    torchrun=1, limit_s=240.0, bound_s=30.0, record="yes", says=r"was cut short|left out", may_be_silent=True, runs=2,
    device_runs=2,
    nightly="six interpreters and torchrun's agents load torch anew, which takes half a minute",
)  # fmt: skip
def start_again(rank: Rank) -> None:
    step = rank.some_step(_FIRST, _LAST)
    die = {step: lambda: os.kill(os.getpid(), signal.SIGKILL)} if rank.number == 1 and not rank.attempt else {}
    train_and_decide(rank, within=die)
    dist.destroy_process_group()
