"""Which window has which arm."""

from __future__ import annotations

from collections import Counter

import pytest

from overlap_callbacks.gate.arms import Arm
from overlap_callbacks.monitor.arm_rotation import ArmRotation, turn_of
from overlap_callbacks.monitor.faults import Notices
from tests.distributed import captured_log


@pytest.mark.parametrize("num_arms", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("every", [1, 2, 3, 4, 8, 16, 34, 55, 64])
def test_each_arm_has_its_share_of_the_windows_that_open_whichever_are_left_out(num_arms: int, every: int) -> None:
    opened = 200 * num_arms
    turns = Counter(turn_of(every * number, num_arms) for number in range(opened))
    assert set(turns) == set(range(num_arms))
    assert max(turns.values()) < 1.5 * opened / num_arms
    assert min(turns.values()) > 0.5 * opened / num_arms


def test_the_first_windows_are_of_different_arms() -> None:
    assert [turn_of(number, 2) for number in range(4)] == [0, 1, 0, 1]
    assert {turn_of(number, 3) for number in range(4)} == {0, 1, 2}


def test_a_late_window_has_an_arm() -> None:
    assert 0 <= turn_of(10**12, 5) < 5


def test_one_rank_alone_warns_once_of_an_arm_that_changes_results(monkeypatch: pytest.MonkeyPatch) -> None:
    defer = Arm("defer", lambda: None, lambda: None, equal_results=False)
    for rank, number in (("0", 1), ("1", 0), ("7", 0)):
        monkeypatch.setenv("RANK", rank)
        rotation = ArmRotation([defer], {}, Notices(), strict=False)
        with captured_log() as lines:
            assert all(rotation.of_window(window) is not None for window in range(3))
        assert lines == number * [
            "overlap-callbacks: the arm defer changes results: losses and weights are not those of the job without it "
            "[OC132]"
        ]
