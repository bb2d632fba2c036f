"""Reports in MLflow."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_callbacks import _validation
from overlap_callbacks.analysis.headline import run_verdict
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.run_summary import RunSummary, without_details
from overlap_callbacks.sinks.base import DETAILS, Sink, chosen, fit
from overlap_callbacks.sinks.jsonl import earlier_starts

VERDICT = "overlap/verdict"


class MlflowSink(Sink):
    """Logs to the user's MLflow run if one is active, else to a run that it starts and ends.

    Each window's metrics are logged against its first step. The tag ``overlap/verdict`` has the verdict on the run so
    far.

    Args:
        run_id: the run to use. By default the one that is active, on any thread, at the first report.
        experiment: of a run started here; by default MLFLOW_EXPERIMENT_NAME, else ``overlap-callbacks``.
        detail: ``"short"``, the list that W&B gets by default, or ``"all"``.

    Raises:
        ValueError: ``detail`` is wrong.
        ImportError: (from ``log``) mlflow is not installed.
    """

    def __init__(self, run_id: str | None = None, *, experiment: str | None = None, detail: str = "short") -> None:
        self._given_run_id = run_id
        self._experiment = experiment
        self._detail = _validation.one_of("detail", detail, allowed=DETAILS)
        self._info: RunInfo | None = None
        self._record: Path | None = None
        self._windows: list[OverlapReport] = []  # without their details
        self._client: Any = None
        self._run_id = ""
        self._owns_run = False

    def use_record(self, path: Path) -> None:
        self._record = path

    def open(self, run: RunInfo) -> None:
        self._info = run
        if self._record is not None:
            with contextlib.suppress(OSError):  # the record's own sink has reported it
                self._windows = earlier_starts(self._record).windows

    def log(self, report: OverlapReport) -> None:
        self._windows.append(without_details(report))
        self._log(report, {VERDICT: run_verdict(RunSummary(self._info, self._windows, running=True))})

    def log_arm(self, report: ArmReport) -> None:
        self._log(report, {})

    def close(self) -> None:
        if self._owns_run:
            self._owns_run = False
            self._client.set_terminated(self._run_id)

    def _log(self, report: OverlapReport | ArmReport, tags: Mapping[str, str]) -> None:
        if self._client is None:
            self._find_run()
        from mlflow.entities import Metric, RunTag

        now_ms = int(1000 * time.time())
        values = fit(chosen(report.values(), self._detail)).items()
        metrics = [Metric(key, value.number, now_ms, report.first_step) for key, value in values]
        self._client.log_batch(self._run_id, metrics, tags=[RunTag(*tag) for tag in tags.items()])

    def _find_run(self) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.tracking import fluent
        except ImportError:
            raise ImportError(
                "mlflow is not installed: pip install 'overlap-callbacks[mlflow]', or leave MlflowSink out"
            ) from None
        client = MlflowClient()
        # ``mlflow.active_run`` knows only the runs of the thread that calls it.
        active = fluent._get_latest_active_run() if self._given_run_id is None else None
        self._run_id = active.info.run_id if active is not None else self._given_run_id or ""
        if not self._run_id:
            name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "overlap-callbacks"
            experiment = client.get_experiment_by_name(name)
            experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
            self._run_id = client.create_run(experiment_id).info.run_id
            self._owns_run = True
        self._client = client
