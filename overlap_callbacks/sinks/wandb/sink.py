"""Reports in Weights & Biases."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from overlap_callbacks import _validation
from overlap_callbacks._threads import DetachedWorker
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.sinks.base import Sink
from overlap_callbacks.sinks.jsonl import JsonlSink
from overlap_callbacks.sinks.metric_keys import fit, fit_name
from overlap_callbacks.sinks.wandb import cards
from overlap_callbacks.sinks.wandb.alerts import Limits
from overlap_callbacks.sinks.wandb.summary import RunSoFar, aggregates, power_verdict
from overlap_callbacks.sinks.wandb.tables import tables

logger = logging.getLogger("overlap_callbacks")

# Our own x-axis. W&B's step only goes up and belongs to the user's own logging, so it is never passed.
STEP_KEY = "overlap/step"

STEP_CARD = "overlap/step_time"
POWER_CARD = "power/trace_card"

# Longest that W&B may keep the reporting thread, which writes the record too: once, for whatever stalls.
_PATIENCE_S = 2.0
# Once per crossing is our own rule; of 0, W&B makes its default of a minute.
_NO_WAIT_S = 0.001
# Each table is a file, and an artifact, of its own. Every window has its tables up to this one; after it those that
# come when the number of windows has grown by so much, and the last: a thousand windows have some thirty of each.
_ALL_TABLES_UP_TO = 10
_TABLES_GROWTH = 1.25


class _Row(NamedTuple):
    """What is logged of a window.

    Attributes:
        metrics: as they are logged.
        pictured: the report, where its pictures and tables are due.
        verdict: of the run so far.
    """

    metrics: dict[str, float]
    pictured: OverlapReport | None
    verdict: str


class WandbSink(Sink):
    """Logs to the user's W&B run where there is one, else to a run that it starts and finishes.

    - Every metric of ``OverlapReport.metrics()``, against ``overlap/step``, with aggregates in the run's summary
      (``wandb_summary.aggregates``); means over the run so far under ``overlap_run/``.
    - ``overlap/step_time``: step time ideal, overlapped and sequential side by side with intervals, as a picture with
      the verdict; ``power/trace_card``: power against time.
    - Tables: ``overlap/kernels``, ``overlap/pairs`` (what each kernel family loses beside each kind of collective),
      ``comm/collectives``, ``dimension/dimensions``, ``power/trace``.
    - In the run's summary, the verdicts as text: ``overlap/verdict`` and ``power/verdict``.
    - In its configuration, under ``overlap_callbacks``: schedule, device, versions, framework, and the size of the
      groups of each dimension of parallelism.
    - At the end the JSONL record, as an artifact of the type ``overlap-record``.
    - An alert when a figure passes a limit of ``alerts``, and again only after it has been back within.

    Each key is defined by its exact name before it is first logged: among patterns that overlap (Lightning's
    ``WandbLogger`` defines ``*``) W&B picks one at random.

    It works on a thread of its own. If W&B stalls, training and the record go on. A run that W&B does not begin within
    ``timeout_s`` is logged offline; ``close`` gives up after as long, and what was not sent lies in the run's folder.
    Either can be sent later, with ``wandb sync``.

    Args:
        run: the run to use. By default ``wandb.run``, as it is when the first report comes.
        start: start a run where there is none; if False, log nothing until there is one.
        alerts: limits by the figure's name, e.g. ``{"compute_slowdown": 0.2, "residual_overlap": 0.02}``. Fractions are
            fractions. Of ``speedup_vs_sequential`` and ``hidden_comm_fraction`` less is worse, of all others more.
        timeout_s: longest time for W&B to begin a run of ours, and to take what is on its way at the end.
        init: arguments of ``wandb.init`` for a run that is started, e.g. ``project``, ``entity``, ``name``.

    Raises:
        TypeError, ValueError: ``alerts`` or ``timeout_s`` is wrong.
        ImportError: (from ``log``) wandb is not installed.
        RuntimeError: (from ``log``) nobody is logged in to W&B, so that no run can be started.
        TimeoutError: (from ``close``) W&B did not take everything in time.
    """

    has_own_thread = True

    def __init__(
        self,
        run: Any = None,
        *,
        start: bool = True,
        alerts: Mapping[str, float] | None = None,
        timeout_s: float = 30.0,
        **init: Any,
    ) -> None:
        self._given_run = run
        self._start = start
        self._limits = Limits(alerts)
        self._timeout_s = _validation.seconds("timeout_s", timeout_s)
        self._init = {"project": "overlap-callbacks", **init}
        self._info: RunInfo | None = None
        self._aside = DetachedWorker("overlap-callbacks-wandb", patience_s=_PATIENCE_S)
        self._closed = False

        # All below is of the thread aside.
        self._run: Any = None
        self._owns_run = False
        self._defined: set[str] = set()
        self._parallel: dict[str, int] | None = None  # as the run's configuration has it
        self._rows: list[_Row] = []  # not yet logged
        self._joined_step = -1  # step of the user's row that our last one joined
        self._so_far: RunSoFar | None = None
        self._num_reports = 0
        self._next_tables = 1
        self._left_out: OverlapReport | None = None  # the last report, where its tables were not due

    def open(self, run: RunInfo) -> None:
        self._info = run

    def log(self, report: OverlapReport) -> None:
        self._aside.do(lambda: self._log(report))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # wandb has a time limit of its own for a run that we finish; it tells then what was not sent.
        ended = self._aside.close(self._finish, self._timeout_s + _PATIENCE_S)
        if self._aside.dropped:
            logger.warning("overlap-callbacks: %d windows found no place before W&B", self._aside.dropped)
        if not ended:
            folder = getattr(getattr(self._run, "settings", None), "sync_dir", None)
            where = f"wandb sync {folder}" if folder else "the record has everything"
            raise TimeoutError(f"W&B did not take everything within {self._timeout_s:g} s: {where}")

    # -- aside

    def _log(self, report: OverlapReport) -> None:
        run = self._find_run()
        if run is None:
            return
        if self._so_far is None:
            self._so_far = RunSoFar(self._info)
        self._so_far.add(report)
        self._num_reports += 1
        self._describe(run, report)
        verdict, power = self._so_far.verdict(), power_verdict(report)

        row = {**fit(report.metrics()), **self._so_far.metrics(), STEP_KEY: report.first_step}
        # A window that was cut off at once has nothing to show, and must not stand for the run as its last.
        shows = bool(report.figures())
        due = shows and self._num_reports >= self._next_tables
        if due:
            grown = self._num_reports * (_TABLES_GROWTH if self._num_reports >= _ALL_TABLES_UP_TO else 0)
            self._next_tables = max(self._num_reports + 1, int(grown))
        if shows:
            self._left_out = None if due else report
        self._rows.append(_Row(row, report if due else None, verdict))
        self._log_rows(run)

        run.summary.update({"overlap/verdict": verdict, **({} if power is None else {"power/verdict": power})})
        for alert in self._limits.passed(report):
            run.alert(title=alert.title, text=alert.text, level="WARN", wait_duration=_NO_WAIT_S)

    def _finish(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        if _is_finished(run):
            logger.warning(
                "overlap-callbacks: the W&B run was finished before measuring ended; the record has the rest"
            )
            return
        if self._left_out is not None and self._so_far is not None:
            self._rows.append(_Row({STEP_KEY: self._left_out.first_step}, self._left_out, self._so_far.verdict()))
        while self._rows:  # each pass takes one, whatever the run does with it
            run.log({})  # ends the row under way, where there is one, which makes room for the next
            self._log_row(run)
        self._log_record(run)
        if self._owns_run:
            try:
                run.finish()
            except TimeoutError:
                raise TimeoutError(
                    f"W&B did not take everything within {self._timeout_s:g} s: wandb sync {run.settings.sync_dir}"
                ) from None

    def _log_rows(self, run: Any) -> None:
        """Log what waits, without moving on the step of a run that is not ours.

        A row of ours joins the row of the user's that comes next. Were it a row of its own, the run's step would move
        on, and W&B would drop what a user then logs with a ``step=`` of their own that has been passed.
        """
        if self._owns_run:
            while self._rows:
                self._log_row(run)
                run.log({})
        elif self._rows and run.step != self._joined_step:  # one row of ours at most in one of the user's
            self._log_row(run)
            self._joined_step = run.step  # as it is now: the user may have gone on to another row meanwhile

    def _log_row(self, run: Any) -> None:
        row, wandb = self._rows.pop(0), sys.modules["wandb"]
        pictures = {} if row.pictured is None else _pictures(wandb, row.pictured, row.verdict)
        self._log_part(run, {**row.metrics, **pictures})
        # Apart, and with the step again, for the user may have begun another row by then: for a table of a run that is
        # online, W&B asks its server, waits, and raises.
        found = {} if row.pictured is None else _tables(wandb, row.pictured)
        if found:
            step = row.metrics[STEP_KEY]
            self._try_artifact("the tables of a window", lambda: self._log_part(run, {**found, STEP_KEY: step}))

    def _log_part(self, run: Any, part: Mapping[str, Any]) -> None:
        """Add to the row under way."""
        self._define(run, part)
        run.log(part, commit=False)

    def _try_artifact(self, what: str, log: Callable[[], None]) -> None:
        try:
            log()
        except Exception as error:
            self._next_tables = 2 * self._num_reports + 1  # it may have waited for long: not at every window
            logger.warning("overlap-callbacks: W&B did not take %s; the record has them: %s", what, error)

    def _define(self, run: Any, row: Mapping[str, Any]) -> None:
        if not self._defined:
            run.define_metric(STEP_KEY, hidden=True)
            self._defined.add(STEP_KEY)
        for key in sorted(row.keys() - self._defined):
            # Means over the run so far, and pictures and tables, have what was logged last.
            plain = key.startswith("overlap_run/") or not isinstance(row[key], (int, float))
            run.define_metric(key, step_metric=STEP_KEY, summary=None if plain else aggregates(key))
            self._defined.add(key)

    def _describe(self, run: Any, report: OverlapReport) -> None:
        """In the run's configuration: what was measured where, and how."""
        sizes: dict[str, int] = {}
        for row in report.collectives:
            name = fit_name(row.dimension or "other")
            sizes[name] = max(row.group_size, sizes.get(name, 0))
        if sizes == self._parallel:
            return
        self._parallel = sizes
        content: dict[str, Any] = {} if self._info is None else msgspec.to_builtins(self._info)
        for name in ("units", "meanings"):  # long, and in the record
            content.pop(name, None)
        run.config.update({"overlap_callbacks": {**content, "group_sizes": sizes}}, allow_val_change=True)

    def _log_record(self, run: Any) -> None:
        path = JsonlSink.path_of(self._info) if self._info is not None else None
        if path is None or not path.is_file():
            return
        wandb = sys.modules["wandb"]
        # A resumed run has the same name, and so another version of the same artifact.
        artifact = wandb.Artifact(f"overlap-record-{re.sub(r'[^A-Za-z0-9_.-]', '_', run.id)}", type="overlap-record")
        artifact.add_file(str(path), name=path.name)
        self._try_artifact("the record", lambda: run.log_artifact(artifact))

    # -- the run

    def _find_run(self) -> Any:
        if self._run is not None and not (_is_finished(self._run) and self._given_run is None):
            return self._run
        run = self._given_run
        if run is None:
            run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None and self._start:
            run = self._start_run()
        if run is not self._run:
            self._take(run)
        return self._run

    def _take(self, run: Any) -> None:
        """Go on with another run, to which nothing has been said yet."""
        self._run = run
        self._defined, self._parallel, self._joined_step = set(), None, -1

    def _start_run(self) -> Any:
        try:
            import wandb
        except ImportError:
            raise ImportError(
                "wandb is not installed: pip install 'overlap-callbacks[wandb]', or leave WandbSink out"
            ) from None
        given = self._init.get("settings")
        of_settings = given.get("mode") if isinstance(given, Mapping) else _named(given).get("mode")
        mode = self._init.get("mode") or of_settings or wandb.setup().settings.mode
        # wandb.init would ask for a key on the terminal, and wait.
        if mode not in ("offline", "disabled", "dryrun") and not logged_in(wandb):
            raise RuntimeError(
                "nobody is logged in to W&B: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
            )
        self._owns_run = True
        settings = _bounded(wandb, self._init.get("settings"), self._timeout_s)
        try:
            return wandb.init(**{**self._init, "settings": settings})
        except wandb.errors.CommError as error:
            logger.warning("overlap-callbacks: W&B is not to be reached, so the run is logged offline: %s", error)
            return wandb.init(**{**self._init, "settings": settings, "mode": "offline"})


