"""Blocks of a least duration: rank 0 works out their steps, and every rank has them alike."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from overlap_callbacks import Mode, OverlapReport
from overlap_callbacks.analysis.results.window import TimedBlock
from tests.distributed import run_ranks
from tests.monitor.jobs import KeptReports, Training, digest_without_library, new_monitor, tiny_schedule
from tests.toggling import at_night

STEP_S = 0.01


class KeptBlocks(KeptReports):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[int, int]] = []  # number and steps

    def block(self, window: int, first_step: int, block: TimedBlock) -> None:
        self.blocks.append((block.block, len(block.step_ms)))


def train(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    schedule = tiny_schedule(first_step=1, warmup_steps=1, repeats=2, **options)
    training, sink = Training(rank), KeptBlocks()
    monitor, modes = new_monitor(sink, schedule=schedule, strict=True), []
    for step in range(1 + 2 * schedule.every_n_steps):
        with monitor.step(step):
            modes.append(monitor.mode)
            training.step()
            time.sleep(STEP_S)
    monitor.close()
    return {
        "modes": modes,
        "blocks": sink.blocks,
        "reports": sink.reports,
        "same": training.digest() == digest_without_library(rank, len(modes)),
    }


def lengths(report: OverlapReport) -> list[tuple[int, int]]:
    return [(block.block, len(block.step_ms)) for block in report.samples[0].timed]


@pytest.mark.parametrize(
    ("blocks", "control"),
    at_night(
        [(blocks, control) for blocks in ("OS", "SO", "OOSS") for control in (False, True)],
        [("OS", False), ("SO", False), ("SO", True), ("OOSS", True)],
    ),
)
def test_every_rank_has_the_same_longer_blocks_and_each_is_logged_once(blocks: str, control: bool) -> None:
    options = {"blocks": blocks, "every_n_steps": 120, "min_block_seconds": 5 * STEP_S, "control": control}
    found = run_ranks(train, 2, options, timeout_s=60)
    assert found[0]["modes"] == found[1]["modes"]
    assert all(rank["same"] for rank in found)
    first, second = found[0]["reports"]
    for report in (first, second):
        assert report.complete
        assert [block for block, _ in lengths(report)] == list(range(2 * len(blocks)))
        assert len({steps for _, steps in lengths(report)}) == 1
        ranks = [[len(block.step_ms) for block in rank.timed] for rank in report.samples]
        assert ranks[0] == ranks[1]
    # The second window goes by the steps of the first, which take at least as long as their sleep.
    assert 1 <= lengths(second)[0][1] <= 5
    assert found[0]["blocks"] == lengths(first) + lengths(second)
    assert (Mode.SEQUENTIAL in found[0]["modes"]) is not control


def test_blocks_for_which_there_is_no_room_are_as_long_as_there_is_and_the_report_says_so() -> None:
    options = {"blocks": "OS", "every_n_steps": 20, "min_block_seconds": 1000.0}
    found = run_ranks(train, 2, options, timeout_s=60)
    report = found[0]["reports"][0]
    # 1 recorded step, and 4 blocks of 1 warm-up step: 15 steps are left for the blocks.
    assert [steps for _, steps in lengths(report)] == [3] * 4
    # Said once, by the rank that decides: the others cannot know the step time that it goes by.
    (problem,) = (problem for problem in report.problems if "min_block_seconds" in problem)
    assert problem.startswith("rank 0: ")
    assert "every_n_steps=20 leaves room for 3" in problem


def test_blocks_are_as_scheduled_where_that_is_long_enough() -> None:
    options = {"blocks": "OS", "every_n_steps": 20, "min_block_seconds": STEP_S / 100}
    report = run_ranks(train, 2, options, timeout_s=60)[0]["reports"][0]
    assert lengths(report) == [(block, 1) for block in range(4)]
    assert report.problems == ()


def train_with_a_slow_first_step_of_windows(rank: int) -> tuple[list[OverlapReport], float]:
    """A job of fast steps, but for the one that the first window records. Tells the mean of the ten before, in s."""
    schedule = tiny_schedule(
        first_step=20, warmup_steps=1, repeats=1, blocks="OS", every_n_steps=100, min_block_seconds=10 * STEP_S
    )
    training, sink = Training(rank), KeptReports()
    monitor = new_monitor(sink, schedule=schedule, strict=True)
    begun_s = []
    for step in range(120):
        with monitor.step(step):
            begun_s.append(time.perf_counter())
            training.step()
            time.sleep(STEP_S * (10 if step == 20 else 1))
    monitor.close()
    return sink.reports, float(np.diff(begun_s[10:21]).mean())


def test_the_first_window_goes_by_the_steps_before_it_not_by_the_slow_one_that_it_records() -> None:
    (report,), mean_s = run_ranks(train_with_a_slow_first_step_of_windows, 2, timeout_s=60)[0]
    # In a new job the later half of the steps before counts. By the recorded step far fewer would be enough.
    assert all(steps >= 0.9 * 10 * STEP_S / mean_s for _, steps in lengths(report))
