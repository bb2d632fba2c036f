"""Parts of a step add up exactly, whatever the marks are; and the frontier tells who holds whom up."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.job.frontier import (
    MAX_STRETCHES,
    RankStretch,
    RunFrontier,
    decode,
    encode,
    frontier_of,
    merge,
    total,
)
from overlap_callbacks.analysis.results.frontier import StepFrontier
from overlap_callbacks.analysis.step_vectors import (
    AFTER_BACKWARD,
    AS_AT_FIRST,
    BACKWARD,
    EVALUATION,
    FIRST_STEP,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OTHER,
    PARTS,
    TOGETHER,
    WAITING,
    StepVectors,
    parts_of,
)
from overlap_callbacks.monitor.step_ring import SIZE, StepRing


def parts(*marks: int) -> list[dict[str, int]]:
    """The parts of steps whose marks are 1, 2, 3, ... ns apart."""
    times = np.cumsum(np.arange(len(marks))) + 10**18
    found = parts_of(np.array(marks), times)
    return [{name: int(ns) for name, ns in zip(PARTS, row, strict=True) if ns} for row in found]


def test_what_follows_a_backward_pass_is_told_by_what_comes_next() -> None:
    step, following = FIRST_STEP + 7, FIRST_STEP + 8
    passes = (FORWARD, BACKWARD, WAITING, AFTER_BACKWARD)
    assert parts(step, *passes, OPTIMIZER, following) == [
        {"input": 1, "forward": 2, "backward": 3, "waiting": 4, "optimizer": 5 + 6}
    ]
    assert parts(step, *passes, *passes, OPTIMIZER, following) == [
        {"input": 1 + 5, "forward": 2 + 6, "backward": 3 + 7, "waiting": 4 + 8, "optimizer": 9 + 10}
    ]
    assert parts(step, *passes, following)[0]["optimizer"] == 5
    assert parts(step, *passes, EVALUATION, following)[0]["other"] == 5


def test_without_a_mark_of_the_forward_pass_the_parts_up_to_the_optimizer_are_one() -> None:
    marks = (WAITING, AFTER_BACKWARD, WAITING, AFTER_BACKWARD, AS_AT_FIRST, OPTIMIZER)
    assert parts(FIRST_STEP, *marks, FIRST_STEP + 1) == [
        {"input_forward_backward": 1 + 3 + 6, "waiting": 2 + 4, "other": 5, "optimizer": 7}
    ]


def test_any_marks_add_up_to_the_step_exactly() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        marks = random.integers(0, AS_AT_FIRST + 1, 300)
        begins = np.unique([0, *random.integers(0, 300, 20), 299])
        marks[begins] = FIRST_STEP + np.arange(len(begins))
        times = np.cumsum(random.integers(0, 10**10, 300)) + 10**15
        assert (parts_of(marks, times).sum(axis=1) == np.diff(times[begins])).all()


def a_stretch(rank: int, late: dict[int, int], ranks: int = 4) -> RankStretch:
    """A stretch of 64 steps of one of some ranks: ``late`` adds to a part; the others wait for the latest rank."""
    random = np.random.default_rng(rank)
    times = np.zeros((64, len(PARTS)), dtype=np.int64)
    for part, length in ((INPUT, 1_000), (FORWARD, 5_000), (BACKWARD, 9_000)):
        times[:, part] = length + random.integers(0, 100, 64) + late.get(part, 0)
    times[:, WAITING] = 30_000 - times.sum(axis=1)
    times[:, OPTIMIZER] = 700
    steps = np.arange(128, 192)
    return RankStretch.of(rank, StepVectors(steps, steps, times, steps != 150), 128, 64)


@pytest.mark.parametrize("part", [INPUT, FORWARD, BACKWARD])
def test_the_frontier_names_the_late_rank_and_its_part_and_adds_up(part: int) -> None:
    stretches = [a_stretch(rank, {part: 3_000} if rank == 2 else {}) for rank in range(4)]
    whole = merge(stretches)
    assert decode(encode(whole)) == whole == merge([merge(stretches[2:]), merge(stretches[:2])])
    found = frontier_of(whole)
    assert (found.num_ranks, found.num_steps, found.first_step, found.last_step) == (4, 63, 128, 191)
    assert sum(found.frontier_ns.values()) == 63 * 30_700  # the steps of all ranks are equally long
    worst, second = found.held_up[:2]
    assert (worst.part, worst.rank) == (PARTS[part], 2)
    # By three quarters of what it is later: the mean over the ranks has a quarter.
    assert worst.ns / 63 == pytest.approx(0.75 * 3_000, rel=0.05)
    assert second.ns < worst.ns / 10
    assert found.frontier_ns["waiting"] < found.mean_ns["waiting"]


def test_steps_that_a_rank_does_not_know_do_not_count_and_other_steps_do_not_mix() -> None:
    first, second = a_stretch(0, {}), a_stretch(1, {})
    steps = np.arange(140, 192)
    few = RankStretch.of(1, StepVectors(steps, steps, np.ones((52, len(PARTS)), dtype=np.int64), steps > 0), 128, 64)
    assert frontier_of(merge([first, few])).num_steps == 51
    with pytest.raises(ValueError, match="not the same steps"):
        merge([first, RankStretch.of(1, StepVectors.joined([]), 192, 64)])
    assert frontier_of(RankStretch.of(1, StepVectors.joined([]), 192, 64)).num_steps == 0
    with pytest.raises(ValueError, match="other lengths"):
        RankStretch(second.heard, 128, 63, second.known, second.last_ns, second.last_rank, second.total_ns)


def test_a_stretch_that_is_not_possible_is_not_believed_and_a_silent_rank_is_named() -> None:
    own, other = a_stretch(0, {}), a_stretch(1, {})
    both = merge([other, a_stretch(2, {})])
    assert other.is_like(own, range(1, 3))
    assert both.is_like(own, range(1, 3))
    negative, huge = np.array([-1], dtype=np.int64).tobytes(), np.array([2**62], dtype=np.int64).tobytes()

    def changed(**fields: Any) -> bool:
        return msgspec.structs.replace(both, **fields).is_like(own, range(1, 3))

    for name in ("known", "last_ns", "last_rank", "total_ns"):
        for cell in (negative, huge):
            assert not changed(**{name: cell + getattr(both, name)[8:]}), name
    for heard in (((0, 2),), ((1, 3),), ((2, 1),), ((1, 1), (1, 2)), ((2, 2), (1, 1)), ((1, 2), (2, 2))):
        assert not changed(heard=heard), heard
    assert not changed(first_step=0)
    assert not RankStretch.of(1, StepVectors.joined([]), 128, 65).is_like(own, range(1, 3))
    found = frontier_of(merge([own, both]), silent=(3,))
    assert (found.num_ranks, found.silent) == (3, (3,))
    whole = total([frontier_of(merge([own, both])), found])
    assert whole is not None
    assert whole.silent == (3,)


def test_a_run_of_ten_million_steps_keeps_and_writes_a_bounded_number_of_rows() -> None:
    run, written = RunFrontier(), []
    stretch = frontier_of(merge([a_stretch(0, {}), a_stretch(1, {FORWARD: 500})]))
    number = 10_000_000 // 128
    for _ in range(number):
        row = run.append(stretch)
        if row is not None:
            written.append(row)
    assert len(run.stretches) <= MAX_STRETCHES
    assert len(written) < MAX_STRETCHES * 6
    left = [] if run.incomplete is None else [run.incomplete]
    whole, from_record = run.whole, total([*written, *left])
    assert isinstance(whole, StepFrontier)
    assert isinstance(from_record, StepFrontier)
    assert whole.num_steps == from_record.num_steps == number * stretch.num_steps
    assert whole.frontier_ns == {part: number * ns for part, ns in stretch.frontier_ns.items()}
    assert from_record.frontier_ns == whole.frontier_ns


def test_marks_take_no_more_memory_with_the_steps() -> None:
    ring = StepRing([].append)

    def steps(first: int, number: int, *, reads: bool) -> int:
        for step in range(first, first + number):
            ring.begin(step)
            for part in (FORWARD, BACKWARD, WAITING, AFTER_BACKWARD, OPTIMIZER, OTHER):
                ring.enter(part)
            if reads and step % 128 == 0:
                ring.vectors()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = steps(0, 20_000, reads=True)
        assert steps(20_000, 40_000, reads=True) < before + 100_000
        assert steps(60_000, 40_000, reads=False) < before + 30_000_000  # the marks that nobody has read
        bounded = tracemalloc.get_traced_memory()[0]
        assert steps(100_000, 20_000, reads=False) < bounded + 100_000
    finally:
        tracemalloc.stop()
    vectors = ring.vectors()
    assert len(vectors) == SIZE
    assert vectors.steps.tolist() == list(range(119_999 - SIZE, 119_999))
    assert (vectors.step_ns == np.append(np.diff(vectors.begun_ns), vectors.step_ns[-1])).all()
    assert not vectors.parts_ns[:, TOGETHER].any()


def test_a_step_number_that_goes_back_begins_anew_and_a_spoilt_or_last_step_before_a_jump_is_not_ordinary() -> None:
    ring = StepRing([].append)
    for step in (5, 6, 7, 3, 4, 5, 9, 10):
        ring.begin(step)
        if step == 4:
            ring.spoil(4)
    vectors = ring.vectors()
    assert vectors.steps.tolist() == [3, 4, 5, 9]
    assert vectors.ordinary.tolist() == [True, False, False, True]
    assert ring.durations()[0].tolist() == [3, 9]
