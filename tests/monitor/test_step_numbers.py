"""Where a step does not follow the one before it."""

from __future__ import annotations

from overlap_callbacks.monitor.driver import breaks_before


def keys(step: int, previous: int, *, nested: bool = False, in_window: bool = True) -> list[str]:
    return [gap.key for gap in breaks_before(step, previous, nested=nested, in_window=in_window)]


def test_a_step_that_follows_breaks_nothing() -> None:
    assert keys(0, -1) == []
    assert keys(8, 7) == []


def test_a_jump_breaks_a_window_only_and_is_no_misuse() -> None:
    assert keys(9, 7, in_window=False) == []
    (gap,) = breaks_before(9, 7, nested=False, in_window=True)
    assert gap.key == "jump"
    assert gap.reason == "the step number jumped from 7 to 9 within a window"
    assert (gap.misuse, gap.rewind) == (False, False)


def test_going_back_and_standing_still_are_misuse_in_a_window_or_not() -> None:
    for in_window in (True, False):
        for step in (7, 3):
            (gap,) = breaks_before(step, 7, nested=False, in_window=in_window)
            assert f"step_begin({step}) came after step 7" in gap.message
            assert (gap.misuse, gap.rewind) == (True, True)


def test_a_step_within_a_step_is_reported_first_and_then_its_window_ends() -> None:
    assert keys(8, 7, nested=True) == ["nested"]
    assert keys(12, 7, nested=True) == ["nested"]
    assert keys(7, 7, nested=True) == ["nested", "back"]
