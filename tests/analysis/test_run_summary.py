from __future__ import annotations

from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis import run_summary
from overlap_callbacks.analysis.headline import run_headline
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.step_parts import exposed_share, profiled_step_ms
from overlap_callbacks.analysis.run_summary import RunSummary, without_details
from overlap_callbacks.analysis.statistics import ONE_LOOK
from overlap_callbacks.monitor.schedule import Schedule
from tests.report.runs import run_info, window

CONTROL_RUN = run_info(schedule=Schedule(control=True).as_dict())


def changed(number: int, **changes: Any) -> OverlapReport:
    return msgspec.structs.replace(window(number), **changes)


def test_windows_count_that_are_valid_complete_and_of_the_runs_kind() -> None:
    windows = [window(0), changed(1, valid=False), changed(2, complete=False), changed(3, control=True), window(4)]
    summary = RunSummary(run_info(), windows)
    assert [one.window for one in summary.valid_windows] == [0, 4]
    assert [summary.state_of(one) for one in windows] == ["counts", "not valid", "cut short", "control", "counts"]
    assert summary.states() == {"counts": 2, "not valid": 1, "cut short": 1, "control": 1}


def test_of_a_control_run_the_control_windows_count() -> None:
    summary = RunSummary(CONTROL_RUN, [window(0), changed(1, control=True)])
    assert summary.control
    assert [one.window for one in summary.valid_windows] == [1]
    assert summary.state_of(window(0)) == run_summary.NO_CONTROL


def test_without_a_run_its_last_window_says_which_kind_it_is() -> None:
    assert not RunSummary(None, []).control
    assert RunSummary(None, [window(0), changed(1, control=True)]).control


def test_figures_are_those_of_the_mean_times_over_the_windows_that_count() -> None:
    windows = [window(0), changed(1, valid=False, compute_slowdown=None), window(2, slowdown=0.3)]
    pooled = RunSummary(run_info(), windows).pooled()
    first, last = (windows[i] for i in (0, 2))
    sums = [sum(getattr(one, name).value for one in (first, last)) for name in ("compute_ms", "compute_isolated_ms")]
    assert pooled["compute_slowdown"].value == pytest.approx(sums[0] / sums[1] - 1)
    assert pooled["compute_ms"].value == pytest.approx(sums[0] / 2)
    assert RunSummary(run_info(), windows).figures() == pooled


def test_of_a_job_that_runs_intervals_hold_at_all_looks() -> None:
    windows = [window(number) for number in range(3)]
    one, all_looks = (RunSummary(run_info(), windows, running=running).pooled() for running in (False, True))
    for name, figure in one.items():
        assert all_looks[name].value == figure.value
        assert all_looks[name].ci_low <= figure.ci_low <= figure.ci_high <= all_looks[name].ci_high, name
    name = "speedup_vs_sequential"
    widths = [found[name].ci_high - found[name].ci_low for found in (one, all_looks)]
    assert 1.4 < widths[1] / widths[0] < 2
    assert RunSummary(run_info(), windows, running=True).pooled(ONE_LOOK) == one


def test_a_window_cut_short_is_used_if_none_counts() -> None:
    cut = changed(1, complete=False)
    summary = RunSummary(run_info(), [changed(0, valid=False), cut])
    assert summary.pooled() == {}
    assert summary.partial is not None
    assert summary.partial.window == 1
    assert summary.figures()["speedup_vs_sequential"] == cut.speedup_vs_sequential
    assert RunSummary(run_info(), [window(0), cut]).figures() == RunSummary(run_info(), [window(0)]).figures()


def test_one_that_was_cut_before_both_modes_had_run_does_not() -> None:
    assert RunSummary(run_info(), [window(0, complete=False, timed=())]).partial is None


def test_the_latest_window_with_a_part_is_one_that_counts_if_there_is_any() -> None:
    bare = changed(2, kernels=())
    summary = RunSummary(run_info(), [window(0), changed(1, valid=False), bare])
    for found in (summary.latest("kernels"), summary.latest_valid("kernels")):
        assert found is not None
        assert found.window == 0
    summary = RunSummary(run_info(), [changed(1, valid=False), bare])
    assert summary.latest_valid("kernels") is None
    latest = summary.latest("kernels")
    assert latest is not None
    assert latest.window == 1


