"""The race check: it changes nothing of training, finds a planted race, and never leaves a rank waiting."""

from __future__ import annotations

import contextlib
import functools
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.analysis.results.race import RaceVerdict
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.monitor.background.store import StoreChannel
from overlap_callbacks.monitor.race.ballot import FAILED
from tests.distributed import captured_log, die, run_mortal_ranks, run_ranks
from tests.monitor.jobs import tiny_schedule
from tests.monitor.race_jobs import Job, Net, checked, ddp, fsdp2
from tests.monitor.racy_hooks import hasty, patient
from tests.monitor.test_keys_left import keys_of

_KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp views": {"wrap": lambda net: ddp(net, gradient_as_bucket_view=True), "keep_gradients": True},
    "ddp with a hook": {"hook": patient},
    "fsdp2": {"wrap": fsdp2},
    "zero1": {"zero": True},
}


def with_and_without(rank: int) -> Any:
    found = {}
    for kind, options in _KINDS.items():
        plain = Job(rank, **options)
        plain.train()
        job = Job(rank, **options)
        outcomes, lines = checked(job)
        found[kind] = job.state() == plain.state(), job.repetitions, outcomes, lines
    return found


def test_training_is_bit_identical_with_the_check_and_no_race_is_found() -> None:
    first, second = run_ranks(with_and_without, 2)
    for kind in _KINDS:
        for same, repetitions, _, lines in (first[kind], second[kind]):
            assert same, kind
            assert repetitions == 8, kind
            assert lines == [], kind
        outcomes = first[kind][2]
        assert [outcome.verdict for outcome in outcomes] == [RaceVerdict.EQUAL] * 2, kind
        assert all(o.num_ranks == 2 and o.num_gradients == 8 and o.held_bytes > 0 for o in outcomes), kind


def with_planted_race(rank: int) -> Any:
    found = []
    for _ in range(5):
        job = Job(rank, hook=hasty, width=512)
        outcomes, lines = checked(job, steps=8)
        found.append((outcomes, lines))
    return found


def test_a_planted_race_is_found_each_time_and_named() -> None:
    results = run_ranks(with_planted_race, 2, timeout_s=90.0)
    for outcomes, lines in results[0]:
        (outcome,) = outcomes
        assert outcome.verdict is RaceVerdict.RACE
        assert outcome.num_differing >= 1
        names = [row.parameter for row in outcome.differences]
        assert set(names) <= {f"module.{p}" for p, _ in Net().named_parameters()}
        for row in outcome.differences:
            assert row.bucket.startswith("DDP bucket ")
            assert "allreduce_" in row.collective
        (warning,) = [line for line in lines if "Race check" in line]
        assert names[0] in warning
        assert outcome.differences[0].bucket in warning


# -- what is no race


def training_with(rank: int) -> Any:
    plain = Job(rank)
    plain.train()
    numbers = iter(range(100))

    def steps_too(job: Job) -> None:
        job.repeat()
        job.optimizer.step()

    def changes_parameters(job: Job) -> None:
        job.repeat()
        for parameter in job.model.parameters():
            parameter.data.mul_(2)

    def evaluates(job: Job) -> None:
        job.model.eval()
        job.repeat()

    def fails(job: Job) -> None:
        raise ValueError("no batch is held")

    def differs_each_time(job: Job) -> None:
        (job.model(job.held).square().mean() * (1 + next(numbers))).backward()

    found = {}
    for function in (steps_too, changes_parameters, evaluates, fails, differs_each_time):
        job = Job(rank)
        outcomes, lines = checked(job, repeat=functools.partial(function, job))
        found[function.__name__] = job.state() == plain.state(), [(o.verdict, o.reason) for o in outcomes], lines
    return found


def test_whatever_the_function_does_training_is_bit_identical() -> None:
    first, second = run_ranks(training_with, 2)
    for name, (same, _, _) in [*first.items(), *second.items()]:
        assert same, name
    reasons = {
        "steps_too": "it would have stepped an optimizer",
        "changes_parameters": "repeat_step changed parameters of the model, which were put back",
        "fails": "repeat_step raised ValueError: no batch is held",
    }
    for name, reason in reasons.items():
        _, ((verdict, why),), lines = first[name]
        assert verdict is RaceVerdict.NOT_CHECKED
        assert reason in why
        assert any(reason in line for line in lines), name
    assert [verdict for verdict, _ in first["evaluates"][1]] == [RaceVerdict.EQUAL] * 2
    _, outcomes, lines = first["differs_each_time"]
    assert [verdict for verdict, _ in outcomes] == [RaceVerdict.NOT_REPEATABLE] * 2
    assert any("the job is not deterministic" in line for line in lines)


