"""The job's key-value store and its process groups: gone, stopped, of another kind, replaced; jobs that start again."""

from __future__ import annotations

import os
import random
import signal
import time

import torch.distributed as dist

from tests.campaign.case import Job, case
from tests.campaign.job import Rank, Training, kept

GROUP = "Stores, process groups and restarts"
STEPS = 60
# Number from which the steps in a second process group are counted, however many there were in the first.
SECOND = 100


def train_and_close(rank: Rank, store: dist.Store | None = None) -> None:
    rank.start(store)
    training = Training(rank.number)
    monitor = rank.attach(training)
    rank.train(training, STEPS)
    monitor.close()
    kept.append(training)


def _strike_store(number: int) -> object:
    def disturb(job: Job, chance: random.Random) -> None:
        step, delay_s = chance.randint(2, 30), chance.uniform(0.0, 0.03)
        if job.await_step(0, step):
            time.sleep(delay_s)
            job.signal_store(number)

    return disturb


@case(
    "store-killed", GROUP, "the store's process is killed", server=True, runs=10,
    disturb=_strike_store(signal.SIGKILL), record="maybe", says=r"the ranks' store failed",
    device_runs=3,
)  # fmt: skip
def lose_store(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number)
    monitor = rank.attach(training)
    for _ in range(STEPS):
        rank.train(training, 1)
        time.sleep(0.005)  # so that the store goes while the job trains
    monitor.close()


@case(
    "store-stopped", GROUP, "the store's process is stopped (SIGSTOP) for good",
    server=True, runs=5, disturb=_strike_store(signal.SIGSTOP), record="maybe", bound_s=25.0,
    says=r"the job's store does not answer", sentences=2,
)  # fmt: skip
def freeze_store(rank: Rank) -> None:
    lose_store(rank)


@case("file-store", GROUP, "the process group uses a `FileStore`")
def use_file_store(rank: Rank) -> None:
    train_and_close(rank, dist.FileStore(str(rank.folder / "store"), rank.world_size))


@case(
    "hash-store", GROUP, "the process group uses a `HashStore`, of one process", world_size=1,
    says=r"the job has one rank", record="none",
)  # fmt: skip
def use_hash_store(rank: Rank) -> None:
    train_and_close(rank, dist.HashStore())


def _measure_second_group(rank: Rank) -> None:
    """Train on in a process group of its own store, with a monitor of its own; the first store stays rank 0's."""
    rank.start(dist.FileStore(str(rank.folder / "second-store"), rank.world_size))
    again = Training(rank.number)
    again.num_steps = SECOND
    monitor = rank.attach(again)
    rank.train(again, STEPS)
    monitor.close()


@case(
    "group-destroyed", GROUP,
    "`destroy_process_group()` before `close()`, then a second group",
    says=r"torch\.distributed has no process group|process group was replaced|was cut short", may_be_silent=True,
    device_runs=3,
)  # fmt: skip
def destroy_group(rank: Rank) -> None:
    num_steps = rank.some_step()
    rank.start()
    training = Training(rank.number)
    # Where the model goes after its process group, torch hangs at times: Gloo's thread waits for the interpreter, which
    # waits for Gloo's thread. In a script the model lives on to the end.
    kept.append(training)
    monitor = rank.attach(training)
    rank.train(training, num_steps)
    dist.destroy_process_group()
    monitor.close()
    _measure_second_group(rank)


@case(
    "group-replaced", GROUP, "the process group is replaced while the job is measured",
    says=r"the process group was replaced",
    device_runs=3,
)  # fmt: skip
def replace_group(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number)
    monitor = rank.attach(training)
    rank.train(training, rank.some_step())
    dist.destroy_process_group()
    # A store of its own: the first one's server stays rank 0's.
    rank.start(dist.FileStore(str(rank.folder / "second-store"), rank.world_size))
    training.model = type(training.model)(training.model.module, bucket_cap_mb=0.002)
    rank.train(training, STEPS)
    monitor.close()


@case("group-anew", GROUP, "a second process group, each with its monitor", record="yes", device_runs=3)
def begin_anew(rank: Rank) -> None:
    train_and_close(rank)
    dist.destroy_process_group()
    _measure_second_group(rank)


@case(
    "torchrun-restart", GROUP,
    "`torchrun --max-restarts 1`: rank 1 is killed, all start again",
    torchrun=1, limit_s=240.0, bound_s=30.0, record="yes", says=r"was cut short|left out", may_be_silent=True, runs=2,
    nightly="six interpreters and torchrun's agents load torch anew, which takes half a minute",
)  # fmt: skip
def start_again(rank: Rank) -> None:
    step = rank.some_step()
    rank.start()
    training = Training(rank.number)
    kept.append(training)
    monitor = rank.attach(training)
    die = {step: lambda: os.kill(os.getpid(), signal.SIGKILL)} if rank.number == 1 and not rank.attempt else {}
    rank.train(training, STEPS, die)
    monitor.close()
    dist.destroy_process_group()
