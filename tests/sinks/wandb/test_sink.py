from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks import Mode, OverlapMonitor, Schedule, WandbSink
from overlap_callbacks.analysis.headline import run_verdict
from overlap_callbacks.analysis.results.kernel_times import ALONE, UNMATCHED, PairTime
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.monitor.background.store import Job
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.session import run_info
from tests.distributed import run_ranks
from tests.report.runs import full_report
from tests.samples import window, window_report
from tests.sinks.wandb.test_content import summary
from tests.wandb_reader import SETTINGS, OfflineRun, read_run

wandb = pytest.importorskip("wandb")


pytestmark = pytest.mark.usefixtures("apart")


def start(folder: Path) -> Any:
    return wandb.init(project="test", dir=folder, settings=wandb.Settings(**SETTINGS))


def info() -> Any:
    return run_info(MonitorConfig(framework="pytorch"), Job(0, 2, "gloo"), "cpu")


def logged(tmp_path: Path, *reports: Any, detail: str = "all") -> OfflineRun:
    run = start(tmp_path)
    sink = WandbSink(detail=detail)
    sink.open(info())
    for report in reports:
        sink.log(report)
    sink.close()
    assert wandb.run is run, "the user's run must not be finished by the sink"
    run.finish()
    return read_run(tmp_path)


def test_detail_gives_the_users_run_every_metric_under_its_name(tmp_path: Path) -> None:
    report = window_report()
    run = logged(tmp_path, report)
    assert report.metrics()["overlap/compute_slowdown"] == pytest.approx(0.0991, abs=1e-3)
    for key, value in report.metrics().items():
        assert run.values(key) == [pytest.approx(value)]
    assert run.values("overlap/step") == [20]


def scalars(run: OfflineRun) -> set[str]:
    """Keys of rows other than W&B's own, pictures and tables."""
    keys = {key for row in run.history for key in row if not key.startswith("_")}
    return {key for key in keys if not any(f"{key.partition('.')[0]}._type" in row for row in run.history)}


def test_by_default_there_are_14_keys_one_of_them_the_verdict(tmp_path: Path) -> None:
    run = logged(tmp_path, full_report(), detail="short")
    assert scalars(run) - {"overlap/step"} == {
        "overlap/verdict",
        "overlap/hidden_comm_fraction",
        "overlap/exposed_comm_ms",
        "overlap/compute_slowdown",
        "overlap/speedup_vs_sequential",
        "overlap/speedup_vs_sequential_ci_low",
        "overlap/speedup_vs_sequential_ci_high",
        "overlap/e2e_ideal_ms",
        "overlap/e2e_overlapped_ms",
        "overlap/e2e_sequential_ms",
        "overlap/valid",
        "overlap/measurement_overhead",
        "power/overlapped_avg_w",
        "power/sequential_avg_w",
    }
    assert {row["overlap/verdict"] for row in run.history if "overlap/verdict" in row} == {
        run_verdict(RunSummary(info(), [full_report()], running=True))
    }
    assert set(run.metrics) <= scalars(run) | {key.partition(".")[0] for row in run.history for key in row}
    assert {key.partition("/")[0] for key in run.metrics} == {"overlap", "power"}
    (table,) = run.tables("overlap/figures")
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["data"]}
    for value in full_report().values():
        column = value.bound or "window"
        assert rows[value._replace(bound="").key][column] == pytest.approx(value.number)
    assert rows["overlap/compute_slowdown"]["run_ci_low"] < rows["overlap/compute_slowdown"]["ci_low"]


def test_the_card_is_the_first_of_its_section_in_the_order_of_definition_and_of_names(tmp_path: Path) -> None:
    run = logged(tmp_path, full_report())
    of_section = [key for key in run.metrics if key.startswith("overlap/") and key != "overlap/step"]
    assert of_section[0] == min(of_section) == "overlap/answer"


def test_no_figure_has_two_names(tmp_path: Path) -> None:
    one = window_report()
    one = msgspec.structs.replace(one, dimensions=one.dimensions[:1], dimension_pairs=())
    assert not [key for key in scalars(logged(tmp_path / "one", one)) if key.startswith("dimension/")]
    run = logged(tmp_path / "several", full_report())
    assert {key.partition("/")[0] for key in run.metrics}.isdisjoint({"overlap_run", "verdict", "device"})
    assert [key for key in scalars(run) if key.startswith("dimension/")]
    assert run.values("overlap/bound") == ["compute"]


def test_detail_is_one_of_two_words() -> None:
    with pytest.raises(ValueError, match="detail must be one of short, all, got 'much'"):
        WandbSink(detail="much")


