"""One rule for what a user's line gets wrong at the start; docs/options.md has it for users.

A wrong type or value raises at once, whatever ``strict`` is. An object of the right type that cannot be measured
switches measuring off on all ranks with one sentence on rank 0, and raises with ``strict=True``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.integrations import pytorch
from tests.distributed import captured_log, run_alone, run_ranks
from tests.monitor.jobs import KeptReports, tiny_schedule

NUM_STEPS = 12


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is missing")


# -- wrong types


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def deepspeed_attach(*args: Any, **options: Any) -> Any:
    from overlap_callbacks.integrations.deepspeed import attach

    return attach(*args, **options)


def megatron_attach(*args: Any, **options: Any) -> Any:
    from overlap_callbacks.integrations.megatron import attach

    return attach(*args, **options)


def accelerate_attach(*args: Any, **options: Any) -> Any:
    from overlap_callbacks.integrations.transformers import attach_accelerate

    return attach_accelerate(*args, **options)


def deepspeeds_wrapper() -> Any:
    from accelerate.utils import DeepSpeedOptimizerWrapper

    wrapped = DeepSpeedOptimizerWrapper.__new__(DeepSpeedOptimizerWrapper)
    wrapped.optimizer = object()
    return wrapped


def raised(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_types(adapter: str) -> list[str]:
    """What calls with something of another type raise, with and without ``strict``."""
    model = nn.Linear(2, 2)
    calls: dict[str, list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]] = {
        "pytorch": [
            (pytorch.attach, (model,), {}),
            (pytorch.attach, (an_optimizer(),), {"model": 5}),
            (pytorch.attach, (an_optimizer(),), {"pipeline": model}),
            (pytorch.attach, (an_optimizer(),), {"every_n": 5}),
        ],
        "accelerate": [(accelerate_attach, (an_optimizer(),), {})],
        "deepspeed": [(deepspeed_attach, (model,), {})],
        "megatron": [(megatron_attach, (model, an_optimizer()), {}), (megatron_attach, ([], None), {})],
    }
    strict: tuple[dict[str, Any], ...] = ({}, {"strict": True})
    return [raised(call, *args, **options, **mode) for call, args, options in calls[adapter] for mode in strict]


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (
            "pytorch",
            ["optimizer must be", "model must be", "pipeline must be", "unknown options ['every_n']"],
        ),
        pytest.param("accelerate", ["optimizer must be what accelerator.prepare gave"], marks=needs("accelerate")),
        pytest.param("deepspeed", ["engine must be what"], marks=needs("deepspeed")),
        pytest.param("megatron", ["optimizer must be Megatron's", "model_chunks must be"], marks=needs("megatron")),
    ],
)
def test_a_wrong_type_raises_at_once_in_any_mode(adapter: str, said: list[str]) -> None:
    found = run_alone(wrong_types, adapter, timeout_s=90.0)
    expected = [text for text in said for _ in range(2)]
    assert len(found) == len(expected)
    assert all(line.startswith(f"TypeError: {text}") for line, text in zip(found, expected, strict=True)), found


# -- objects that cannot be measured


def switched_off_by(call: Callable[..., Any], *args: Any, **options: Any) -> tuple[bool, list[str], str]:
    """Whether it is measured, the messages, and what ``strict`` raises."""
    with captured_log() as lines:
        monitor = call(*args, **options)
    return monitor.active, lines, raised(call, *args, strict=True, **options)


def give_what_deepspeed_steps() -> Any:
    return switched_off_by(accelerate_attach, deepspeeds_wrapper())


@needs("accelerate")
def test_an_accelerated_optimizer_that_deepspeed_steps_switches_measuring_off() -> None:
    active, lines, error = run_alone(give_what_deepspeed_steps, timeout_s=90.0)
    assert not active
    (line,) = lines
    assert "measuring is switched off, training goes on: DeepSpeedOptimizerWrapper is stepped by its engine" in line
    assert error.startswith("ValueError: DeepSpeedOptimizerWrapper is stepped by its engine")


def train_with_local_sgd(rank: int, given: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 16))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=2))
    sink, found = KeptReports(), None
    monitor: Any = None
    if given == "wrapper":
        found = switched_off_by(pytorch.attach, optimizer)
    elif given == "inner":
        monitor = pytorch.attach(
            inner,
            sinks=[sink],
            schedule=tiny_schedule(spread=False, every_n_steps=50),
            max_overhead=None,
            power=False,
            strict=True,
        )
    data = torch.Generator().manual_seed(rank)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 16, generator=data)).square().mean().backward()
        optimizer.step()
    if monitor is not None:
        monitor.close()
    weights = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return {"found": found, "weights": weights, "windows": [report["complete"] for report in sink.facts()]}


def test_an_optimizer_without_step_hooks_switches_measuring_off_and_trains_as_without_the_library() -> None:
    plain, wrapped = run_ranks(train_with_local_sgd, 2, ""), run_ranks(train_with_local_sgd, 2, "wrapper")
    assert [rank["weights"] for rank in wrapped] == [rank["weights"] for rank in plain]
    for number, rank in enumerate(wrapped):
        active, lines, error = rank["found"]
        assert not active
        said = [line.partition("on all ranks, training goes on: ")[2] for line in lines]
        start = "optimizer must take step hooks, which a PostLocalSGDOptimizer does not"
        assert [line[: len(start)] for line in said] == [start] * (number == 0)
        assert error.startswith("ValueError: optimizer must take step hooks")


def test_the_optimizer_within_it_is_measured() -> None:
    plain, measured = run_ranks(train_with_local_sgd, 2, ""), run_ranks(train_with_local_sgd, 2, "inner")
    assert [rank["weights"] for rank in measured] == [rank["weights"] for rank in plain]
    assert measured[0]["windows"] == [True]


def attach_without_a_group() -> Any:
    assert not dist.is_initialized()
    return switched_off_by(pytorch.attach, an_optimizer())


def test_no_process_group_switches_measuring_off() -> None:
    active, lines, error = run_alone(attach_without_a_group)
    assert not active
    assert len(lines) == 1
    assert error.startswith("RuntimeError: attach(optimizer) was called before")
