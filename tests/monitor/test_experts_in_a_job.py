"""A mixture of experts on two and three ranks over Gloo, whose split sizes are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import JsonlSink, OverlapMonitor
from overlap_callbacks.report.record import read
from tests.distributed import run_ranks
from tests.monitor.jobs import tiny_schedule

WIDTH = 8
ROW_BYTES = 4 * WIDTH
LAYERS = 3


def sent(rank: int, world_size: int, step: int) -> list[int]:
    """Rows that a rank sends to each expert rank: the first has most, and more from step to step."""
    extra = 6 + step
    return [2 + extra * (other == 0) + rank * (other == 1) for other in range(world_size)]


def received(rank: int, world_size: int, step: int) -> list[int]:
    return [sent(other, world_size, step)[rank] for other in range(world_size)]


class Exchange(torch.autograd.Function):
    """Tokens to the experts, or back; in the backward pass the other way, as frameworks do it."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, there: list[int], back: list[int], group: Any, lists: bool) -> Any:
        ctx.sizes = (there, back, group, lists)
        return exchanged(tokens, there, back, group, lists)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        there, back, group, lists = ctx.sizes
        return exchanged(gradient, back, there, group, lists), None, None, None, None


def exchanged(tokens: torch.Tensor, there: list[int], back: list[int], group: Any, lists: bool) -> torch.Tensor:
    """Rows that come back, by one tensor with split sizes or by a tensor for each rank; Gloo takes even ones."""
    result = tokens.new_empty(sum(back), WIDTH)
    if lists:
        dist.all_to_all(list(result.split(back)), list(tokens.contiguous().split(there)), group=group)
    else:
        dist.all_to_all_single(result, tokens.contiguous(), back, there, group=group)
    return result


def train(
    rank: int, folder: str, world_size: int, every: int | None, steps: int, even_lists: bool = False
) -> list[float]:
    group = dist.new_group(list(range(world_size)), group_desc="EXPERT_MODEL_PARALLEL_GROUP")
    torch.manual_seed(rank)
    experts = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(experts.parameters(), lr=1e-3)
    options: dict[str, Any] = {} if every is None else {"sample_experts_every": every}
    options |= {"run_dir": folder, "max_overhead": None, "power": False, "strict": True}
    monitor = OverlapMonitor(tiny_schedule(every_n_steps=20), [JsonlSink(folder)], **options)
    losses = []
    for step in range(steps):
        with monitor.step(step):
            there, back = sent(rank, world_size, step), received(rank, world_size, step)
            if even_lists:
                there = back = [2] * world_size
            tokens = torch.ones(sum(there), WIDTH)
            for expert in experts:
                dispatched = Exchange.apply(tokens, there, back, group, even_lists)
                tokens = Exchange.apply(expert(dispatched), back, there, group, even_lists)
            loss = tokens.pow(2).mean()
            loss.backward()
            for parameter in experts.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    monitor.close()
    return losses


def expected(world_size: int, step: int) -> tuple[float, float]:
    """Max over mean and coefficient of variation of what expert ranks receive."""
    loads = torch.tensor([float(sum(received(rank, world_size, step))) for rank in range(world_size)])
    return float(loads.max() / loads.mean()), float(loads.std(correction=0) / loads.mean())


def test_even_lists_of_tensors_are_no_splits(tmp_path: Path) -> None:
    # Of an all-to-all of equal parts nobody knows whether a router chose them.
    run_ranks(train, 2, str(tmp_path), 2, None, 9, True)
    assert read(tmp_path).windows[0].experts is None


@pytest.mark.parametrize("world_size", [2, 3])
def test_loads_are_those_of_the_splits_step_by_step(tmp_path: Path, world_size: int) -> None:
    run_ranks(train, world_size, str(tmp_path), world_size, None, 9)
    window = read(tmp_path).windows[0]
    assert window.experts is not None
    assert window.expert_details is not None
    assert (window.experts.dimension, window.experts.group_size, window.experts.num_ranks) == (
        "expert",
        world_size,
        world_size,
    )
    # Of each layer one dispatch forward and one backward.
    assert window.experts.all_to_alls == 2 * LAYERS
    steps = window.expert_details.steps
    assert [one.step for one in steps] == list(range(2, 7)), "the window's own"
    assert all(one.in_window for one in steps)
    for one in steps:
        most, variation = expected(world_size, one.step)
        assert one.load_max_over_mean == pytest.approx(most)
        assert one.load_cv == pytest.approx(variation)
        splits = [torch.tensor(sent(rank, world_size, one.step), dtype=torch.float64) for rank in range(world_size)]
        peaks = [float(split.max() / split.mean()) for split in splits]
        assert one.split_max_over_mean == pytest.approx(sum(peaks) / len(peaks))
    mean = [
        sum(sum(received(rank, world_size, one.step)) for one in steps) / len(steps) * ROW_BYTES * 2 * LAYERS
        for rank in range(world_size)
    ]
    assert window.expert_details.by_expert_rank == pytest.approx(mean)
    assert window.experts.highest_rank == 0
    assert window.metrics()["expert/load_max_over_mean"] == pytest.approx(window.experts.load_max_over_mean)


def test_steps_between_windows_are_sampled_where_that_is_asked_for(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path), 2, 5, 28)
    first, second = read(tmp_path).windows
    assert first.expert_details is not None
    assert all(one.in_window for one in first.expert_details.steps), "the session opens with the first window"
    assert second.experts is not None
    assert second.expert_details is not None
    sampled = [one for one in second.expert_details.steps if not one.in_window]
    assert [one.step for one in sampled] == [10, 15, 20]
    assert second.experts.num_sampled == 3
    for one in sampled:
        assert (one.load_max_over_mean, one.load_cv) == pytest.approx(expected(2, one.step))


def test_training_is_bit_identical_with_sampling_and_without(tmp_path: Path) -> None:
    sampled = run_ranks(train, 2, str(tmp_path / "a"), 2, 3, 24)
    plain = run_ranks(train, 2, str(tmp_path / "b"), 2, None, 24)
    assert sampled == plain