# -- one rank alone


def failing_alone(rank: int) -> Any:
    job = Job(rank)

    def repeat() -> None:
        if rank == 1:
            raise ValueError("out of memory on this rank")
        job.repeat()

    return checked(job, repeat=repeat, order_timeout_s=1.0, report_timeout_s=1.0)


def test_what_one_rank_alone_raises_is_raised_in_the_job_and_no_rank_hangs() -> None:
    first, second = run_mortal_ranks(failing_alone, 2, timeout_s=40.0)
    assert not second.returned
    assert "ValueError: out of memory on this rank" in second.error
    assert not first.returned  # it waited for rank 1's collectives, which ended with it


def dying_after_a_vote(rank: int) -> list[str]:
    """Rank 1 alone fails in a repetition, votes, and is killed: it has terms that nobody shares."""
    job, add = Job(rank), StoreChannel.add

    def repeat() -> None:
        if rank == 1:
            raise ValueError("out of memory on this rank")
        job.repeat()

    def add_and_die(channel: StoreChannel, key: str, amount: int = 1) -> int:
        found = add(channel, key, amount)
        if f"/{FAILED}/" in key and rank == 1:
            die()
        return found

    with mock.patch.object(StoreChannel, "add", add_and_die), contextlib.suppress(RuntimeError):  # rank 1 is gone
        monitor = attach(
            job.optimizer,
            model=job.model,
            repeat_step=repeat,
            check_gradients=True,
            schedule=tiny_schedule(),
            sinks=[],
            max_overhead=None,
            power=False,
        )
        try:
            job.train(14)
        finally:
            monitor.close(5.0)
    return sorted(key for key in keys_of(dist.distributed_c10d._get_default_store()) if "/race/" in key)


def test_a_rank_killed_after_a_lone_vote_leaves_no_key() -> None:
    first, second = run_mortal_ranks(dying_after_a_vote, 2, timeout_s=60.0)
    assert second.exit_code == -signal.SIGKILL
    assert first.returned, str(first)
    assert first.value == []


class _State:
    def __init__(self, value: Any) -> None:
        self.value = value


def counting(state: Any, bucket: Any) -> Any:
    state.value = state.value + state.value
    return patient(None, bucket)


counting.__annotations__ = {}


def refusals(rank: int) -> Any:
    found: dict[str, Any] = {}
    plain = Job(rank)
    plain.train()
    job = Job(rank)
    if rank == 1:
        job.model.module.first.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    outcomes, lines = checked(job)
    found["one rank alone"] = job.repetitions, [(o.verdict, o.reason) for o in outcomes], lines
    found["same"] = job.state() == plain.state()
    for kind, value in (("a counter", 1), ("a list", [1])):
        plain, job = Job(rank), Job(rank)
        states = _State(value), _State(value)
        for each, state in zip((plain, job), states, strict=True):
            each.model.register_comm_hook(state, counting)
        plain.train(7)
        outcomes, _ = checked(job, steps=7)
        alike = len(str(states[0].value)) == len(str(states[1].value))
        found[kind] = alike, [(o.verdict, o.reason) for o in outcomes]
    with captured_log() as lines:
        options: dict[str, Any] = {"schedule": tiny_schedule(), "sinks": [], "max_overhead": None, "power": False}
        job = Job(rank)
        monitor = attach(job.optimizer, check_gradients=True, **options)
        job.train(8)
        monitor.close()
    found["no function"] = lines
    return found


def test_where_a_step_cannot_be_repeated_no_rank_repeats_it_and_it_is_said_once() -> None:
    first, second = run_ranks(refusals, 2)
    assert first["same"]
    assert second["same"]
    assert not second["one rank alone"][0]
    repetitions, ((verdict, why),), lines = first["one rank alone"]
    assert not repetitions
    assert verdict is RaceVerdict.NOT_CHECKED
    assert "post-accumulate-grad hooks" in why
    assert len(lines) == 1
    # What a hook counts is put back; what else it may keep cannot be.
    assert first["a counter"] == (True, [(RaceVerdict.EQUAL, "")])
    alike, ((verdict, why),) = first["a list"]
    assert alike
    assert verdict is RaceVerdict.NOT_CHECKED
    assert "keeps a state that a repeated step would change" in why
    (line,) = first["no function"]
    assert "check_gradients=True has no step to repeat" in line


def test_a_function_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="repeat_step must be callable, got 3"):
        attach(torch.optim.SGD([torch.zeros(1)], lr=0.1), repeat_step=3)  # type: ignore[arg-type]
