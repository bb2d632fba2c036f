"""What changed along a run, where and why, from stretches of steps of ranks whose parts are known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from overlap_callbacks.analysis.job.frontier import RankStretch, frontier_of, merge
from overlap_callbacks.analysis.results.change import Change
from overlap_callbacks.analysis.results.frontier import StepFrontier
from overlap_callbacks.analysis.step_vectors import PARTS, StepVectors
from overlap_callbacks.analysis.watch import RunWatch, change_in_words

STEPS, RANKS = 128, 4
# Milliseconds of each part; the rest of a step is waiting for the slowest rank.
USUAL = {"input": 2.0, "forward": 10.0, "backward": 20.0, "optimizer": 3.0}
TRANSFER_MS = 5.0


def stretch(
    number: int, extra: Mapping[tuple[str, int], float], *, transfer_ms: float = TRANSFER_MS, scale: float = 1.0
) -> StepFrontier:
    """One stretch of a synchronous job; ``extra`` milliseconds of a part at a rank."""
    chance = np.random.default_rng(number)
    own = {
        (part, rank): (ms + extra.get((part, rank), 0.0)) * scale * chance.normal(1, 0.02, STEPS)
        for part, ms in USUAL.items()
        for rank in range(RANKS)
    }
    before = ("input", "forward", "backward")
    ready = {rank: sum(own[part, rank] for part in before) for rank in range(RANKS)}
    done = np.max(list(ready.values()), axis=0) + transfer_ms * chance.normal(1, 0.05, STEPS)
    slowest = np.max([own["optimizer", rank] for rank in range(RANKS)], axis=0)
    found = []
    for rank in range(RANKS):
        parts = np.zeros((STEPS, len(PARTS)))
        for part in USUAL:
            parts[:, PARTS.index(part)] = own[part, rank]
        parts[:, PARTS.index("waiting")] = done - ready[rank] + slowest - own["optimizer", rank]
        steps = np.arange(STEPS) + number * STEPS
        vectors = StepVectors(steps, steps, np.round(parts * 1e6).astype(np.int64), np.ones(STEPS, dtype=bool))
        found.append(RankStretch.of(rank, vectors, number * STEPS, STEPS))
    return frontier_of(merge(found))


def watched(since: int = 40, until: int = 60, **fault: object) -> list[Change]:
    watch, usual = RunWatch(), {"extra": {}}
    return [
        change
        for number in range(until)
        for change in watch.stretch(stretch(number, **(fault if number >= since else usual)))  # type: ignore[arg-type]
    ]


def test_a_quiet_run_tells_nothing() -> None:
    assert watched(until=200, extra={}) == []


@pytest.mark.parametrize(
    ("extra", "cause", "ranks"),
    [
        ({("input", 2): 4.0}, "input", (2,)),
        ({("forward", 3): 4.0}, "compute", (3,)),
        ({("backward", 0): 4.0}, "compute", (0,)),
        ({("input", rank): 4.0 for rank in range(RANKS)}, "input", ()),
        ({("backward", 2): 4.0, ("backward", 3): 4.0}, "compute", (2, 3)),
    ],
)
def test_a_slow_rank_is_told_with_its_cause(extra: dict[tuple[str, int], float], cause: str, ranks: tuple[int]) -> None:
    (found,) = watched(extra=extra)
    assert (found.cause, found.ranks) == (cause, ranks)
    assert found.step_ms == pytest.approx(4.0, abs=0.8)  # the ranks were apart before too
    assert 39 * STEPS <= found.first_step <= 41 * STEPS
    assert found.found_step < 50 * STEPS
    assert "communication" in found.is_not
    assert ("input" in found.is_not) is (cause == "compute")


def test_a_slow_link_is_communication_and_no_rank() -> None:
    (found,) = watched(extra={}, transfer_ms=9.0)
    assert (found.cause, found.ranks) == ("communication", ())
    assert "input" in found.is_not
    assert found.repeat == "overlap bench collectives"


def test_a_step_that_grows_is_found_at_all_ranks() -> None:
    watch = RunWatch()
    found = [
        change
        for number in range(120)
        for change in watch.stretch(stretch(number, {}, scale=1 + 0.003 * max(0, number - 40)))
    ]
    assert found
    assert {(change.cause, change.ranks) for change in found} == {("compute", ())}


def test_the_end_of_a_slowdown_is_told_too() -> None:
    watch = RunWatch()
    found = [
        change
        for number in range(90)
        for change in watch.stretch(stretch(number, {("forward", 1): 4.0} if 40 <= number < 65 else {}))
    ]
    assert [round(change.step_ms) for change in found] == [4, -4]


def test_words() -> None:
    (found,) = watched(extra={("forward", 3): 4.0})
    assert change_in_words(found).startswith(f"the step takes {found.step_ms:.2f} ms longer since step ")
    assert ": compute at rank 3, not input or communication" in change_in_words(found)