def test_a_report_without_details_pools_to_the_same_and_is_small() -> None:
    windows = [window(number, power=True) for number in range(3)]
    light = [without_details(one) for one in windows]
    assert RunSummary(run_info(), light).pooled() == RunSummary(run_info(), windows).pooled()
    size, whole = (len(msgspec.json.encode(one[0])) for one in (light, windows))
    assert size < whole / 5


def test_a_window_cut_short_is_used_without_its_details_too() -> None:
    cut = window(1, complete=False, power=True)
    partial = RunSummary(run_info(), [without_details(cut)]).partial
    whole = RunSummary(run_info(), [cut]).partial
    assert partial is not None
    assert whole is not None
    assert partial.figures() == whole.figures()
    assert partial.figures()


def test_no_figure_of_a_run_reaches_where_it_cannot_be() -> None:
    # Windows that differ by much, without intervals of their own.
    def with_values(number: int, **values: float) -> OverlapReport:
        return changed(number, **{name: Estimate(value, None, None, 10, 8) for name, value in values.items()})

    of_window = {
        0: {"speedup_vs_sequential": 0.4, "comm_ms": 140.0, "exposed_comm_ms": 0.0, "hidden_comm_fraction": 0.9},
        1: {"speedup_vs_sequential": -0.3, "comm_ms": 0.0, "exposed_comm_ms": 9.0, "hidden_comm_fraction": 0.4},
    }
    windows = [with_values(number, **of_window[number % 2]) for number in range(4)]
    pooled = RunSummary(run_info(), windows).pooled()
    for name, figure in pooled.items():
        low, high = figure_named(name).bounds
        assert figure.ci_low is not None
        assert figure.ci_high is not None
        assert low <= figure.ci_low <= figure.value <= figure.ci_high <= high, name
    # A mean of times stays arithmetic: the parts of a step must add up.
    assert pooled["comm_ms"].value == pytest.approx(70.0)
    assert pooled["comm_ms"].ci_low == 0.0
    assert pooled["hidden_comm_fraction"].ci_high == 1.0


def test_the_parts_of_a_step_add_up_to_it() -> None:
    summary = RunSummary(run_info(), [window(0), window(1)])
    parts, figures = summary.step_parts(), summary.figures()
    assert parts is not None
    assert parts.total_ms == pytest.approx(profiled_step_ms(figures))
    assert parts.compute_ms == pytest.approx(325.0)
    assert parts.contention_ms == pytest.approx(0.14 * 325.0)
    share = exposed_share(figures)
    assert share is not None
    assert share.value == pytest.approx(figures["exposed_comm_ms"].value / parts.total_ms)
    # Without sequential steps that were sequential, nobody knows how long compute takes alone.
    invalid = RunSummary(run_info(), [changed(0, complete=False)]).step_parts()
    assert invalid is not None
    assert invalid.contention_ms == 0.0
    assert RunSummary(run_info(), [window(0, profiled=())]).step_parts() is None


def test_waiting_for_the_host_in_a_few_windows_is_a_mean_over_all() -> None:
    # A device waits for Gloo in one window of four; its idle time is a mean over all of them.
    windows = [window(number) for number in range(4)]
    idle = windows[0].idle_ms
    assert idle is not None
    waiting = msgspec.structs.replace(windows[0], exposed_on_host_ms=msgspec.structs.replace(idle, value=8.0))
    summary = RunSummary(run_info(), [waiting, *windows[1:]])
    parts, found = summary.step_parts(), summary.figures()["exposed_on_host_ms"]
    assert parts is not None
    assert (found.value, found.num_blocks, parts.on_host_ms) == (2.0, 4, 2.0)
    assert parts.idle_ms + parts.bubble_ms + parts.on_host_ms >= summary.figures()["idle_ms"].value
    assert "exposed_on_host_ms" not in RunSummary(run_info(), windows).figures()


def test_stalls_that_belong_to_one_mode_are_reported_for_the_run() -> None:
    windows = [changed(number, left_out=(1, 0)) for number in range(8)]
    assert RunSummary(run_info(), windows).stalls.startswith("Stalls belong to overlapped steps")
    assert "Stalls belong to overlapped steps" in run_headline(RunSummary(run_info(), windows)).interval
    # Those of windows that do not count are omitted.
    assert RunSummary(run_info(), [*windows[1:], changed(8, left_out=(9, 0), valid=False)]).stalls == ""
