"""Jobs whose steps are not alike: windows are valid, tell the kinds of steps apart, and compare like with like."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.analysis.results.mode import Mode
from tests.distributed import run_ranks
from tests.monitor.jobs import KeptReports, Training, new_monitor, tiny_schedule
from tests.toggling import at_night

# Two windows of 8 recorded, 32 timed and 8 profiled steps.
FIRST_STEP, EVERY_N_STEPS = 15, 160
NUM_STEPS = FIRST_STEP + 2 * EVERY_N_STEPS
SCHEDULE = tiny_schedule(EVERY_N_STEPS, FIRST_STEP, repeats=4, steps_per_block=2, profiled_steps=4)

# What a job does in a step, by the step's number.
Step = Callable[[int], None]


def one_bucket(model: torch.nn.Module) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def on_its_own_group(model: torch.nn.Module) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model, process_group=dist.new_group())


def gan(rank: int) -> tuple[list[Training], Step]:
    """The discriminator trains in every step, the generator in every fourth, on another group."""
    discriminator, generator = Training(rank), Training(rank, wrap=on_its_own_group)

    def step(number: int) -> None:
        if number % 4 == 3:
            generator.step()
        discriminator.step()

    return [discriminator, generator], step


def policy(rank: int) -> tuple[list[Training], Step]:
    """A policy step after four updates of the value function."""
    value, of_policy = Training(rank, wrap=one_bucket), Training(rank)
    return [value, of_policy], lambda number: (of_policy if number % 5 == 4 else value).step()


def local_sgd(rank: int) -> tuple[list[Training], Step]:
    """The ranks' weights are averaged in every fourth step, and nothing is communicated in the others."""
    training = Training(rank, wrap=lambda model: model)

    def step(number: int) -> None:
        training.step()
        if number % 4 == 3:
            for parameter in training.model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()

    return [training], step


def twice_a_batch(rank: int) -> tuple[list[Training], Step]:
    """A line on the optimizer, which steps twice a batch: every second step has no backward pass."""
    training = Training(rank)
    return [training], lambda number: training.optimizer.step() if number % 2 else training.step()


def turned_round(rank: int) -> tuple[list[Training], Step]:
    """Two models on groups of their own, which every third step trains in the other order."""
    models = [Training(rank), Training(rank, wrap=on_its_own_group)]

    def step(number: int) -> None:
        for model in models[::-1] if number % 3 == 2 else models:
            model.step()

    return models, step


def micro_batches(rank: int) -> tuple[list[Training], Step]:
    """Every fourth step accumulates three micro-batches, and communicates as the others do."""
    training = Training(rank)
    longer = Training(rank, micro_batches=3)
    longer.model, longer.optimizer = training.model, training.optimizer
    return [training, longer], lambda number: (longer if number % 4 == 3 else training).step()


JOBS: dict[str, tuple[Callable[[int], tuple[list[Training], Step]], int]] = {
    "gan": (gan, 4),
    "policy": (policy, 5),
    "local SGD": (local_sgd, 4),
    "twice a batch": (twice_a_batch, 2),
    "turned round": (turned_round, 3),
    "micro-batches": (micro_batches, 4),
}


def digest_of(trainings: list[Training]) -> str:
    return hashlib.sha256("".join([training.digest() for training in trainings]).encode()).hexdigest()


def train(rank: int, job: str) -> dict[str, Any]:
    make, _ = JOBS[job]
    plain, step = make(rank)
    for number in range(NUM_STEPS):
        step(number)
    trainings, step = make(rank)
    sink = KeptReports()
    with new_monitor(sink, schedule=SCHEDULE) as monitor:
        for number in range(NUM_STEPS):
            with monitor.step(number):
                step(number)
    return {
        "identical": digest_of(trainings) == digest_of(plain),
        "windows": [
            {
                "valid": report.valid,
                "problems": report.problems,
                "parts": [
                    [
                        [(block.mode, block.steps, block.kinds) for block in blocks]
                        for blocks in (sample.timed, sample.profiled)
                    ]
                    for sample in report.samples
                ],
            }
            for report in sink.reports
        ],
    }


def steps_of(blocks: list[tuple[Mode, tuple[int, ...], tuple[int, ...]]]) -> list[tuple[Mode, int, int]]:
    """Mode, number and kind of each counted step."""
    return [
        (arm, number, kind)
        for arm, numbers, kinds in blocks
        for number, kind in zip(numbers, kinds or (0,) * len(numbers), strict=True)
    ]


def valid_windows(job: str) -> list[dict[str, Any]]:
    """What the windows of a job found, all of them valid; it trained as without the library."""
    first, second = run_ranks(train, 2, job, timeout_s=90.0)
    assert first["identical"]
    assert second["identical"]
    windows: list[dict[str, Any]] = first["windows"]
    assert [(window["valid"], window["problems"]) for window in windows if not window["valid"]] == []
    assert len(windows) == 2
    return windows


@pytest.mark.parametrize("job", at_night(["gan", "policy", "local SGD", "twice a batch"], ["policy", "twice a batch"]))
def test_steps_of_different_kinds_are_distinguished_and_measured_in_both_modes(job: str) -> None:
    period = JOBS[job][1]
    for window in valid_windows(job):
        (note,) = [problem for problem in window["problems"] if problem.startswith("the job has 2 kinds")]
        assert "both were measured in both modes" in note or "of the profiled part" in note
        for timed, profiled in window["parts"]:
            counted = steps_of(timed)
            assert 16 < len(counted) <= 32  # a step that the machine held up is left out
            rare = {number for number in range(NUM_STEPS) if number % period == period - 1}
            told = {(number in rare, kind) for _, number, kind in counted}
            assert len(told) == 2  # each kind of the job has one number, and no other kind has it
            assert len({kind for _, kind in told}) == 2
            by_mode = Counter((arm, kind) for arm, _, kind in counted)
            assert all(by_mode[mode, kind] for mode in Mode for kind in (0, 1))
            # In the profile as many of each kind are in both modes; one that meets a single mode is left out.
            by_kind = {arm: Counter(kind for other, _, kind in steps_of(profiled) if other is arm) for arm in Mode}
            overlapped, sequential = by_kind.values()
            assert overlapped.keys() == sequential.keys()
            assert overlapped == sequential or len(overlapped) == 1


def test_steps_with_the_same_communication_are_distinguished_by_their_kernels() -> None:
    for window in valid_windows("micro-batches"):
        assert any("same communication called different kernels" in problem for problem in window["problems"])
        for timed, profiled in window["parts"]:
            assert {kind for _, _, kind in steps_of(timed)} == {0}
            told = {(number % 4 == 3, kind) for _, number, kind in steps_of(profiled)}
            assert len(told) == 2


def test_of_kinds_whose_orders_contradict_each_other_one_is_measured_and_the_window_says_so() -> None:
    for window in valid_windows("turned round"):
        (note,) = [problem for problem in window["problems"] if problem.startswith("the job has 2 kinds")]
        assert "collectives of 12.8 KiB in another order" in note
        assert "left out, because the other mode had none of their kind: " in note
        assert any("collective 0 of the step was" in problem for problem in window["problems"])
        for timed, _ in window["parts"]:
            assert {arm for arm, _, _ in steps_of(timed)} == set(Mode)
            assert len({number % 3 == 2 for _, number, _ in steps_of(timed)}) == 1
