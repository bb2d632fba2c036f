"""What the figures in a W&B run cover: this window or the run, this start or all, and runs that end early."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks import JsonlSink, WandbSink
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.sinks.wandb import cards
from overlap_callbacks.sinks.wandb.alerts import Limits
from tests.report.arm_runs import arm_window
from tests.report.runs import run_info, window
from tests.sinks.wandb.test_content import logged, pictures, summary
from tests.wandb_reader import SETTINGS, OfflineRun, read_run

wandb = pytest.importorskip("wandb")

pytestmark = pytest.mark.usefixtures("apart")


def opened(folder: Path, **options: Any) -> tuple[JsonlSink, WandbSink]:
    """A record and a sink that were told of a run."""
    record, sink = JsonlSink(folder / "run"), WandbSink(**options)
    sink.use_record(record.path)
    for one in (record, sink):
        one.open(run_info())
    return record, sink


def users_run(folder: Path) -> Any:
    return wandb.init(project="mine", dir=folder, settings=wandb.Settings(**SETTINGS))


# -- the card


def test_a_card_distinguishes_the_run_from_the_window() -> None:
    windows = [window(0), window(1, slowdown=0.3)]
    summary = RunSummary(run_info(), windows)
    card = cards.step_card(windows[1], cards.SoFar.of(summary))
    of_run, of_window = card.split("<h1>")[1:]
    assert of_run.startswith("The run so far")
    assert "2 windows that count, from step 20" in of_run
    assert of_window.startswith("This window")
    assert "number 1, from step 520" in of_window
    (row,) = [row for row in of_window.split("<tr") if "compute slowdown" in row]
    own = windows[1].compute_slowdown
    assert own is not None
    # The two windows differ, so that what the run's mean would be is not known.
    assert row.index(f"+{own.value:.1%}") < row.index("inconclusive")


# -- alerts


def slowdown(value: float, low: float | None, high: float | None) -> Estimate:
    return Estimate(value, low, high, 16, 4)


def test_a_limit_is_passed_by_the_whole_interval_and_left_by_the_figure() -> None:
    limits = Limits({"compute_slowdown": 0.2})
    alerts = [
        len(limits.passed(window(), {"compute_slowdown": slowdown(*figure)}))
        for figure in (
            (0.25, 0.15, 0.35),  # may be chance
            (0.25, 0.21, 0.29),  # passed
            (0.25, 0.15, 0.35),  # still beyond, as far as it is known
            (0.25, 0.21, 0.29),
            (0.19, 0.15, 0.23),  # back within
            (0.25, 0.21, 0.29),
        )
    ]
    assert alerts == [0, 1, 0, 0, 0, 1]


def test_where_less_is_worse_the_upper_end_of_the_interval_counts() -> None:
    report = window()
    assert report.speedup_vs_sequential is not None
    high = report.speedup_vs_sequential.ci_high
    assert high is not None
    assert not Limits({"speedup_vs_sequential": high - 1e-6}).passed(report, report.figures())
    assert Limits({"speedup_vs_sequential": high + 1e-6}).passed(report, report.figures())


def test_a_figure_without_an_interval_passes_nothing_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits({"compute_slowdown": 0.2, "measurement_overhead": 0.01})
    report = msgspec.structs.replace(window(), measurement_overhead=0.02)
    alerts = [
        alert for _ in range(2) for alert in limits.passed(report, {"compute_slowdown": slowdown(0.5, None, None)})
    ]
    assert [alert.name for alert in alerts] == ["measurement_overhead"]
    assert caplog.text.count("alerts['compute_slowdown'] is not watched") == 1


# -- power


def test_metrics_of_power_are_read_back_as_they_were_measured(tmp_path: Path) -> None:
    reports = [window(0, power=True), window(1, power=True)]
    run = logged(tmp_path, *reports, detail="all")
    keys = [key for key in reports[0].metrics() if key.startswith(("power/", "gpu/"))]
    assert {"power/overlapped_avg_w", "power/sequential_energy_per_step_j", "gpu/overlapped_sm_clock_mhz"} <= {*keys}
    for key in keys:
        assert run.values(key) == [pytest.approx(report.metrics()[key]) for report in reports], key
        assert run.metrics[key]["step_metric"] == "overlap/step"


# -- a run that is finished early, or not at all


def finished_early(folder: Path, caplog: pytest.LogCaptureFixture, *, window_after: bool) -> OfflineRun:
    run = users_run(folder)
    record, sink = opened(folder)
    for one in (record, sink):
        one.log(window(0))
    run.finish()
    if window_after:
        for one in (record, sink):
            one.log(window(1))
    for one in (sink, record):
        one.close()
    assert caplog.text.count("the W&B run was finished before measuring ended") == 1
    assert str(record.path) in caplog.text
    assert wandb.run is None, "no second run is begun in its place"
    return read_run(folder)


@pytest.mark.parametrize("window_after", [False, True])
def test_a_run_finished_before_measuring_ends_gives_a_warning_and_has_the_record_up_to_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, window_after: bool
) -> None:
    found = finished_early(tmp_path, caplog, window_after=window_after)
    assert found.values("overlap/step") == [20]
    assert "overlap.jsonl" in found.files
    assert b'"record":"window"' in (found.folder / "files" / "overlap.jsonl").read_bytes()


def test_a_job_that_ends_before_its_first_window_is_said_to_have_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for start in (False, True):
        assert "no W&B run was begun" not in caplog.text, "nobody asked for a run"
        for one in reversed(opened(tmp_path, start=start)):
            one.close()
    assert "no window ended before the job did, so no W&B run was begun" in caplog.text


def test_a_job_that_ends_before_wandb_has_begun_its_run_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, release = threading.Event(), threading.Event()

    def hangs(**_: Any) -> None:
        asked.set()
        release.wait(30)
        raise RuntimeError("no run")

    monkeypatch.setattr(wandb, "init", hangs)
    record, sink = opened(tmp_path, mode="offline", timeout_s=0.5)

    def log() -> None:
        with contextlib.suppress(RuntimeError):
            sink.log(window())

    thread = threading.Thread(target=log)
    thread.start()
    assert asked.wait(30)
    error = sink.close_timeout_error()
    assert (
        f"W&B began no run within 0.5 s before the job ended, so it has no run of this job: the record, {record.path}"
        in str(error)
    )
    release.set()
    thread.join(30)
    record.close()


# -- a resumed run


def test_means_of_a_resumed_job_go_on_where_they_were_and_say_of_how_many_windows(tmp_path: Path) -> None:
    reports = [window(number, slowdown=slowdown) for number, slowdown in enumerate((0.1, 0.2, 0.3))]
    first = JsonlSink(tmp_path / "run")
    first.open(run_info())
    first.log(reports[0])
    first.log_arm(arm_window(5))
    first.log(reports[1])
    first._file.write(b'{"record":"window","broken')  # the job was killed
    first.close()
    run = logged(tmp_path, reports[2])
    slowdowns = [report.metrics()["overlap/compute_slowdown"] for report in reports]
    (card,) = pictures(run, "overlap/answer")
    assert "3 windows that count, from step 20" in card
    times = [[getattr(report, name).value for report in reports] for name in ("compute_ms", "compute_isolated_ms")]
    mean = sum(times[0]) / sum(times[1]) - 1  # a ratio of mean times, and not the mean of the ratios
    assert mean != pytest.approx(sum(slowdowns) / 3, abs=1e-9)
    assert summary(tmp_path)["overlap/compute_slowdown"] == pytest.approx(mean)
    assert run.values("overlap/step") == [1020, arm_window(5).first_step], "earlier windows are not logged again"
    (table,) = run.tables("arm/arms")
    assert [row[0] for row in table["data"]] == ["prefetch_2_2", "sequential"]
    assert len(run.tables("overlap/kernels")) == 1


def test_the_record_of_one_start_has_no_earlier_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    run = logged(tmp_path, window(0), window(1))
    assert [text.count("windows that count") for text in pictures(run, "overlap/answer")] == [0, 1]
    assert not caplog.text
