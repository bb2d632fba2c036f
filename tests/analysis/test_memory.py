"""The allocator's counters, as it keeps them, around steps of known peaks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from overlap_callbacks.analysis.memory import AllocatorReading, SteppedMemory, peaks_by_mode
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import MemoryPeak
from tests.samples import aggregate_windows, window

OV, SEQ = Mode.OVERLAPPED, Mode.SEQUENTIAL


class Allocator:
    """Keeps two counters with their peaks, as the CUDA allocator does."""

    def __init__(self) -> None:
        self.current = [0, 0]
        self.peak = [0, 0]

    def hold(self, allocated_bytes: int, blocks: int = 1) -> None:
        self.current = [allocated_bytes, blocks]
        self.peak = [max(pair) for pair in zip(self.peak, self.current, strict=True)]

    def reset(self) -> None:
        self.peak = list(self.current)

    def read(self) -> AllocatorReading:
        return AllocatorReading(self.current[0], self.peak[0], tuple(self.peak))

    def step(self, arm: Mode, *amounts: int, reset_before: int = -1) -> SteppedMemory:
        before = self.read()
        for number, amount in enumerate(amounts):
            if number == reset_before:
                self.reset()
            self.hold(amount, blocks=len(amounts) - number)
        return SteppedMemory(arm, before, self.read())


def test_a_peak_that_rises_within_a_step_is_that_steps() -> None:
    allocator = Allocator()
    allocator.hold(100)
    peaks = peaks_by_mode([allocator.step(OV, 500, 100), allocator.step(SEQ, 700, 100)])
    assert [(peak.mode, peak.peak_bytes) for peak in peaks] == [(OV, 500), (SEQ, 700)]


def test_a_peak_that_stays_is_an_upper_bound_alone() -> None:
    allocator = Allocator()
    allocator.hold(900)
    allocator.hold(100)
    (peak,) = peaks_by_mode([allocator.step(SEQ, 700, 200)])
    assert (peak.at_least_bytes, peak.at_most_bytes, peak.peak_bytes) == (200, 900, None)


def test_steps_below_their_modes_own_peak_do_not_make_it_unknown() -> None:
    allocator = Allocator()
    steps = [allocator.step(OV, 500, 100), allocator.step(OV, 400, 100), allocator.step(OV, 500, 100)]
    assert peaks_by_mode(steps)[0].peak_bytes == 500


def test_a_later_peak_of_the_other_mode_hides_further_steps() -> None:
    allocator = Allocator()
    steps = [allocator.step(OV, 500, 100), allocator.step(SEQ, 700, 100), allocator.step(OV, 600, 100)]
    overlapped, sequential = peaks_by_mode(steps)
    assert (overlapped.at_least_bytes, overlapped.at_most_bytes) == (500, 700)
    assert sequential.peak_bytes == 700


@pytest.mark.parametrize("reset_before", [0, 1, 2])
def test_a_reset_by_the_user_within_a_step_leaves_no_upper_bound(reset_before: int) -> None:
    allocator = Allocator()
    allocator.hold(800, blocks=9)
    allocator.hold(100)
    (peak,) = peaks_by_mode([allocator.step(OV, 300, 600, 900, reset_before=reset_before)])
    assert peak.at_most_bytes is None
    assert peak.at_least_bytes == 900


def test_a_reset_between_steps_helps() -> None:
    allocator = Allocator()
    allocator.hold(800)
    allocator.hold(100)
    allocator.reset()
    assert peaks_by_mode([allocator.step(OV, 300, 100)])[0].peak_bytes == 300


def test_bounds_hold_whatever_happens_in_and_between_steps() -> None:
    chance = random.Random(7)
    for _ in range(300):
        allocator, truth, steps = Allocator(), {OV: 0, SEQ: 0}, []
        for _ in range(12):
            arm = chance.choice((OV, SEQ))
            amounts = [chance.randrange(1, 100) for _ in range(4)]
            truth[arm] = max(truth[arm], allocator.current[0], *amounts)
            steps.append(allocator.step(arm, *amounts, reset_before=chance.choice((-1, -1, -1, 0, 0))))
            if chance.random() < 0.3:
                allocator.reset()
        for peak in peaks_by_mode(steps):
            assert peak.at_least_bytes <= truth[peak.mode]
            assert peak.at_most_bytes is None or truth[peak.mode] <= peak.at_most_bytes


def pool(ranks: Sequence[Sequence[MemoryPeak]]) -> tuple[MemoryPeak, ...]:
    windows = [window(rank, memory=tuple(peaks)) for rank, peaks in enumerate(ranks)]
    return aggregate_windows(windows, world_size=len(ranks), every_n_steps=500).memory


def test_a_job_has_the_highest_peak_of_its_ranks() -> None:
    known, lower = MemoryPeak(OV, 700, 700), MemoryPeak(OV, 100, 600)
    assert pool([[known], [lower], []]) == (MemoryPeak(OV, 700, 700),)
    assert pool([[known], [MemoryPeak(OV, 100, 900)]]) == (MemoryPeak(OV, 700, 900),)
    assert pool([[known], [MemoryPeak(OV, 100, None)]]) == (MemoryPeak(OV, 700, None),)


def test_only_what_is_known_has_a_key() -> None:
    peaks = (MemoryPeak(OV, 700, 700), MemoryPeak(SEQ, 100, 900))
    report = aggregate_windows([window(0, memory=peaks)], world_size=1, every_n_steps=500)
    of_memory = {key: value for key, value in report.metrics().items() if "_memory_peak_" in key}
    assert of_memory == {
        "gpu/overlapped_memory_peak_bytes": 700,
        "gpu/overlapped_memory_peak_at_most_bytes": 700,
        "gpu/sequential_memory_peak_at_most_bytes": 900,
    }


def test_on_cpu_there_is_nothing() -> None:
    report = aggregate_windows([window(0)], world_size=1, every_n_steps=500)
    assert report.memory == ()
    assert not [key for key in report.metrics() if "_memory_peak_" in key]


def test_a_mode_that_a_rank_has_no_reading_of_is_not_bounded_from_above() -> None:
    ranks = ((MemoryPeak(OV, 80, 80),), (MemoryPeak(OV, 40, 40), MemoryPeak(SEQ, 40, 40)), ())
    assert pool(ranks) == (MemoryPeak(OV, 80, 80), MemoryPeak(SEQ, 40, None))