def test_each_metric_is_defined_by_its_exact_name_before_its_first_row(tmp_path: Path) -> None:
    report = window_report()
    run = logged(tmp_path, report)
    for key in report.metrics():
        assert run.metrics[key]["step_metric"] == "overlap/step"
        assert run.order.index(f"define {key}") < run.order.index(f"log {key}")


def test_nothing_that_was_not_measured_is_logged(tmp_path: Path) -> None:
    run = logged(tmp_path, window_report(profiled=()))
    assert run.values("overlap/e2e_overlapped_ms")
    assert not run.values("overlap/compute_slowdown")
    numbers = [value for row in run.history for value in row.values() if isinstance(value, float)]
    assert all(map(math.isfinite, numbers))


def test_the_kernels_arrive_as_a_table_those_that_lose_most_first(tmp_path: Path) -> None:
    (table,) = logged(tmp_path, window_report()).tables("overlap/kernels")
    assert table["columns"][:4] == ["kernel", "communication", "slowdown", "lost_ms"]
    assert [row[0] for row in table["data"]] == ["aten::mm", "<b>aten::add</b>"]
    assert table["data"][0][2:4] == [pytest.approx(0.1), pytest.approx(3.0)]


def test_the_pairs_arrive_as_a_table_the_dearest_first(tmp_path: Path) -> None:
    (table,) = logged(tmp_path, window_report()).tables("overlap/pairs")
    assert table["columns"][:5] == ["kernels", "communication", "concurrent_with", "slowdown", "lost_ms"]
    assert [row[:3] for row in table["data"]] == [["all_reduce", True, "gemm"], ["gemm", False, "all_reduce"]]
    assert table["data"][1][3:5] == [pytest.approx(0.1), pytest.approx(3.0)]
    (during,) = [column for column, name in enumerate(table["columns"]) if name == "slowdown_during"]
    assert table["data"][1][during] == pytest.approx(3.0 / (20.0 - 3.0))


def test_kernels_that_ran_alone_are_called_so_in_the_table(tmp_path: Path) -> None:
    pairs = (
        PairTime("gemm", False, ALONE, 10.0, 0.0, 33.0, 30.0),
        PairTime("gemm", False, UNMATCHED, 1.0, 0.0, 3.0, 0.0),
    )
    (table,) = logged(tmp_path, msgspec.structs.replace(window_report(), pairs=pairs)).tables("overlap/pairs")
    assert [row[2] for row in table["data"]] == ["ran alone, unexplained", "in one mode alone"]


def test_compute_during_each_dimension_arrives_as_a_table_unless_the_window_is_invalid(tmp_path: Path) -> None:
    pairs = (PairTime("gemm", False, "pipeline", 10.0, 20.0, 33.0, 30.0),)
    report = msgspec.structs.replace(window_report(), dimension_pairs=pairs)
    run = logged(tmp_path / "valid", report)
    (table,) = run.tables("dimension/pairs")
    assert [row[:4] for row in table["data"]] == [["gemm", False, "pipeline", pytest.approx(0.1)]]
    assert run.values("dimension/pipeline_compute_slowdown") == [pytest.approx(0.1)]
    spoilt = logged(tmp_path / "invalid", msgspec.structs.replace(spoilt_report(), dimension_pairs=pairs))
    assert not spoilt.tables("dimension/pairs")
    assert not spoilt.values("dimension/pipeline_compute_slowdown")


def test_what_compares_with_sequential_steps_is_not_logged_of_an_invalid_window(tmp_path: Path) -> None:
    report = spoilt_report()
    assert not report.valid
    run = logged(tmp_path, report)
    assert run.values("overlap/valid") == [0.0]
    assert not run.tables("overlap/pairs")
    assert not run.values("dimension/data_comm_slowdown")
    assert run.values("dimension/data_comm_ms") == [pytest.approx(25.0)]


def spoilt_report() -> Any:
    """Of a window whose sequential steps were not sequential."""
    overlapping = [
        msgspec.structs.replace(block, covered_compute_ms=30.0) if block.mode is Mode.SEQUENTIAL else block
        for block in window().profiled
    ]
    return window_report(profiled=tuple(overlapping))


def test_the_runs_configuration_says_how_it_was_measured(tmp_path: Path) -> None:
    run = logged(tmp_path, window_report())
    assert run.config["overlap_callbacks"]["schedule"]["blocks"] == "OSSO"


