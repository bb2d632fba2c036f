"""After a window that waited in vain, enough are skipped to keep the wait within the budget."""

from __future__ import annotations

import itertools

import pytest

from overlap_callbacks.monitor.background.budget import SilenceBackoff

INTERVAL_S = 1.6  # 200 steps of 8 ms


@pytest.mark.parametrize("waited_s", [0.001, 0.5, 5.0, 30.0])
def test_waiting_for_a_rank_that_stays_silent_is_within_the_budget(waited_s: float) -> None:
    backoff = SilenceBackoff(0.005)
    waits = []
    for window in range(200_000):
        if window >= backoff.next_window:
            waits.append(window)
            backoff.not_heard(window, waited_s, INTERVAL_S)
    for number, window in enumerate(waits[1:], start=1):
        assert number * waited_s <= 0.005 * window * INTERVAL_S
    distances = [after - before for before, after in itertools.pairwise(waits)]
    assert all(after >= before for before, after in itertools.pairwise(distances))


def test_ranks_that_waited_for_different_times_still_meet() -> None:
    ranks = [SilenceBackoff(0.005), SilenceBackoff(0.005), SilenceBackoff(None)]
    waits_s = [0.5, 0.03, 30.0]
    met = []
    for window in range(5000):
        asking = [rank for rank in range(3) if window >= ranks[rank].next_window]
        if len(asking) == 3 and window:
            met.append(window)
        for rank in asking:
            ranks[rank].not_heard(window, waits_s[rank], INTERVAL_S)
    assert met


def test_once_all_ranks_came_again_the_next_window_may_be_opened() -> None:
    backoff = SilenceBackoff(None)
    for window in (0, 2, 4):
        backoff.not_heard(window, 0.5, INTERVAL_S)
    assert backoff.next_window == 8
    backoff.all_heard()
    assert backoff.next_window <= 9
    backoff.not_heard(9, 0.5, INTERVAL_S)
    assert backoff.next_window == 10


def test_where_window_numbers_go_back_none_is_left_out_for_an_old_wait() -> None:
    backoff = SilenceBackoff(0.005)
    backoff.not_heard(7, 30.0, INTERVAL_S)
    backoff.rewind()
    assert backoff.next_window == 0
