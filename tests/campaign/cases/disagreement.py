"""Ranks that differ in their settings or in what they do."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from tests.campaign.case import case
from tests.campaign.job import Rank, Training, device_of, kept

GROUP = "Ranks that disagree"
STEPS = 50


def _train(rank: Rank, training: Training, **options: Any) -> None:
    monitor = rank.attach(training, **options)
    rank.train(training, STEPS)
    monitor.close()


@case(
    "one-off", GROUP, "`OVERLAP_CALLBACKS=off` on rank 1 alone", record="none",
    says=r"switched off by OVERLAP_CALLBACKS", bound_s=25.0,
    device_runs=3,
)  # fmt: skip
def switch_one_off(rank: Rank) -> None:
    if rank.number == 1:
        os.environ["OVERLAP_CALLBACKS"] = "off"
    rank.start()
    _train(rank, Training(rank.number))


@case(
    "other-schedules",
    GROUP,
    "rank 1 has the blocks `SOOS`, rank 0 `OSSO`",
    says=r"measuring is switched off: the ranks are set up differently",
    device_runs=3,
)
def differ_in_schedule(rank: Rank) -> None:
    rank.start()
    _train(rank, Training(rank.number), advanced={"blocks": "SOOS" if rank.number else "OSSO"})


@case(
    "other-steps",
    GROUP,
    "rank 1 numbers its steps one higher than rank 0",
    says=r"a window is left out",
    bound_s=25.0,
    device_runs=3,
)
def differ_in_numbers(rank: Rank) -> None:
    rank.start()
    # Packed windows have no step between those that are recorded and the ruling, so that each rank waits for the other.
    _train(rank, Training(rank.number), start_step=rank.number, spread=True, every_n_steps=32)


def _attach_late(rank: Rank, **options: Any) -> None:
    rank.start()
    training = Training(rank.number)
    if rank.number == 1:
        rank.train(training, 5)
        _train(rank, training, **options)
    else:
        monitor = rank.attach(training)
        rank.train(training, 5 + STEPS)
        monitor.close()


@case(
    "late-attach", GROUP, "rank 1 attaches five steps later, with the right `start_step`", bound_s=25.0,
    says=r"a window has no sequential steps: rank (1 did not report|0 did not decide)", device_runs=3,
)  # fmt: skip
def attach_late(rank: Rank) -> None:
    _attach_late(rank, start_step=5)


@case(
    "late-attach-shifted", GROUP, "the same, with steps numbered from 0",
    says=r"a window has no sequential steps: rank (1 did not report|0 did not decide)|a window is left out",
    bound_s=25.0, sentences=2, device_runs=3,
)  # fmt: skip
def attach_late_shifted(rank: Rank) -> None:
    _attach_late(rank)


@case(
    "force-alone",
    GROUP,
    "`force(Mode.SEQUENTIAL)` on rank 0 alone",
    says=r"the mode stays overlapped",
    bound_s=25.0,
    device_runs=3,
)
def force_alone(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number)
    monitor = rank.attach(training)
    rank.train(training, 20)
    if rank.number == 0 and rank.library:
        from overlap_callbacks import Mode

        monitor.force(Mode.SEQUENTIAL)
    rank.train(training, STEPS)
    monitor.close()


@case(
    "own-collectives",
    GROUP,
    "rank 1 issues more collectives, on a group of its own",
    says="",
    may_be_silent=True,
    device_runs=3,
)
def issue_alone(rank: Rank) -> None:
    rank.start()
    groups = [dist.new_group([number]) for number in range(rank.world_size)]

    def extra(step: int) -> None:
        if rank.number == 1:
            dist.all_reduce(torch.ones(4, device=device_of(rank.number)), group=groups[1])

    _train(rank, Training(rank.number, extra))


@case(
    "lagging-collective", GROUP, "rank 1 issues a collective one step early, in every step", bound_s=30.0,
    says=r"a window is left out",
)  # fmt: skip
def issue_early(rank: Rank) -> None:
    rank.start()
    group = dist.new_group()
    works: list[Any] = []

    def extra(step: int) -> None:
        if rank.number == 1 or step > 0:
            works.append(dist.all_reduce(torch.ones(4, device=device_of(rank.number)), group=group, async_op=True))
        if step > 1:
            works.pop(0).wait()

    kept.append(works)
    training = Training(rank.number, extra)
    _train(rank, training)
    if rank.number == 0:
        works.append(dist.all_reduce(torch.ones(4, device=device_of(rank.number)), group=group, async_op=True))
    for work in works:
        work.wait()


def _change_order(rank: Rank, *, wait_between: bool) -> None:
    rank.start()
    groups = [dist.new_group() for _ in range(2)]
    turn = 4  # a sequential step of the first window

    def extra(step: int) -> None:
        works = []
        turned = rank.number == 1 and step == turn
        for group in reversed(groups) if turned else groups:
            works.append(dist.all_reduce(torch.ones(4, device=device_of(rank.number)), group=group, async_op=True))
            if turned and wait_between:
                works.pop().wait()
        for work in works:
            work.wait()

    _train(rank, Training(rank.number, extra))


@case(
    "order-changes", GROUP, "the order of two groups' collectives changes on rank 1 after the order check",
    says=r"a sequential step was left out", in_record=True, bound_s=30.0, runs=2, device_runs=3,
)  # fmt: skip
def change_order(rank: Rank) -> None:
    _change_order(rank, wait_between=False)


@case(
    "order-deadlocks", GROUP,
    "the same where rank 1 waits for each: a sequential step would never end",
    says=r"did not finish within .* when it was serialised|rank 0 did not decide", bound_s=30.0, runs=2,
    device_runs=3,
)  # fmt: skip
def change_order_and_wait(rank: Rank) -> None:
    _change_order(rank, wait_between=True)
