"""Reports in MLflow, by its own client, in a store of files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.headline import run_verdict
from overlap_callbacks.analysis.results.catalogue import SHORT_KEYS
from overlap_callbacks.analysis.results.window import DimensionTime
from overlap_callbacks.analysis.run_summary import RunSummary, without_details
from overlap_callbacks.sinks import JsonlSink, MlflowSink
from tests.distributed import run_ranks
from tests.report.arm_runs import arm_window
from tests.report.runs import full_report, run_info, window

mlflow = pytest.importorskip("mlflow")
# Of its own store of files, which it would replace by a database.
pytestmark = [pytest.mark.usefixtures("mlflow_store"), pytest.mark.filterwarnings("ignore:The filesystem tracking")]


@pytest.fixture(autouse=True)
def _no_active_run() -> Iterator[None]:
    yield
    while mlflow.active_run() is not None:
        mlflow.end_run()


def logged(sink: MlflowSink, *reports: Any) -> None:
    """Logged as in a job: never on the training thread."""

    def use() -> None:
        sink.open(run_info())
        for report in reports:
            (sink.log_arm if hasattr(report, "arm") else sink.log)(report)
        sink.close()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()


def runs_of(experiment: str) -> list[Any]:
    return list(mlflow.search_runs(experiment_names=[experiment], output_format="list"))


def history(run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in mlflow.MlflowClient().get_metric_history(run_id, key)]


def verdict(*windows: Any) -> str:
    return run_verdict(RunSummary(run_info(), [without_details(report) for report in windows], running=True))


def test_the_short_list_of_each_window_and_the_verdict_are_in_a_run_of_its_own() -> None:
    windows = [window(0, power=True), window(1, power=True)]
    logged(MlflowSink(), *windows, arm_window(2))
    (run,) = runs_of("overlap-callbacks")
    short = {value.key for value in windows[0].values() if value.key_with({}) in SHORT_KEYS}
    assert set(run.data.metrics) == short | {"arm/prefetch_2_2_speedup"}
    for key in short:
        logged_so_far = history(run.info.run_id, key)[:2]  # an arm's window has its cost too
        assert logged_so_far == [(report.first_step, report.metrics()[key]) for report in windows]
    assert run.data.tags["overlap/verdict"] == verdict(*windows)
    assert run.info.status == "FINISHED"


def test_every_metric_on_request() -> None:
    report = full_report()
    logged(MlflowSink(detail="all"), report)
    (run,) = runs_of("overlap-callbacks")
    assert set(run.data.metrics) == set(report.metrics())


def test_more_metrics_than_mlflow_takes_at_once() -> None:
    dimensions = [DimensionTime(f"d{number}", 1, 1, 1.0, 1.0, 1.0, 1.0) for number in range(400)]
    report = msgspec.structs.replace(window(0), dimensions=tuple(dimensions))
    logged(MlflowSink(detail="all"), report)
    (run,) = runs_of("overlap-callbacks")
    assert set(run.data.metrics) == set(report.metrics())
    assert len(run.data.metrics) > 1000


def test_the_users_run_is_used_and_left_open() -> None:
    mlflow.set_experiment("training")
    with mlflow.start_run() as mine:
        mlflow.log_metric("loss", 0.5, step=3)
        logged(MlflowSink(), window(0))
        assert mlflow.active_run() is mine
        mlflow.log_metric("loss", 0.4, step=4)
        assert mlflow.get_run(mine.info.run_id).info.status == "RUNNING"
    (run,) = runs_of("training")
    assert {"loss", "overlap/compute_slowdown"} <= set(run.data.metrics)
    assert history(run.info.run_id, "loss") == [(3, 0.5), (4, 0.4)]
    assert mlflow.get_experiment_by_name("overlap-callbacks") is None


def test_the_run_that_is_named_is_used() -> None:
    client = mlflow.MlflowClient()
    run_id = client.create_run(client.create_experiment("training")).info.run_id
    with mlflow.start_run():
        logged(MlflowSink(run_id), window(0))
    assert "overlap/compute_slowdown" in client.get_run(run_id).data.metrics
    assert client.get_run(run_id).info.status == "RUNNING"


@pytest.mark.parametrize("given", [True, False])
def test_the_experiment_of_its_own_run(monkeypatch: pytest.MonkeyPatch, given: bool) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "other" if given else "mine")
    logged(MlflowSink(experiment="mine" if given else None), window(0))
    assert len(runs_of("mine")) == 1


def test_a_job_that_is_resumed_has_the_verdict_of_all_its_starts(tmp_path: Path) -> None:
    for report in (window(0), None):
        record = JsonlSink(tmp_path)
        record.open(run_info())
        if report is not None:
            record.log(report)
        record.close()
    sink = MlflowSink()
    sink.use_record(tmp_path / "overlap.jsonl")
    logged(sink, window(1))
    (run,) = runs_of("overlap-callbacks")
    assert run.data.tags["overlap/verdict"] == verdict(window(0), window(1)) != verdict(window(1))


def _train(rank: int, store: str) -> None:
    import mlflow
    import torch
    from torch import nn

    from overlap_callbacks import OverlapMonitor, Schedule

    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    schedule = Schedule(spread=False, every_n_steps=30, first_step=2, repeats=1, steps_per_block=1, profiled_steps=2)
    monitor = OverlapMonitor(schedule, [MlflowSink()], max_overhead=None, power=False)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # ranks do not have the environment of the test
    mlflow.set_tracking_uri(store)
    if rank == 0:
        mlflow.set_experiment("training")
        mlflow.start_run()
    for step in range(40):
        with monitor.step(step):
            model(torch.ones(2, 8)).sum().backward()
    monitor.close()
    if rank == 0:
        mlflow.end_run()


def test_a_job_of_two_ranks() -> None:
    run_ranks(_train, 2, mlflow.get_tracking_uri())
    (run,) = runs_of("training")
    assert run.data.metrics["overlap/e2e_overlapped_ms"] > 0
    assert run.data.tags["overlap/verdict"]
    assert mlflow.get_experiment_by_name("overlap-callbacks") is None


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="detail must be one of short, all"):
        MlflowSink(detail="some")
