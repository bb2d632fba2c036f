"""Reports in Weights & Biases."""

from __future__ import annotations

import contextlib
import functools
import glob
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from overlap_callbacks import _validation
from overlap_callbacks._log import logger
from overlap_callbacks.analysis.bottleneck import run_bottleneck
from overlap_callbacks.analysis.exposure import first_in_words
from overlap_callbacks.analysis.headline import cause_in_words, run_verdict
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.causal import CausalWindow
from overlap_callbacks.analysis.results.environment import JobEnvironment
from overlap_callbacks.analysis.results.figure import Value, values_of
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.run_summary import RunSummary, without_details
from overlap_callbacks.sinks.base import DETAILS, Sink, chosen, fit, fit_name
from overlap_callbacks.sinks.jsonl import earlier_starts
from overlap_callbacks.sinks.wandb import cards
from overlap_callbacks.sinks.wandb.alerts import Limits, finding_alerts
from overlap_callbacks.sinks.wandb.runs import destination, start_run
from overlap_callbacks.sinks.wandb.summaries import STEP_KEY, Summaries
from overlap_callbacks.sinks.wandb.tables import CausalTable, Table, arm_table, tables

VERDICT = "overlap/verdict"

# W&B sorts the panels of a section by name: the first one of all is the card.
STEP_CARD = "overlap/answer"
POWER_CARD = "power/trace_card"
TRAFFIC_CARD = "traffic/matrix"
ARMS_TABLE = "arm/arms"

# Sections whose tables and pictures are logged by default; ``arm`` exists only where the user has arms.
_SECTIONS = ("overlap", "power", "arm")
# Minimum time between two equal alerts. The sink sends one per crossing; W&B replaces 0 by its default of a minute.
_ALERT_WAIT_S = 0.001
# Each table is a file and an artifact. Each of the first windows has its tables. After that, tables are logged when the
# number of windows has grown by a factor, and for the last window: about thirty of each table in a thousand windows.
_ALL_TABLES_UP_TO = 10
_TABLES_GROWTH = 1.25


class _Row(NamedTuple):
    """What is logged of a window; with its report and the run so far if pictures and tables are due."""

    metrics: dict[str, float | str]
    pictured: tuple[OverlapReport, cards.SoFar] | None = None


