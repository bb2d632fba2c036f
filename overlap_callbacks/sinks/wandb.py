"""Reports in Weights & Biases."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from overlap_callbacks.metrics import OverlapReport
from overlap_callbacks.sinks.base import RunInfo, Sink

# Our own x-axis. W&B's step only goes up and belongs to the user's own logging, so it is never passed.
STEP_KEY = "overlap/step"

KERNEL_COLUMNS = (
    "kernel", "communication", "slowdown", "lost_ms", "overlapped_ms", "sequential_ms",
    "overlapped_calls", "sequential_calls",
)  # fmt: skip

PAIR_COLUMNS = (
    "victim", "communication", "beside", "slowdown", "lost_ms", "time_ms", "alone_ms", "beside_ms", "calls",
)  # fmt: skip


class WandbSink(Sink):
    """Logs to the user's W&B run where there is one, else to a run that it starts and finishes.

    Every metric of ``OverlapReport.metrics()``, against ``overlap/step``, and, of valid windows, two tables:
    ``overlap/kernels``, the kernels that lose most time, and ``overlap/pairs``, what each kernel family loses beside
    each kind of collective. Each key is defined by its exact name before it is first logged: among patterns that
    overlap (Lightning's ``WandbLogger`` defines ``*``) W&B picks one at random.

    Args:
        run: the run to use. By default ``wandb.run``, as it is when the first report comes.
        start: start a run where there is none; if False, log nothing until there is one.
        init: arguments of ``wandb.init`` for a run that is started, e.g. ``project``, ``entity``, ``name``.

    Raises:
        ImportError: (from ``log``) wandb is not installed.
        RuntimeError: (from ``log``) nobody is logged in to W&B, so that no run can be started.
    """

    def __init__(self, run: Any = None, *, start: bool = True, **init: Any) -> None:
        self._given_run = run
        self._run: Any = None
        self._start = start
        self._init = {"project": "overlap-callbacks", **init}
        self._owns_run = False
        self._info: RunInfo | None = None
        self._defined: set[str] = set()
        self._rows: list[dict[str, Any]] = []  # not yet logged
        self._joined_step = -1  # step of the user's row that our last one joined

    def open(self, run: RunInfo) -> None:
        self._info = run

    def log(self, report: OverlapReport) -> None:
        run = self._find_run()
        if run is None:
            return
        wandb = sys.modules["wandb"]
        row: dict[str, Any] = report.metrics()
        self._define(run, row)
        for key, columns, items in (
            ("overlap/kernels", KERNEL_COLUMNS, report.kernels),
            ("overlap/pairs", PAIR_COLUMNS, report.pairs),
        ):
            if items and report.valid:  # both compare with sequential steps
                table = row[key] = wandb.Table(columns=list(columns))
                for item in items:
                    table.add_data(*(_cell(getattr(item, _field(column))) for column in columns))
        self._rows.append({**row, STEP_KEY: report.first_step})
        self._log_rows(run)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        while self._rows:
            run.log({})  # ends the row under way, which makes room for the next
            self._log_rows(run)
        if self._owns_run:
            run.finish()

    def _log_rows(self, run: Any) -> None:
        """Log what waits, without moving on the step of a run that is not ours.

        A row of ours joins the row of the user's that comes next. Were it a row of its own, the run's step would move
        on, and W&B would drop what a user then logs with a ``step=`` of their own that has been passed.
        """
        if self._owns_run:
            while self._rows:
                run.log(self._rows.pop(0))
        elif self._rows and run.step != self._joined_step:  # one row of ours at most in one of the user's
            self._joined_step = run.step
            run.log(self._rows.pop(0), commit=False)

    def _find_run(self) -> Any:
        if self._run is not None:
            return self._run
        run = self._given_run
        if run is None:
            run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None and self._start:
            run = self._start_run()
        if run is not None:
            self._run = run
            if self._info is not None:
                run.config.update({"overlap_callbacks": msgspec.to_builtins(self._info)}, allow_val_change=True)
        return run

    def _start_run(self) -> Any:
        try:
            import wandb
        except ImportError:
            raise ImportError(
                "wandb is not installed: pip install 'overlap-callbacks[wandb]', or leave WandbSink out"
            ) from None
        mode = self._init.get("mode") or wandb.setup().settings.mode
        # wandb.init would ask for a key on the terminal, and wait.
        if mode not in ("offline", "disabled", "dryrun") and not _logged_in(wandb):
            raise RuntimeError(
                "nobody is logged in to W&B: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
            )
        self._owns_run = True
        return wandb.init(**self._init)

    def _define(self, run: Any, row: dict[str, Any]) -> None:
        if not self._defined:
            run.define_metric(STEP_KEY, hidden=True)
        for key in row.keys() - self._defined:
            run.define_metric(key, step_metric=STEP_KEY)
            self._defined.add(key)


def _field(column: str) -> str:
    return "name" if column == "kernel" else column


def _cell(value: Any) -> Any:
    return value[:500] if isinstance(value, str) else value


def _logged_in(wandb: Any) -> bool:
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # older than the parameter
        return bool(wandb.setup().settings.api_key or wandb.api.api_key)
