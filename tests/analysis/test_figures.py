"""Figures that are not of the study: what overlap can attain, and the bubble of a pipeline."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.figures import figures_of
from overlap_callbacks.analysis.results.window import TimedBlock
from tests.analysis.test_aggregate import OV, SEQ, full_window, report_of, with_profiled


def test_where_communication_takes_longer_than_compute_it_is_what_can_be_attained():
    found = report_of(full_window(profiled=with_profiled(SEQ, comm_busy_ms=80.0)))
    assert found.attainable_ms.value == pytest.approx(80)
    assert found.attained_fraction.value == pytest.approx(20 / 40)


@pytest.mark.parametrize("busy_ms", [115.0, 120.0, 130.0])
def test_where_there_is_next_to_nothing_to_gain_the_share_attained_is_absent(busy_ms):
    found = report_of(full_window(profiled=with_profiled(SEQ, compute_busy_ms=busy_ms)))
    assert found.attainable_ms.value == pytest.approx(busy_ms)
    assert found.attained_fraction is None


def test_overlap_that_costs_time_has_attained_less_than_nothing():
    slower = tuple(TimedBlock(b.mode, b.block, (150.0,) if b.mode is OV else b.step_ms) for b in full_window().timed)
    found = report_of(full_window(timed=slower))
    assert found.attained_fraction.value == pytest.approx(-30 / 60)
    assert found.attained_fraction.ci_low < -30 / 60 < found.attained_fraction.ci_high


def test_no_more_than_all_of_the_gain_is_attained():
    """Where a profiled step's compute is longer than the overlapped step, say."""
    found = report_of(full_window(profiled=with_profiled(SEQ, compute_busy_ms=105.0)))
    assert (found.attained_fraction.value, found.attained_fraction.ci_high) == (1.0, 1.0)


def test_a_bubble_is_reported_only_with_sends_and_if_all_ranks_know_it():
    assert report_of(full_window(profiled=with_profiled(OV, p2p_ms=0.0))).bubble_ms is None
    unknown = full_window(1, profiled=with_profiled(OV, bubble_ms=None))
    assert report_of(full_window(0), unknown).bubble_ms is None


def test_the_interval_of_the_share_attained_holds_the_truth_as_often_as_it_says():
    # 100 ms overlapped, 120 ms sequential, 60 ms of compute alone: a third, with noise of 2 % in blocks of each kind.
    chance, hits, windows = np.random.default_rng(7), 0, 150
    for _ in range(windows):
        timed = tuple(
            TimedBlock(b.mode, b.block, ((100.0 if b.mode is OV else 120.0) * chance.normal(1, 0.02),))
            for b in full_window().timed
        )
        profiled = tuple(
            msgspec.structs.replace(b, compute_busy_ms=60 * chance.normal(1, 0.02)) for b in full_window().profiled
        )
        share = figures_of([full_window(timed=timed, profiled=profiled)])["attained_fraction"]
        hits += share.ci_low <= 1 / 3 <= share.ci_high
    assert hits >= 0.91 * windows


@pytest.mark.parametrize(("p2p_ms", "known"), [(0.0, True), (0.2, True), (2.0, False)])
def test_sends_and_receives_that_wait_for_each_other_give_no_communication_slowdown(p2p_ms: float, known: bool) -> None:
    report = report_of(full_window(profiled=with_profiled(OV, p2p_ms=p2p_ms)))
    assert (report.comm_slowdown is not None) is known