class WandbSink(Summaries, Sink):
    """Logs to the user's W&B run if there is one, else to a run that it starts and finishes.

    - ``overlap/answer``, a card: the verdict, step time ideal, overlapped and sequential side by side, and headline
      figures, all with intervals, of the run so far and of the window.
    - At most 14 keys a window, against ``overlap/step``: ``overlap/verdict``, as text, and the figures of ``SHORT`` in
      ``overlap_callbacks.analysis.results.catalogue``. The run's summary has the same keys, of the run so far: of all
      starts, where a resumed job goes on in its record.
    - Tables: ``overlap/figures`` (all figures, with intervals), ``overlap/kernels``, ``overlap/pairs`` (what each
      kernel family loses during each kind of collective), ``power/trace``; ``power/trace_card``: power against time.
    - ``parts/<part>_ms``: the parts of steps, from stretch to stretch, means over the ranks.
    - ``overlap/causal``: what delaying collectives did. Of windows with other arms than sequential steps,
      ``arm/<name>_speedup``; at the end ``arm/arms``. In the summary, in words: ``Summaries``.
    - With ``detail="all"``, every metric of ``OverlapReport.metrics()`` and ``ArmReport.metrics()``, what bounds a
      step (``overlap/bound``, ``overlap/bottleneck``), ``power/verdict``, and tables of other sections.
    - In its configuration, under ``overlap_callbacks``: what was measured, where and how, and findings about it.
    - The JSONL record, as a file of the run and, at the end, as an artifact of the type ``overlap-record``.
    - An alert when a figure and its 95% interval pass a limit of ``alerts``, and again only after the figure has been
      back within; and one for each serious finding in the environment.

    If W&B stalls, training and the record go on. A run that W&B does not begin within ``timeout_s`` is logged offline.
    At the end, W&B has ``timeout_s`` to take the rest; ``wandb sync`` sends what is left in the run's folder.

    Args:
        run: the run to use. By default ``wandb.run`` at the time of the first report.
        start: start a run if there is none; if False, log nothing until there is one.
        alerts: limits by the figure's name, e.g. ``{"compute_slowdown": 0.2, "residual_overlap": 0.02}``; fractions as
            fractions, times in milliseconds. An alert comes when the whole interval of a figure is above its limit;
            of ``speedup_vs_sequential``, ``attained_fraction`` and ``hidden_comm_fraction``, when it is below.
        timeout_s: maximum time in seconds for W&B to start a run, and to take the rest at the end.
        detail: ``"short"`` or ``"all"``.
        init: arguments of ``wandb.init`` for a run started here, e.g. ``project``, ``entity``, ``name``.

    Raises:
        TypeError, ValueError: ``alerts``, ``timeout_s`` or ``detail`` is wrong.
        ImportError: (from ``log``) wandb is not installed.
        RuntimeError: (from ``log``) nobody is logged in to W&B, so no run can be started.
        TimeoutError: (from ``close``) W&B began no run, or did not take everything, in time.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        start: bool = True,
        alerts: Mapping[str, float] | None = None,
        timeout_s: float = 30.0,
        detail: str = "short",
        **init: Any,
    ) -> None:
        self._given_run = run
        self._start = start
        self._limits = Limits(alerts)
        # wandb has the same time limit for a run finished here, and then reports what was not sent.
        self.close_timeout_s: float = _validation.seconds("timeout_s", timeout_s)
        self._detail = _validation.one_of("detail", detail, allowed=DETAILS)
        self._init = {"project": "overlap-callbacks", **init}
        self._info: RunInfo | None = None
        self._record: Path | None = None
        self._closed = False
        self._run: Any = None
        self._owns_run = self._starting = False  # starting: W&B was asked for a run, and has not started it
        self._had_run = False
        self._warned_finished: Any = None  # the run that was finished early and whose user was warned
        self._defined: set[str] = set()
        self._aggregates: dict[str, str] = {}  # by key
        self._described: dict[str, Any] | None = None  # as in the run's configuration
        self._environment: JobEnvironment | None = None
        self._alerted: set[str] = set()  # rules of findings already reported
        self._rows: list[_Row] = []  # not yet logged
        self._joined_step = -1  # step of the user's row that the last row here joined
        self._windows: list[OverlapReport] = []  # without their details
        self._arms: list[ArmReport] = []
        self._causal = CausalTable()
        self._next_tables = 1  # number of windows at which tables are next due
        self._without_tables: OverlapReport | None = None  # the last report, if its tables were not due

    def use_record(self, path: Path) -> None:
        self._record = path

    def open(self, run: RunInfo) -> None:
        self._info = run
        if self._record is not None:
            with contextlib.suppress(OSError):  # the record's own sink has reported it
                earlier = earlier_starts(self._record)
                self._windows, self._arms, self._causal.windows = earlier.windows, earlier.arms, earlier.causal
                self._next_tables = len(self._windows) + 1

    def log(self, report: OverlapReport) -> None:
        run = self._find_run()
        if run is None:
            return
        self._windows.append(without_details(report))
        self._causal.note(report, self._info)
        self._describe(run, report)
        summary = RunSummary(self._info, self._windows, running=True)
        verdict = run_verdict(summary)
        texts = {VERDICT: verdict, **(_more_texts(summary, report, self._causal) if self._detail == "all" else {})}
        self._aggregates |= dict.fromkeys(texts, "none")
        row: dict[str, float | str] = {**texts, **self._numbers(report.values()), STEP_KEY: report.first_step}
        # A window that was cut off at once has nothing to show, and must not represent the run as its last.
        shows = bool(report.figures())
        due = shows and len(self._windows) >= self._next_tables
        if due:
            grown = len(self._windows) * (_TABLES_GROWTH if len(self._windows) >= _ALL_TABLES_UP_TO else 0)
            self._next_tables = max(len(self._windows) + 1, int(grown))
        if shows:
            self._without_tables = None if due else report
        self._rows.append(_Row(row, (report, cards.SoFar.of(summary))) if due else _Row(row))
        self._log_rows(run)

        run.summary.update({**texts, **run_metrics(summary, self._detail)})
        alerts = [(alert.title, alert.text) for alert in finding_alerts(report, self._alerted)]
        passed = self._limits.passed(report, summary.pooled())
        for title, text in (*alerts, *[(alert.title, f"{alert.text} {verdict}") for alert in passed]):
            run.alert(title=title, text=text, level="WARN", wait_duration=_ALERT_WAIT_S)

    def log_arm(self, report: ArmReport) -> None:
        if self._find_run() is not None:
            self._arms.append(report)
            self._add({**self._numbers(report.values()), STEP_KEY: report.first_step})

    def log_causal(self, window: CausalWindow) -> None:
        self._causal.windows.append(window)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._finish()

    def close_timeout_error(self) -> Exception:
        return self._timeout_error(self._run)

    def _timeout_error(self, run: Any) -> TimeoutError:
        if run is None and self._starting:
            return TimeoutError(
                f"W&B began no run within {self.close_timeout_s:g} s before the job ended, so it has no run of this "
                f"job: {self._where_the_rest_is()}"
            )
        folder = getattr(getattr(run, "settings", None), "sync_dir", None)
        where = f"wandb sync {folder}" if folder else "the record has everything"
        return TimeoutError(f"W&B did not take everything within {self.close_timeout_s:g} s: {where}")

    def _finish(self) -> None:
        run = self._run
        if run is not None and _is_finished(run):
            self._warn_finished(run)
        if run is None or _is_finished(run):
            if run is None and self._start and self._info is not None and not self._had_run:
                logger.warning("overlap-callbacks: no window ended before the job did, so no W&B run was begun [OC609]")
            return
        if (report := self._without_tables) is not None:
            so_far = cards.SoFar.of(RunSummary(self._info, self._windows, running=True))
            self._rows.append(_Row({STEP_KEY: report.first_step}, (report, so_far)))
        while self._rows:  # each pass takes one, whatever the run does with it
            run.log({})  # ends the current row, if any, so that the next row is the sink's own
            self._log_row(run)
        if self._arms or self._causal.windows:
            part = _last_tables(RunSummary(self._info, self._windows, running=True), self._arms, self._causal)
            self._try_artifact("the last tables", lambda: self._log_part(run, part))
            run.log({})
        self._log_record(run)
        if self._owns_run:
            try:
                run.finish()
            except TimeoutError:
                raise self._timeout_error(run) from None

    def _add(self, numbers: dict[str, float]) -> None:
        """A row without pictures."""
        run = self._find_run()
        if run is not None:
            self._rows.append(_Row({**numbers}))
            self._log_rows(run)

    def _numbers(self, values: Iterable[Value]) -> dict[str, float]:
        fitted = fit(chosen(values, self._detail))
        # The summary has the run's own value of a headline figure (``run_metrics``).
        self._aggregates |= {key: "none" if _is_of_run(value) else value.aggregates for key, value in fitted.items()}
        return {key: value.number for key, value in fitted.items()}

    def _log_rows(self, run: Any) -> None:
        """Log the waiting rows, without raising the step of a run that is the user's.

        Each joins the user's next row. As a row of its own it would raise the run's step, and W&B would drop what the
        user logs later with a smaller ``step=``.
        """
        if self._owns_run:
            while self._rows:
                self._log_row(run)
                run.log({})
        elif self._rows and run.step != self._joined_step:  # at most one row per row of the user's
            self._log_row(run)
            self._joined_step = run.step  # read again: the user may have begun another row meanwhile

    def _log_row(self, run: Any) -> None:
        row, wandb = self._rows.pop(0), sys.modules["wandb"]
        pictures = {} if row.pictured is None else _pictures(wandb, *row.pictured)
        self._log_part(run, {**_detailed(pictures, self._detail), **row.metrics})
        # Separately: for an online run's table, W&B asks its server, waits, and may raise. With the step again: the
        # user may have begun another row by then.
        if row.pictured is not None:
            report, so_far = row.pictured
            content = _detailed(tables(report, so_far.figures), self._detail) | self._causal.content(so_far.late_rank)
            part = {**_tables(wandb, content), STEP_KEY: row.metrics[STEP_KEY]}
            self._try_artifact("the tables of a window", lambda: self._log_part(run, part))

    def _log_part(self, run: Any, part: Mapping[str, Any]) -> None:
        """Add to the current row."""
        self._define(run, part)
        run.log(part, commit=False)

    def _try_artifact(self, what: str, log: Callable[[], None]) -> None:
        try:
            log()
        except Exception as error:
            self._next_tables = 2 * len(self._windows) + 1  # it may have taken long: do not retry at every window
            logger.warning("overlap-callbacks: W&B did not take %s; the record has them: %s [OC610]", what, error)

    def _define(self, run: Any, row: Mapping[str, Any]) -> None:
        if not self._defined:
            run.define_metric(STEP_KEY, hidden=True)
            self._defined.add(STEP_KEY)
        for key in [key for key in row if key not in self._defined]:
            # For pictures and tables, the summary has the last value.
            run.define_metric(key, step_metric=STEP_KEY, summary=self._aggregates.get(key))
            self._defined.add(key)

    def _describe(self, run: Any, report: OverlapReport) -> None:
        """Put what was measured, where and how into the run's configuration."""
        self._environment = report.environment or self._environment
        described: dict[str, Any] = {
            "group_sizes": _group_sizes(report),
            "findings": {finding.rule: finding.message for finding in report.findings},
            **job_content(self._environment),
        }
        if described == self._described:
            return
        self._described = described
        content: dict[str, Any] = {} if self._info is None else msgspec.to_builtins(self._info)
        for name in ("units", "meanings"):  # long, and in the record
            content.pop(name, None)
        run.config.update({"overlap_callbacks": {**content, **described}}, allow_val_change=True)

    def _log_record(self, run: Any) -> None:
        path = self._record
        if path is None or not path.is_file():
            return
        wandb = sys.modules["wandb"]
        # A resumed run has the same id, so its record becomes a further version of the same artifact.
        artifact = wandb.Artifact(f"overlap-record-{re.sub(r'[^A-Za-z0-9_.-]', '_', run.id)}", type="overlap-record")
        artifact.add_file(str(path), name=path.name)
        self._try_artifact("the record", lambda: run.log_artifact(artifact))

    def destination(self) -> str:
        return destination(self._given_run, starts=self._start)

    # -- the run

    def _find_run(self) -> Any:
        if self._run is not None and _is_finished(self._run):
            self._warn_finished(self._run)
            if self._given_run is not None:
                return None
        elif self._run is not None:
            return self._run
        run = self._given_run
        if run is None:
            run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None and self._start and not self._had_run:
            self._starting = self._owns_run = True
            hidden = self._info is not None and not self._info.hosts_named
            run = start_run(self._init, self.close_timeout_s, hide_host=hidden)
            self._starting = False
        if run is not self._run:
            self._take(run)
        return self._run

    def _take(self, run: Any) -> None:
        """Switch to another run, in which nothing is defined yet."""
        self._run = run
        self._defined, self._described, self._joined_step = set(), None, -1
        if run is None:
            return
        self._had_run = True
        if self._record is not None and self._record.is_file():
            # W&B takes the file when the run finishes, even before this sink is closed, or by a crash.
            self._try_artifact("the record as a file of the run", functools.partial(_save, run, self._record.resolve()))

    def _warn_finished(self, run: Any) -> None:
        if run is not self._warned_finished:
            self._warned_finished = run
            logger.warning(
                "overlap-callbacks: the W&B run was finished before measuring ended. It has the windows and the record "
                "up to then: %s [OC608]",
                self._where_the_rest_is(),
            )

    def _where_the_rest_is(self) -> str:
        return "there is no record" if self._record is None else f"the record, {self._record}, has everything"


