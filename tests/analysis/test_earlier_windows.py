from __future__ import annotations

import math

import numpy as np
import pytest

from overlap_callbacks.analysis.earlier_windows import MAX_WINDOWS, SHARE, EarlierWindows
from overlap_callbacks.analysis.job.merging import part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, TimedBlock
from overlap_callbacks.analysis.statistics import Sample, interval_of


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64).reshape(-1, 1)


def half_width(found: Estimate) -> float:
    return (found.ci_high - found.ci_low) / 2


# -- the least width


def test_it_is_the_width_that_most_of_the_earlier_windows_do_not_exceed():
    earlier = EarlierWindows()
    for width in (5.0, 1.0, 3.0, 2.0, 4.0, 1000.0):
        earlier.add({"figure": width})
    assert sum(width <= earlier.half_width("figure") for width in (1, 2, 3, 4, 5, 1000)) / 6 >= SHARE
    assert earlier.half_width("figure") == pytest.approx(4 + 1 / 3)  # a single disturbed window does not count


def test_before_the_first_window_that_has_an_interval_there_is_none():
    earlier = EarlierWindows()
    assert earlier.half_width("figure") == 0.0
    earlier.add({"figure": None, "other": 2.0})
    assert earlier.half_width("figure") == 0.0
    assert earlier.half_width("other") == 2.0


def test_only_the_last_windows_count():
    earlier = EarlierWindows()
    for width in (100.0,) * MAX_WINDOWS + (1.0,) * MAX_WINDOWS:
        earlier.add({"figure": width})
    assert earlier.half_width("figure") == 1.0


# -- the interval


def test_an_interval_keeps_its_own_width_or_takes_the_least_one_about_the_same_value():
    found = interval_of(lambda means: means[0], Sample(np.log(column(98, 100, 101, 103)), 4), scale=math.exp)
    own, same, wider = found.estimate(), found.estimate(found.half_width / 2), found.estimate(0.5)
    assert same == own
    assert wider.value == own.value
    assert math.log(wider.ci_high / wider.value) == pytest.approx(0.5)
    assert math.log(wider.value / wider.ci_low) == pytest.approx(0.5)


def test_what_has_no_interval_of_its_own_gets_none():
    found = interval_of(lambda means: means[0], Sample(column(1, 2, 3), 3))
    assert (found.estimate(0.5).ci_low, found.estimate(0.5).ci_high) == (None, None)


# -- what it is for: blocks whose spread is not known, since what is rare and large hits one mode only

NOISE, SLOWDOWN, HIT, HIT_SHARE, RUNS, WINDOWS = 0.002, 0.05, 0.02, 0.1, 4, 100


def shares_that_hold(with_earlier: bool) -> float:
    """How many windows of four blocks a mode hold the true slow-down, of several runs."""
    rng = np.random.default_rng(11)
    truth, held = math.log1p(SLOWDOWN) + HIT * HIT_SHARE, 0
    for _ in range(RUNS):
        earlier = EarlierWindows()
        for _ in range(WINDOWS):
            hits = HIT * (rng.random((4, 1)) < HIT_SHARE)
            overlapped = math.log1p(SLOWDOWN) + rng.normal(0, NOISE, (4, 1)) + hits
            sequential = rng.normal(0, NOISE, (4, 1))
            interval = interval_of(lambda ov, iso: ov[0] - iso[0], Sample(overlapped, 4), Sample(sequential, 4))
            found = interval.estimate(earlier.half_width("slowdown") if with_earlier else 0.0)
            held += found.ci_low <= truth <= found.ci_high
            earlier.add({"slowdown": interval.half_width})
    return held / (RUNS * WINDOWS)


def test_intervals_hold_a_slowdown_of_which_most_windows_see_too_little():
    # Two windows of three have no hit: their own blocks tell nothing of it.
    assert shares_that_hold(with_earlier=False) < 0.9
    assert shares_that_hold(with_earlier=True) >= 0.94


# -- in a report


def window(number: int, compute_ms: tuple[float, ...], complete: bool = True) -> RankWindow:
    arms = [Mode.OVERLAPPED, Mode.SEQUENTIAL] * 4
    profiled = tuple(
        ProfiledBlock(
            arm=arm, block=block, num_steps=4, compute_ms=ms, compute_busy_ms=ms, copy_ms=0.0, comm_ms=1.0,
            comm_busy_ms=1.0, hidden_comm_ms=0.0, covered_compute_ms=0.0, p2p_ms=0.0, idle_ms=0.0, step_ms=ms + 1,
        )
        for block, (arm, ms) in enumerate(zip(arms, compute_ms, strict=True))
    )  # fmt: skip
    timed = tuple(TimedBlock(block.arm, block.block, (block.step_ms,) * 4) for block in profiled)
    return RankWindow(number, 0, 20, 64, complete, "gloo", "cpu", wall_ms=700.0, timed=timed, profiled=profiled)


QUIET = (10.5, 10.0, 10.51, 10.01, 10.5, 10.0, 10.49, 10.0)
UNEVEN = (10.5, 10.0, 12.5, 10.01, 10.5, 10.0, 9.49, 10.0)


def reports(*windows: RankWindow):
    earlier = EarlierWindows()
    return [report_of(part_of(each), world_size=1, every_n_steps=500, earlier=earlier) for each in windows]


def test_the_windows_of_a_run_give_each_other_a_least_width():
    (alone,) = reports(window(0, QUIET))
    _, after = reports(window(0, UNEVEN), window(1, QUIET))
    for name in ("compute_slowdown", "gap_to_ideal", "speedup_vs_sequential", "e2e_overlapped_ms"):
        before, now = getattr(alone, name), getattr(after, name)
        assert now.value == before.value
        assert half_width(now) > 5 * half_width(before)
    # The sequential blocks were quiet in both.
    assert after.compute_isolated_ms == alone.compute_isolated_ms


def test_windows_that_were_cut_short_give_no_width():
    (alone,) = reports(window(0, QUIET))
    _, after = reports(window(0, UNEVEN, complete=False), window(1, QUIET))
    assert after.compute_slowdown == alone.compute_slowdown