def test_steps_that_go_back_are_kept_and_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = start(tmp_path)
    run.log({"loss": 1.0}, step=1000)  # the user's own step is far ahead of ours
    sink = WandbSink()
    sink.log(window_report(first_step=500))
    sink.log(window_report(first_step=20))
    sink.close()
    run.finish()
    assert read_run(tmp_path).values("overlap/step") == [500, 20]
    assert "must be monotonically increasing" not in "".join(capfd.readouterr())


def test_the_users_rows_with_explicit_steps_survive_those_of_the_sink(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = start(tmp_path)
    sink = WandbSink()
    for epoch in range(5):
        for part in range(3):
            sink.log(window_report(first_step=100 * epoch + part))
        run.log({"val_loss": float(epoch)}, step=epoch)
    sink.close()
    run.finish()
    found = read_run(tmp_path)
    assert found.values("val_loss") == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert found.values("overlap/step") == [100 * epoch + part for epoch in range(5) for part in range(3)]
    assert "less than the current step" not in "".join(capfd.readouterr())


def test_the_summary_of_a_users_run_has_the_runs_own_figures_however_late_their_rows_are(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.define_metric("loss", summary="min")
    later = msgspec.structs.replace(window_report(first_step=520), valid=False)
    sink, reports = WandbSink(), [window_report(first_step=20), later]
    for report in reports:
        sink.log(report)
    for loss in (1.0, 2.0):
        run.log({"loss": loss})
    sink.close()
    run.finish()
    assert read_run(tmp_path).values("loss") == [1.0, 2.0]
    found = summary(tmp_path)
    assert found["loss"] == {"min": 1.0}
    pooled = RunSummary(None, reports, running=True).pooled()
    assert found["overlap/compute_slowdown"] == pytest.approx(pooled["compute_slowdown"].value)
    low = found["overlap/speedup_vs_sequential_ci_low"]
    assert low == pytest.approx(pooled["speedup_vs_sequential"].ci_low)


def test_without_a_run_one_is_started_and_finished(tmp_path: Path) -> None:
    sink = WandbSink(dir=tmp_path, settings=wandb.Settings(**SETTINGS), mode="offline")
    sink.open(info())
    sink.log(window_report())
    assert wandb.run is not None
    sink.close()
    assert wandb.run is None
    assert read_run(tmp_path).values("overlap/step") == [20]


def test_without_a_run_nothing_is_started_where_that_is_not_wanted(tmp_path: Path) -> None:
    sink = WandbSink(start=False)
    sink.log(window_report())
    sink.close()
    assert wandb.run is None
    assert not list(tmp_path.rglob("*.wandb"))


def test_nobody_logged_in_is_an_error_that_says_what_to_do_rather_than_a_prompt() -> None:
    with pytest.raises(RuntimeError, match=r"wandb login.*WANDB_API_KEY.*WANDB_MODE=offline"):
        WandbSink(mode="online").log(window_report())


def test_wandb_absent_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"overlap-callbacks\[wandb\]"):
        WandbSink().log(window_report())


def _train_with_wandb(rank: int, folder: str) -> list[int]:
    import torch
    from torch import nn

    if rank == 0:
        wandb.init(project="test", dir=folder, settings=wandb.Settings(**SETTINGS))
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
    schedule = Schedule(spread=False, every_n_steps=25, first_step=2, repeats=2, steps_per_block=1, profiled_steps=2)
    monitor = OverlapMonitor(schedule, run_dir=Path(folder, "run"), strict=True, max_overhead=None)
    for step in range(52):
        with monitor.step(step):
            model(torch.ones(4, 32)).sum().backward()
        if rank == 0 and step % 10 == 0:
            wandb.log({"loss": float(step)})
    monitor.close()
    if rank == 0:
        wandb.finish()
    return [step for step in range(52) if (plan := schedule.plan(step)) and plan.offset == 0]


def test_a_live_job_logs_its_windows_into_the_users_run(tmp_path: Path) -> None:
    (starts, _) = run_ranks(_train_with_wandb, 2, str(tmp_path))
    run = read_run(tmp_path)
    # Tables may come in a row of their own, after the figures.
    rows = [row for row in run.history if "overlap/valid" in row]
    assert [row["overlap/step"] for row in rows] == starts == [2, 27]
    for row in rows:
        assert row["overlap/e2e_sequential_ms"] > 0
        assert row["overlap/speedup_vs_sequential_ci_low"] <= row["overlap/speedup_vs_sequential"]
        assert row["overlap/verdict"]
    keys = scalars(run) - {"loss", "overlap/step"}
    assert len([key for key in keys if not key.startswith("parts/")]) == 12  # no power on a CPU
    assert run.values("loss") == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert len(run.tables("overlap/kernels")) == 2