def _save(run: Any, record: Path) -> None:
    run.save(glob.escape(str(record)), base_path=str(record.parent), policy="end")


def _detailed(content: Mapping[str, Any], detail: str) -> dict[str, Any]:
    """The tables or pictures among these that are logged."""
    return {key: one for key, one in content.items() if detail == "all" or key.partition("/")[0] in _SECTIONS}


def _pictures(wandb: Any, report: OverlapReport, so_far: cards.SoFar) -> dict[str, Any]:
    """The cards of a window; ``inject=False`` keeps W&B's own style sheet out of them."""
    pictures = {STEP_CARD: wandb.Html(cards.step_card(report, so_far), inject=False)}
    if report.power_trace is not None and report.power_trace.time_ms and not report.control:
        pictures[POWER_CARD] = wandb.Html(cards.power_card(report, report.power_trace), inject=False)
    if report.messages is not None and report.messages.groups:
        pictures[TRAFFIC_CARD] = wandb.Html(cards.traffic_card(report.messages, report.world_size), inject=False)
    return pictures


def _last_tables(summary: RunSummary, arms: Sequence[ArmReport], causal: CausalTable) -> dict[str, Any]:
    """Of the whole run, with the step of its last window."""
    late_rank = cards.SoFar.of(summary).late_rank
    last = {**({ARMS_TABLE: arm_table(summary, arms)} if arms else {}), **causal.content(late_rank)}
    step = max([report.first_step for report in arms] + [window.first_step for window in causal.windows])
    return {**_tables(sys.modules["wandb"], last), STEP_KEY: step}