def _pictures(wandb: Any, report: OverlapReport, verdict: str) -> dict[str, Any]:
    """Pictures, without the style sheet of its own site that W&B would add to them."""
    found = {STEP_CARD: wandb.Html(cards.step_card(report, verdict, power_verdict(report)), inject=False)}
    if report.power_trace is not None and report.power_trace.time_ms:
        found[POWER_CARD] = wandb.Html(cards.power_card(report, report.power_trace), inject=False)
    return found


def _tables(wandb: Any, report: OverlapReport) -> dict[str, Any]:
    return {
        key: wandb.Table(columns=list(table.columns), data=table.rows, allow_mixed_types=True)
        for key, table in tables(report).items()
    }


def _bounded(wandb: Any, given: Any, timeout_s: float) -> Any:
    """The settings given, with an end to waiting for W&B, unless they name one themselves.

    wandb's own hook at the interpreter's exit keeps to it too.
    """
    bounds = {"init_timeout": timeout_s, "finish_timeout": timeout_s, "finish_timeout_raises": True}
    known = getattr(wandb.Settings, "model_fields", {})
    bounds = {name: value for name, value in bounds.items() if name in known}  # older ones do not have them all
    if given is None:
        return wandb.Settings(**bounds)
    if isinstance(given, Mapping):
        return {**bounds, **given}
    if isinstance(given, wandb.Settings):
        return given.model_copy(update={name: value for name, value in bounds.items() if name not in _named(given)})
    return given


def _named(settings: Any) -> dict[str, Any]:
    """What a ``wandb.Settings`` was told, without its defaults."""
    return {name: getattr(settings, name) for name in getattr(settings, "model_fields_set", ())}


def _is_finished(run: Any) -> bool:
    return bool(getattr(run, "_is_finished", False))


def logged_in(wandb: Any) -> bool:
    """Whether there is a key for W&B's server, without asking for one."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # older than the parameter
        return bool(wandb.setup().settings.api_key or wandb.api.api_key)
