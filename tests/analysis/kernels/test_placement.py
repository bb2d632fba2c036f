"""The step of a kernel whose launch is not in the profile."""

from __future__ import annotations

import numpy as np

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import step_of_kernels

BOUNDS = [(100, 200), (200, 300), (350, 400)]
COMPUTE, COMM = 7, 20


def placed(*rows: tuple[int, int, int, int]) -> list[int]:
    """Rows of (start, end, launch or -1, lane)."""
    start, end, launched, lane = np.array(rows, dtype=np.int64).T
    return step_of_kernels(launched, Intervals(start, end), lane, BOUNDS).tolist()


def test_with_a_launch_the_step_is_that_of_the_launch() -> None:
    assert placed((210, 260, 150, COMPUTE), (420, 430, 399, COMPUTE), (500, 510, 320, COMPUTE)) == [0, 2, -1]


def test_without_one_it_is_that_of_its_neighbours_on_the_stream() -> None:
    rows = (310, 320, 150, COMPUTE), (320, 330, -1, COMPUTE), (330, 340, 160, COMPUTE)
    elsewhere = (300, 305, 210, COMM), (306, 345, 220, COMM)  # the next step has begun on the other stream
    assert placed(*rows, *elsewhere) == [0, 0, 0, 1, 1]


def test_neighbours_that_were_launched_outside_all_steps_keep_it_outside() -> None:
    evaluation = (320, 325, 310, COMPUTE), (326, 328, -1, COMPUTE), (330, 335, 320, COMPUTE)
    assert placed((210, 260, 150, COMPUTE), *evaluation, (420, 430, 360, COMPUTE)) == [0, -1, -1, -1, 2]


def test_on_a_stream_of_its_own_it_is_in_the_step_that_the_device_runs() -> None:
    compute = (210, 260, 150, COMPUTE), (261, 300, 210, COMPUTE), (420, 430, 360, COMPUTE)
    collectives = (215, 259, -1, COMM), (262, 310, -1, COMM), (425, 450, -1, COMM)
    assert placed(*compute, *collectives) == [0, 1, 2, 0, 1, 2]


def test_between_the_last_kernel_of_a_step_and_the_next_step_it_is_outside() -> None:
    assert placed((110, 150, 105, COMPUTE), (330, 340, -1, COMM), (360, 390, 355, COMPUTE)) == [0, -1, 2]


def test_leftovers_of_the_step_before_the_profile_stay_outside() -> None:
    leftovers = (90, 100, -1, COMPUTE), (101, 108, -1, COMPUTE), (95, 160, -1, COMM)
    assert placed(*leftovers, (110, 150, 105, COMPUTE), (151, 160, 120, COMPUTE)) == [-1, -1, -1, 0, 0]


def test_without_any_launch_in_a_step_nothing_is_placed() -> None:
    assert placed((110, 150, -1, COMPUTE), (500, 510, 450, COMPUTE)) == [-1, -1]
