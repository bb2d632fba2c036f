"""Loads of experts by numbers that were worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.experts import (
    MAX_POSITIONS,
    MAX_STEPS,
    AllToAll,
    ExpertSums,
    add_experts,
    dispatches,
    max_over_mean,
    pooled_experts,
    rank_experts,
    step_experts,
    sums_of,
    variation,
)
from overlap_callbacks.analysis.job.part import decode, encode, merge, part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.results.experts import ExpertDetails, ExpertLoads, RankExperts, StepExperts
from tests.samples import window

ROW_BYTES = 10


def call(sent: tuple[int, ...], received: tuple[int, ...], group: str = "ep", dimension: str = "expert") -> AllToAll:
    ranks = tuple(range(len(sent)))
    return AllToAll(group, dimension, ranks, sent, received, ROW_BYTES * sum(sent), ROW_BYTES * sum(received))


def test_non_uniformity_of_splits() -> None:
    # 6 and 2 of 8 rows: the mean is 4, the most 6; deviations of 2 and 2.
    assert max_over_mean((6, 2)) == 1.5
    assert variation((6, 2)) == 0.5
    # 1, 2, 3, 6: mean 3, squares of deviations 4 + 1 + 0 + 9 = 14, over 4: 3.5.
    assert max_over_mean((1, 2, 3, 6)) == 2
    assert variation((1, 2, 3, 6)) == pytest.approx(math.sqrt(3.5) / 3)
    assert (max_over_mean((5, 5)), variation((5, 5))) == (1, 0)


def test_splits_that_send_nothing_say_nothing() -> None:
    nothing = call((0, 0), (0, 0))
    assert step_experts(3, [nothing], in_window=True) is None
    step = step_experts(3, [nothing, call((6, 2), (5, 1))], in_window=True)
    assert step is not None
    assert (step.split_max_over_mean, step.split_cv) == (1.5, 0.5)


def test_a_dispatch_is_distinguished_from_a_combine() -> None:
    there, back = call((6, 2), (5, 1)), call((5, 1), (6, 2))
    # Forward there and back, and backward the same.
    assert dispatches([there, back, there, back]) == [there, there]
    # Two layers that overlap: there, there, back, back.
    other, other_back = call((3, 5), (4, 4)), call((4, 4), (3, 5))
    assert dispatches([there, other, other_back, back]) == [there, other]
    # Another group's has nothing to do with it.
    assert len(dispatches([there, call((5, 1), (6, 2), group="another")])) == 2


def test_a_step_of_one_rank() -> None:
    calls = [call((6, 2), (5, 1)), call((5, 1), (6, 2)), call((4, 4), (3, 3)), call((3, 3), (4, 4))]
    found = step_experts(7, calls, in_window=True)
    # Two dispatches send 8 rows each, and receive 6 each; (1.5 + 1) / 2 and (0.5 + 0) / 2.
    assert found == StepExperts(7, True, 2, 160, 120, 1.25, 0.25)
    assert step_experts(7, [], in_window=True) is None
    assert step_experts(7, [call((0, 0), (0, 0))], in_window=True) is None


def test_groups_of_experts_count_before_others() -> None:
    calls = [call((60, 20), (40, 40), dimension="context"), call((6, 2), (4, 4))]
    found = rank_experts(1, -1, [(3, True, calls)])
    assert found is not None
    assert (found.dimension, found.group_size, found.position) == ("expert", 2, 1)
    assert found.steps[0].sent_bytes == 80
    alone = rank_experts(1, -1, [(3, True, calls[:1])])
    assert alone is not None
    assert alone.dimension == "context"
    assert rank_experts(0, -1, [(3, True, [])]) is None


def seen(
    rank: int, received: dict[int, int], *, stage: int = -1, size: int = 2, position: int | None = None
) -> ExpertSums:
    """The records of a rank that received this many bytes in each of these steps."""
    steps = tuple(StepExperts(step, True, 4, 100, number, 1.5, 0.5) for step, number in received.items())
    return sums_of(rank, RankExperts("expert", size, rank % size if position is None else position, stage, steps))


def pooled(*parts: ExpertSums) -> tuple[ExpertLoads, ExpertDetails]:
    loads, details = pooled_experts(add_experts(parts))
    assert loads is not None
    assert details is not None
    return loads, details


def test_loads_of_the_expert_ranks() -> None:
    # Rank 0 receives 300 and rank 1 100: mean 200, most 300; deviations of 100.
    loads, details = pooled(seen(0, {5: 300, 6: 200}), seen(1, {5: 100, 6: 200}))
    first, second = details.steps
    assert (first.load_max_over_mean, first.load_cv) == (1.5, pytest.approx(0.5))
    assert (second.load_max_over_mean, second.load_cv) == (1, pytest.approx(0))
    assert (loads.load_max_over_mean, loads.load_cv) == (1.25, pytest.approx(0.25))
    assert (loads.split_max_over_mean, loads.split_cv) == (1.5, 0.5)
    assert details.by_expert_rank == (250, 150)
    assert (loads.highest_rank, loads.highest_bytes) == (0, 250)
    assert (loads.all_to_alls, loads.dispatched_bytes, loads.num_ranks, loads.num_steps) == (4, 100, 2, 2)


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    # The second stage has twice as many layers with experts. Each stage is even by itself.
    parts = [seen(rank, {5: 100}, stage=0) for rank in (0, 1)] + [seen(rank, {5: 200}, stage=1) for rank in (2, 3)]
    loads, _ = pooled(*parts)
    assert (loads.load_max_over_mean, loads.load_cv) == (1, pytest.approx(0))
    # In one stage they are not.
    loads, _ = pooled(*[seen(rank, {5: 100 if rank < 2 else 200}) for rank in range(4)])
    assert loads.load_max_over_mean == pytest.approx(200 / 150)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1, 1, 1, 1), (4, 4), (2, 3, 3), (1, 7)])
def test_every_tree_of_ranks_gives_the_same(shape: tuple[int, ...]) -> None:
    parts = [seen(rank, {5: 100 + 7 * rank, 6: 50 * (rank % 3 + 1)}, stage=rank // 4, size=4) for rank in range(8)]
    whole = pooled(*parts)
    at, merged = 0, []
    for number in shape:
        merged.append(add_experts(parts[at : at + number]))
        at += number
    loads, details = pooled(*reversed(merged))
    assert loads == whole[0]
    assert details == whole[1]


def test_a_part_is_bounded_at_4096_ranks() -> None:
    steps = {step: 1000 + step for step in range(MAX_STEPS)}
    parts = [
        add_experts([seen(rank + i, steps, stage=rank // 256, size=256) for i in range(64)])
        for rank in range(0, 4096, 64)
    ]
    total = add_experts(parts)
    assert len(msgspec.msgpack.encode(total)) < 100_000
    loads, details = pooled_experts(total)
    assert loads is not None
    assert len(msgspec.json.encode([loads, details])) < 20_000
    assert len(details.by_expert_rank) == 256  # type: ignore[union-attr]
    large = add_experts([seen(rank, {1: 5}, size=2 * MAX_POSITIONS) for rank in range(600)])
    assert not large.positions


def test_many_steps_are_thinned_the_same_way_on_all_ranks() -> None:
    calls = [call((6, 2), (4, 4))]
    found = [rank_experts(rank, -1, [(step, False, calls) for step in range(200)]) for rank in (0, 1)]
    assert found[0] is not None
    assert found[1] is not None
    numbers = [[one.step for one in each.steps] for each in found if each is not None]
    assert numbers[0] == numbers[1]
    assert (len(numbers[0]), numbers[0][0], numbers[0][-1]) == (MAX_STEPS, 0, 199)


def test_the_report_has_loads_and_keys() -> None:
    def part(rank: int, received: int) -> Any:
        own = RankExperts("expert", 2, rank, -1, (StepExperts(20, True, 4, 100, received, 1.5, 0.5),))
        return decode(encode(part_of(window(rank, experts=own))))

    report = report_of(merge([part(0, 300), part(1, 100)]), world_size=2, every_n_steps=500)
    assert report.experts is not None
    assert report.expert_details is not None
    metrics = report.metrics()
    assert metrics["expert/load_max_over_mean"] == 1.5
    assert metrics["expert/dispatched_bytes"] == 100
    assert all(sample.experts is None for sample in report.samples)
    plain = report_of(merge([part_of(window(rank)) for rank in (0, 1)]), world_size=2, every_n_steps=500)
    assert plain.experts is None
    assert not [key for key in plain.metrics() if key.startswith("expert/")]