def _tables(wandb: Any, by_key: Mapping[str, Table]) -> dict[str, Any]:
    return {
        key: wandb.Table(columns=list(table.columns), data=table.rows, allow_mixed_types=True)
        for key, table in by_key.items()
    }


def _is_finished(run: Any) -> bool:
    return bool(getattr(run, "_is_finished", False))


def _more_texts(summary: RunSummary, report: OverlapReport, causal: CausalTable) -> dict[str, str]:
    """What bounds the run's steps, with the evidence, and the window's, in a word; what causes the slowdown."""
    bottleneck, exposure, first = run_bottleneck(summary), causal.exposure, ""
    if bottleneck is not None and exposure is not None:
        first = first_in_words(exposure, bottleneck.late_rank(exposure))
    texts = {
        "overlap/bottleneck": "" if bottleneck is None else bottleneck.sentence() + first,
        "overlap/bound": report.bound,
        "power/verdict": cause_in_words(report.power_verdict) or "",
    }
    return {key: text for key, text in texts.items() if text}


def _group_sizes(report: OverlapReport) -> dict[str, int]:
    """The ranks in the largest group of each dimension."""
    sizes: dict[str, int] = {}
    for row in report.collectives:
        name = fit_name(row.dimension or "other")
        sizes[name] = max(row.group_size, sizes.get(name, 0))
    return sizes


def job_content(environment: JobEnvironment | None) -> dict[str, Any]:
    """Hosts, devices, transports and differences between ranks; empty if not known.

    Rank 0's environment is already in the configuration, with the other facts of the run.
    """
    if environment is None:
        return {}
    return {
        "job": {
            "hosts": environment.num_hosts,
            "devices": environment.num_devices,
            "transport": {transport.between: transport.transport for transport in environment.transports},
            "differs_between_ranks": [difference.name for difference in environment.differing],
        }
    }


def _is_of_run(value: Value) -> bool:
    return value.figure in FIGURES and not value.bound.startswith("rank")


def run_metrics(summary: RunSummary, detail: str) -> dict[str, float]:
    """Headline figures of the run so far, with intervals at all looks, under the keys of a window's.

    W&B's bar charts and sweeps need one plain number per run.
    """
    pooled = summary.pooled()
    values = [value for figure in FIGURES for value in values_of(figure, pooled.get(figure.name))]
    return {value.key: value.number for value in chosen(values, detail)}
