"""What stands in a W&B run, offline, beside the metrics: texts, pictures, tables, configuration."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from overlap_callbacks import JsonlSink, WandbSink
from overlap_callbacks.analysis.causal import levels_of
from overlap_callbacks.analysis.results.arm import ComparedArm
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.causal import CausalWindow, DelayedCall, DelayedSet
from overlap_callbacks.analysis.results.estimate import Spread
from overlap_callbacks.analysis.results.figure import Figure, Value
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import DimensionTime
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.sinks.base import fit
from overlap_callbacks.sinks.wandb import cards
from overlap_callbacks.sinks.wandb.alerts import Alert, Limits, finding_alerts
from overlap_callbacks.sinks.wandb.tables import tables
from tests.environments import gpu_rank
from tests.report.arm_runs import arm_window
from tests.report.runs import full_report, rank_window, run_info, window
from tests.samples import aggregate_windows
from tests.wandb_reader import SETTINGS, OfflineRun, read_run

wandb = pytest.importorskip("wandb")

pytestmark = pytest.mark.usefixtures("apart")

HOSTILE = '</style><script>alert("1")</script>\'"&' + "x" * 3000


def logged(folder: Path, *reports: Any, info: Any = None, **options: Any) -> OfflineRun:
    sink = WandbSink(settings=wandb.Settings(**SETTINGS), dir=folder, **options)
    info = info or run_info()
    record = JsonlSink(folder / "run")
    sink.use_record(record.path)
    for one in (record, sink):
        one.open(info)
        for report in reports:
            one.log(report)
    for one in (sink, record):
        one.close()
    return read_run(folder)


def test_arms_have_their_keys_and_a_table_at_the_end(tmp_path: Path) -> None:
    sink = WandbSink(settings=wandb.Settings(**SETTINGS), dir=tmp_path)
    sink.open(run_info())
    sink.log(window(0))
    arm = ComparedArm("prefetch_2_2", True, family="prefetch", setting=2.0)
    first, second = [msgspec.structs.replace(arm_window(number), arm=arm) for number in (1, 2)]
    sink.log_arm(first)
    sink.log_arm(second)
    sink.close()
    run = read_run(tmp_path)
    metrics = first.metrics()
    assert {key for key in run.metrics if key.startswith("arm/")} == {"arm/prefetch_2_2_speedup", "arm/arms"}
    assert run.values("arm/prefetch_2_2_speedup") == [metrics["arm/prefetch_2_2_speedup"], second.speedup.value]
    assert run.values("overlap/step") == [window(0).first_step, first.first_step, second.first_step, second.first_step]
    assert run.metrics["arm/prefetch_2_2_speedup"]["step_metric"] == "overlap/step"
    (table,) = run.tables("arm/arms")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert {row["arm"]: row["windows"] for row in rows} == {"sequential": 1, "prefetch_2_2": 2}
    assert {(row["family"], row["setting"]) for row in rows} == {("", None), ("prefetch", 2)}
    assert all(row["speedup"] is not None and row["verdict"] for row in rows)


def summary(folder: Path) -> dict[str, Any]:
    """The run's summary, through W&B's own reader."""
    (file,) = folder.rglob("run-*.wandb")
    reader = Path(wandb.__file__).parent / "bin" / "wandb-core"
    command = [reader, "leet", "inspect", "--no-observability", "--summary", "--json", "--run-file", file, file.parent]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found["summary"]  # type: ignore[no-any-return]


def pictures(run: OfflineRun, key: str) -> list[str]:
    paths = [path for path in run.files if path.startswith(f"media/html/{key}_")]
    return [(run.folder / "files" / path).read_text() for path in paths]


def test_verdicts_are_text_in_the_summary(tmp_path: Path) -> None:
    logged(tmp_path, window(0, power=True), window(1, power=True), detail="all")
    found = summary(tmp_path)
    assert found["overlap/bound"] == "compute"
    assert found["overlap/bottleneck"].startswith("Steps are compute-bound")
    assert " First by name is the reduce-scatter of layers.0, for " in found["overlap/bottleneck"]
    assert " of communication is hidden; exposed communication takes " in found["overlap/verdict"]
    assert found["power/verdict"].startswith("clock throttled by power cap: SM clock 1695 MHz")


def test_means_over_the_run_leave_invalid_windows_out(tmp_path: Path) -> None:
    reports = [window(0), msgspec.structs.replace(window(1, slowdown=0.9), valid=False), window(2, slowdown=0.2)]
    run = logged(tmp_path, *reports)
    times = [[getattr(reports[i], name).value for i in (0, 2)] for name in ("compute_ms", "compute_isolated_ms")]
    windows = [reports[i].metrics()["overlap/compute_slowdown"] for i in (0, 2)]
    assert run.values("overlap/compute_slowdown") == pytest.approx(windows)
    # A ratio of mean times; bar charts need one plain number.
    assert summary(tmp_path)["overlap/compute_slowdown"] == pytest.approx(sum(times[0]) / sum(times[1]) - 1)


def test_the_step_time_is_a_picture_with_intervals_that_needs_no_network(tmp_path: Path) -> None:
    (picture,) = pictures(logged(tmp_path, window(power=True)), "overlap/answer")
    for mode in ("ideal", "overlapped", "sequential"):
        assert f'<rect class="{mode}"' in picture
    assert picture.count('class="bound"') == 3
    assert "Overlap saves 5" in picture
    assert "Steps are compute-bound" in picture
    assert "Cost of measuring" in picture
    assert "clock throttled by power cap" in picture
    assert not re.findall(r"https?://|src=|<link|<script", picture)


def test_a_picture_says_what_was_not_measured() -> None:
    report = window(timed=(), profiled=())
    picture = cards.step_card(report, cards.SoFar.of(RunSummary(run_info(), [report])))
    assert "Step times were not measured in this window." in picture
    assert picture.count("not measured") >= len(cards.ROWS)


def test_a_picture_of_an_invalid_window_compares_nothing() -> None:
    report = msgspec.structs.replace(window(), valid=False, problems=("residual overlap 0.4",))
    picture = cards.step_card(report, cards.SoFar.of(RunSummary(run_info(), [report])))
    assert '<rect class="overlapped"' in picture
    assert '<rect class="sequential"' not in picture
    assert "Note: residual overlap 0.4" in picture
    assert "This window does not count: only its overlapped steps" in picture
    assert "This window does not count" not in cards.step_card(window(), cards.SoFar.of(RunSummary(run_info(), [])))
    # Nor has a table a time of steps that were not sequential.
    known, found = (tables(one, {})["comm/collectives"] for one in (window(), report))
    for name in ("isolated_ms", "timed_bytes", "transfer_ms"):
        place = known.columns.index(name)
        assert all([row[place] is not None for row in known.rows])
        assert all([row[place] is None for row in found.rows])
    assert [row[:8] for row in found.rows] == [row[:8] for row in known.rows]


def test_names_are_shown_as_text_and_cut(tmp_path: Path) -> None:
    report = msgspec.structs.replace(
        window(power=True),
        device=HOSTILE,
        problems=(HOSTILE,),
        kernels=(KernelTime(HOSTILE, False, 1, 1, 2.0, 1.0),),
        dimensions=tuple([DimensionTime(name, 1, 8, 1.0, 1.0, 1.0, 1.0) for name in ("my.group/of\n{names}", "data")]),
    )
    run = logged(tmp_path, report, detail="all")
    (picture,) = pictures(run, "overlap/answer")
    assert "<script" not in picture
    assert len(picture) < 20_000
    assert run.values("dimension/my_group_of__names__bytes") == [8]
    assert len(run.tables("overlap/kernels")[0]["data"][0][0]) == 500
    keys = {key.partition(".")[0] for row in run.history for key in row}  # the reader joins nested keys with a dot
    assert not [key for key in keys if not re.fullmatch(r"[A-Za-z0-9_]+/[A-Za-z0-9_]+|_\w+", key)]


def test_of_many_windows_some_have_tables_and_the_last_has(tmp_path: Path) -> None:
    count = 45
    run = logged(tmp_path, *(window(number % 3) for number in range(count - 1)), window(99))
    found = run.tables("overlap/kernels")
    assert 10 < len(found) < count / 1.5
    assert len(pictures(run, "overlap/answer")) == len(found)
    with_tables = [row for row in run.history if any(key.startswith("overlap/kernels") for key in row)]
    assert with_tables[-1]["overlap/step"] == window(99).first_step


def test_a_window_that_was_cut_off_at_once_does_not_represent_the_run(tmp_path: Path) -> None:
    empty = window(3, complete=False, timed=(), profiled=(), kernels=(), pairs=())
    run = logged(tmp_path, *(window(number % 3) for number in range(11)), empty)
    (*_, last) = pictures(run, "overlap/answer")
    assert "not measured" not in last
    assert "not measured" not in run.values("overlap/verdict")[-1]
    assert len(run.values("overlap/valid")) == len(run.values("overlap/e2e_overlapped_ms")) + 1 == 12


def test_the_record_is_an_artifact_even_where_it_is_closed_later(tmp_path: Path) -> None:
    run = logged(tmp_path, window())
    assert read_run(tmp_path).folder == run.folder
    staged = [path for path in tmp_path.rglob("*") if path.is_file() and b'"record":"window"' in path.read_bytes()]
    assert len(staged) >= 2, "the record, and the copy that is the artifact's"


def test_the_users_run_that_was_finished_early_costs_nothing(tmp_path: Path) -> None:
    run = wandb.init(project="mine", dir=tmp_path, settings=wandb.Settings(**SETTINGS))
    sink = WandbSink(start=False)
    sink.log(window(0))
    run.finish()
    sink.log(window(1))
    sink.close()


def test_after_one_run_of_the_users_the_next_is_taken(tmp_path: Path) -> None:
    sink = WandbSink(start=False)
    for number in (0, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = wandb.init(project="mine", dir=folder, settings=wandb.Settings(**SETTINGS), reinit="finish_previous")
        sink.log(window(number))
        run.finish()
    sink.close()
    for number in (0, 1):
        assert read_run(tmp_path / str(number)).values("overlap/step") == [20 + 500 * number]


def test_a_disabled_run_causes_no_error() -> None:
    run = wandb.init(mode="disabled")
    sink = WandbSink(alerts={"compute_slowdown": 0.01})
    sink.log(window(power=True))
    sink.close()
    run.finish()


@pytest.mark.parametrize(
    ("key", "kept"),
    [
        ("overlap/compute_slowdown", "min,max,mean,last"),
        ("overlap/compute_slowdown_ci_low", "last"),
        ("overlap/compute_slowdown_rank_high", "max,last"),
        ("overlap/valid", "mean,last"),
        ("overlap/ranks_heard", "min,last"),
        ("power/overlapped_avg_w", "min,max,mean,last"),
        ("power/overlapped_peak_w", "max,last"),
        ("comm/allreduce_bytes", "last"),
        ("gpu/overlapped_memory_peak_bytes", "max,last"),
        ("comm/allreduce_messages", "last"),
        ("comm/allreduce_busbw_gb_s", "min,max,mean,last"),
        ("dimension/data_comm_ms", "min,max,mean,last"),
    ],
)
def test_each_kind_of_metric_has_the_aggregates_that_make_sense(key: str, kept: str) -> None:
    (value,) = [value for value in full_report().values() if value.key == key]
    assert value.aggregates == kept


def test_keys_of_the_library_need_no_change() -> None:
    report = full_report()
    assert {key: value.number for key, value in fit(report.values()).items()} == report.metrics()


def test_a_nan_is_left_out_and_keys_have_no_dots() -> None:
    figure = Figure("a/{dimension}_c", "", "")
    values = [Value(figure, 1.0, {"dimension": "b.d"}), Value(figure, float("nan"), {"dimension": "e"})]
    assert list(fit([*values, Value(figure, float("inf"), {"dimension": "f"})])) == ["a/b_d_c"]


def test_keys_with_names_of_the_job_stay_apart_and_keep_their_unit() -> None:
    long = "x" * 150
    names = ["dp-cp", "dp.cp", "dp_cp", f"{long}1", f"{long}2"]
    size = Figure("dimension/{dimension}_bytes", "bytes", "")
    slowdown = Figure("dimension/{dimension}_comm_slowdown", "fraction", "")
    values = [Value(size, 1.0, {"dimension": name}) for name in names]
    values += [Value(slowdown, 1.0, {"dimension": name}, "rank_high") for name in names]
    fitted = list(fit(values))
    assert len(fitted) == len(values)
    assert all(re.fullmatch(r"dimension/\w{,120}_(bytes|comm_slowdown_rank_high)", key) for key in fitted)
    assert "dimension/dp_cp_bytes" in fitted  # what fits is not changed
    both = [key.removesuffix("_bytes") for key in fitted if key.endswith("_bytes")]
    assert {f"{key}_comm_slowdown_rank_high" for key in both} <= set(fitted)  # one name of a group in all its keys
    assert list(fit(values[:1])) == ["dimension/dp_cp_bytes"]


# -- the environment


def on_gpus(number: int, **variables: str) -> Any:
    ranks = [rank_window(number, rank, environment=gpu_rank(rank, variables=variables)) for rank in (0, 1)]
    return aggregate_windows(ranks, world_size=2, every_n_steps=500)


def test_the_environment_and_its_findings_are_in_the_configuration(tmp_path: Path) -> None:
    first = on_gpus(0, NCCL_PROTO="LL")
    # A later window says nothing of an environment that has not changed.
    later = msgspec.structs.replace(on_gpus(1, NCCL_PROTO="LL"), environment=None)
    info = run_info(environment=gpu_rank(0, variables={"NCCL_PROTO": "LL"}))
    config = logged(tmp_path, first, later, info=info).config["overlap_callbacks"]
    assert config["environment"]["nccl"] == "2.28.3"
    assert config["environment"]["variables"] == {"NCCL_PROTO": "LL"}
    assert config["job"] == {
        "hosts": 1,
        "devices": 2,
        "transport": {"ranks of one host": "NVLink connects all GPUs of a host"},
        "differs_between_ranks": [],
    }
    assert set(config["findings"]) == {"nccl-protocol"}


def test_a_serious_finding_is_an_alert_once() -> None:
    known: set[str] = set()
    (alert,) = finding_alerts(on_gpus(0, CUDA_LAUNCH_BLOCKING="1", NCCL_PROTO="LL"), known)
    assert alert.title == "Overlap: cuda launch blocking"
    assert "CUDA_LAUNCH_BLOCKING=1" in alert.text
    assert not finding_alerts(on_gpus(1, CUDA_LAUNCH_BLOCKING="1"), known)


# -- alerts


def alone(limits: Limits, report: OverlapReport) -> list[Alert]:
    """The limits that a run passes of which this is the only window."""
    return limits.passed(report, RunSummary(None, [report]).pooled())


def passed(limits: Limits, *slowdowns: float) -> list[list[str]]:
    return [[alert.name for alert in alone(limits, window(slowdown=slowdown))] for slowdown in slowdowns]


def test_an_alert_comes_once_for_each_crossing() -> None:
    limits = Limits({"compute_slowdown": 0.2})
    name = ["compute_slowdown"]
    assert passed(limits, 0.1, 0.3, 0.4, 0.1, 0.3) == [[], name, [], [], name]


def test_a_window_without_the_figure_changes_nothing() -> None:
    limits = Limits({"compute_slowdown": 0.2})
    assert len(alone(limits, window(slowdown=0.3))) == 1
    assert not alone(limits, window(profiled=()))
    assert not alone(limits, msgspec.structs.replace(window(slowdown=0.0), valid=False))
    assert not alone(limits, window(slowdown=0.3))


def test_a_cost_within_noise_raises_no_alert() -> None:
    limits = Limits({"measurement_overhead": 0.005})

    def alerts(low: float) -> int:
        costs = {
            "measurement_overhead": 0.01,
            "measurement_overhead_ci_low": low,
            "measurement_overhead_ci_high": 0.025,
        }
        return len(alone(limits, msgspec.structs.replace(window(), **costs)))

    assert alerts(-0.005) == 0
    assert alerts(0.006) == 1


def test_of_some_figures_less_is_worse() -> None:
    assert {figure.name for figure in FIGURES if figure.less_is_worse} == {
        "speedup_vs_sequential",
        "attained_fraction",
        "hidden_comm_fraction",
    }
    (alert,) = Limits({"speedup_vs_sequential": 0.5}).passed(window(), window().figures())
    assert alert.title.startswith("Overlap: speed-up of overlap is +13")
    assert alert.title.endswith(", below 50.0%")
    assert not Limits({"speedup_vs_sequential": 0.05}).passed(window(), window().figures())


def test_residual_overlap_alerts_in_an_invalid_window() -> None:
    report = msgspec.structs.replace(window(), valid=False)
    assert report.residual_overlap is not None
    (alert,) = Limits({"residual_overlap": report.residual_overlap.value / 2}).passed(report, {})
    assert "often you look" not in alert.text
    assert " in the window at step 20; " in alert.text
    (of_run,) = Limits({"speedup_vs_sequential": 0.5}).passed(window(), window().figures())
    assert re.search(r"\(95% interval \+[^()]*, valid however often you look\)", of_run.text)
    assert " up to the window at step 20; " in of_run.text


@pytest.mark.parametrize(
    ("alerts", "error", "message"),
    [
        ({"slowdown": 0.2}, ValueError, "alerts has 'slowdown', which is no figure; allowed are .*compute_slowdown"),
        ({"compute_slowdown": "0.2"}, TypeError, r"alerts\['compute_slowdown'\] must be a finite number, got '0.2'"),
        ({"compute_slowdown": True}, TypeError, "must be a finite number, got True"),
        ({"compute_slowdown": float("nan")}, ValueError, "must be a finite number, got nan"),
        (
            {"compute_slowdown": 20},
            ValueError,
            r"alerts\['compute_slowdown'\] must be from -1 to below 2, got 20; did you mean 0.20\?",
        ),
        ({"residual_overlap": 2}, ValueError, r"must be from 0 to 1, got 2; did you mean 0.02\?"),
        ({"e2e_overlapped_ms": -1}, ValueError, "must not be below 0, got -1"),
        (["compute_slowdown"], TypeError, "alerts must be a mapping from a figure's name to its limit"),
    ],
)
def test_limits_that_are_wrong_are_named(alerts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WandbSink(alerts=alerts)


def test_a_timeout_that_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match="timeout_s must be a positive, finite number of seconds"):
        WandbSink(timeout_s=0)


def test_a_control_run_passes_no_limit() -> None:
    limits = Limits({"compute_slowdown": 0.2})
    assert not alone(limits, msgspec.structs.replace(window(slowdown=0.3), control=True))
    assert alone(limits, window(slowdown=0.3))


class _StillRun:
    """A run whose step does not move: one that ended, or that W&B does not take rows for."""

    step = 0

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self.config = SimpleNamespace(update=lambda *_, **__: None)
        self.summary: dict[str, object] = {}

    def log(self, row: dict[str, object], commit: bool = True) -> None:
        if row:
            self.rows.append(row)

    def define_metric(self, *_: object, **__: object) -> None:
        pass


def test_the_end_comes_whatever_the_run_does_with_the_rows_that_wait() -> None:
    pytest.importorskip("wandb")
    run = _StillRun()
    sink = WandbSink(run=run)
    for step in (20, 520, 1020):  # only the first finds a place in the user's row
        sink.log(msgspec.structs.replace(window(), first_step=step))
    assert {row["overlap/step"] for row in run.rows} == {20}
    thread = threading.Thread(target=sink.close, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert [*dict.fromkeys(row["overlap/step"] for row in run.rows)] == [20, 520, 1020]


def test_the_table_of_delays_names_the_late_rank_and_leaves_windows_out_that_do_not_count(tmp_path: Path) -> None:
    delayed, levels = DelayedSet((DelayedCall("_reduce_scatter_base_", "data", 0, "layers.0"),), 10.0), levels_of(54)
    step_ms = tuple([100 + 5.0 * level for level in levels])
    report = window(0)
    assert report.exposure is not None
    waiting = [msgspec.structs.replace(row, waiting_ms=row.exposed_ms) for row in report.exposure.names]
    report = msgspec.structs.replace(
        report,
        exposure=msgspec.structs.replace(report.exposure, names=tuple(waiting)),
        spread={"exposed_comm_ms": Spread(0, 500, 1, 0, 1), "compute_busy_ms": Spread(0, 500, 0, 1, 1)},
    )
    longer = [msgspec.structs.replace(row, exposed_ms=99 * row.exposed_ms) for row in waiting]
    invalid = msgspec.structs.replace(
        report, valid=False, exposure=msgspec.structs.replace(report.exposure, names=tuple(longer))
    )
    sink = WandbSink(settings=wandb.Settings(**SETTINGS), dir=tmp_path)
    sink.open(run_info())
    sink.log_causal(CausalWindow(window=1, first_step=500, delayed=delayed, levels=levels, step_ms=step_ms))
    sink.log(report)
    sink.log(invalid)
    sink.close()
    for table in read_run(tmp_path).tables("overlap/causal"):
        (row,) = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert row["change"].startswith("this is rank 1, not communication")
        assert row["exposed_ms"] == 6.0


def test_the_table_of_delays_comes_during_the_run(tmp_path: Path) -> None:
    levels = levels_of(54)
    delayed = DelayedSet((DelayedCall("_reduce_scatter_base_", "data", 0, "layers.0"),), 10.0)
    causal = CausalWindow(
        window=1, first_step=500, delayed=delayed, levels=levels,
        step_ms=tuple([100 + 5.0 * level for level in levels]),
    )  # fmt: skip
    sink = WandbSink(settings=wandb.Settings(**SETTINGS), dir=tmp_path)
    sink.open(run_info())
    sink.log(window(0))
    sink.log_causal(causal)
    sink.log(window(2))
    sink.log(window(3))
    sink.close()
    tables = read_run(tmp_path).tables("overlap/causal")
    assert len(tables) > 1  # not only the last one
    (row,) = [dict(zip(tables[0]["columns"], row, strict=True)) for row in tables[0]["data"]]
    assert row["delayed"] == "reduce-scatter of layers.0"
    assert row["slope"] == pytest.approx(1)
    assert row["removed_wins_at_most_ms"] > 0
    assert row["exposed_ms"] == 6.0
