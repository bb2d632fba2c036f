"""A running study: its rows so far, how long a job will take, and how a job is started, supervised and read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.catalogue import FIGURES, THROUGHPUT
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME as RECORD
from overlap_callbacks.analysis.statistics import ONE_LOOK, pool
from overlap_callbacks.analysis.study import FILE_NAME, SCHEMA, STEP, Configuration, StudyFigures, StudyRow, StudyStart
from overlap_callbacks.experiments.capping import Cap, NotPossibleError, capped_part, caps_of
from overlap_callbacks.experiments.machine import Machine
from overlap_callbacks.experiments.study.models import (
    SPEC_NAME,
    TRAINED_NAME,
    WINDOW_STEPS,
    JobSpec,
    Model,
    Trained,
    Transformer,
    scaled,
)
from overlap_callbacks.experiments.study.plan import GLOO, why_not
from overlap_callbacks.experiments.study.verdict import Names
from overlap_callbacks.experiments.supervisor import (
    Ending,
    Limits,
    Outcome,
    exit_in_words,
    fresh_folder,
    last_words,
    rank_variables,
    run_kept,
)
from overlap_callbacks.experiments.sweep import Point, Sweep
from overlap_callbacks.instruments.caps.capped import capped
from overlap_callbacks.report.record import Record, RecordError, read

_WORKER = "overlap_callbacks.experiments.study.job.worker"
_LEAST_WORK_SHARE = 0.5


@dataclass
class Study(Sweep[StudyStart, StudyRow]):
    """A study. Its settings are configurations, each trained once."""

    COMMAND, FILE_NAME, SCHEMA, START, LINE = "study", FILE_NAME, SCHEMA, StudyStart, StudyRow

    @property
    def settings(self) -> tuple[Configuration, ...]:
        return self.start.configurations

    def point_of(self, line: StudyRow) -> Point:
        return Point(line.configuration)

    def failure_of(self, line: StudyRow) -> str:
        return "" if line.failure is None else line.failure or "no reason"

    def name(self, setting: Configuration) -> str:
        return Names(self.settings).whole(setting)

    def outcome(self, line: StudyRow) -> str:
        name = self.name(line.configuration)
        if line.figures is None:
            return f"{name} failed: {line.failure}"
        step = line.figures.values.get(STEP)
        figure = "measured" if step is None else f"{PLAIN.quantity(step.value, 'ms')} a step"
        return f"{name}: {figure} (the job took {line.seconds:.0f} s)"

    def expected_s(self, setting: Configuration) -> float | None:
        """Maximum time that a job should take, judging by those measured."""
        measured = [row for row in self.lines if row.figures is not None]
        of_kind = [row for row in measured if row.configuration.strategy == setting.strategy] or measured
        work = self._work(setting)
        return max([row.seconds * _growth(work / self._work(row.configuration)) for row in of_kind], default=None)

    def _work(self, configuration: Configuration) -> float:
        """The relative amount of compute: the model's input size times its blocks and its width."""
        return configuration.batch * _work(scaled(configuration.model, self.start.scale))

    def trainer(self, machine: Machine, cap: Cap = capped) -> Callable[[Point, Limits, ExitStack], StudyRow | None]:
        """A function that trains a configuration on this machine, under power and clock caps set by ``cap``."""

        def train(point: Point, limits: Limits, stack: ExitStack) -> StudyRow | None:
            one: Configuration = point.setting
            model = scaled(one.model, self.start.scale)
            failure = why_not(one, model, self.start.ranks, self.start.link, machine)
            try:
                if not failure:
                    stack.enter_context(capped_part(caps_of(one), cap))
            except NotPossibleError as error:
                failure = str(error)
            if failure:
                return StudyRow(configuration=one, seconds=0.0, failure=failure, model=model.sizes())
            return run_job(self, one, limits)

        return train


def _growth(work: float) -> float:
    """How many times as long a job takes as another, if its work is ``work`` times as large.

    Assumes that half of a measured job's time is work. In small jobs it is less: they mostly start their ranks. In
    large ones it is more, and a job that exceeds the time of the study is ended.
    """
    return 1 + _LEAST_WORK_SHARE * max(0.0, work - 1)


def _work(model: Model) -> float:
    if isinstance(model, Transformer):
        return float(model.shape.sequence * model.shape.layers * model.shape.layer_weights)
    return float(model.image**2 * model.num_blocks * model.channels**2)


# -- one job


def run_job(study: Study, configuration: Configuration, limits: Limits) -> StudyRow | None:
    """Train a configuration once; None if the study's time ran out first.

    Raises an OSError if a file of the job cannot be written, and a KeyboardInterrupt once the job has ended.
    """
    began_s = time.monotonic()
    start = study.start
    own = fresh_folder(study.folder, _folder_name(start.configurations.index(configuration), configuration))
    spec = JobSpec(
        configuration=configuration,
        model=scaled(configuration.model, start.scale),
        ranks=start.ranks,
        link=start.link,
        threads=int(start.options["threads"]),
        windows=-(-start.steps // WINDOW_STEPS),
        scale=start.scale,
        timeout_s=limits.timeout_s,
        folder=str(own),
    )
    (own / SPEC_NAME).write_bytes(msgspec.json.encode(spec))
    command = [sys.executable, "-m", _WORKER, str(own)]
    outcome = run_kept(command, own, limits, environment=_environment(spec), ranks=rank_variables(start.ranks))
    if outcome is None:
        return None
    record, trained = _record(own), _trained(own)
    failure = _failure(outcome, own, record, limits.timeout_s)
    return StudyRow(
        configuration=configuration,
        seconds=time.monotonic() - began_s,
        figures=None if failure or record is None else figures_of(record),
        failure=failure or None,
        record=None if record is None else str((own / RECORD).relative_to(study.folder.resolve())),
        model=spec.model.sizes() | ({} if trained is None else {"parameters": trained.parameters}),
    )


def _folder_name(number: int, one: Configuration) -> str:
    parts = [f"{number:03d}", one.model, one.strategy, f"b{one.batch}", one.precision]
    parts += [] if one.power_cap_w is None else [f"{one.power_cap_w:g}W"]
    parts += [] if one.clock_cap_mhz is None else [f"{one.clock_cap_mhz:g}MHz"]
    return "-".join(parts)


def _environment(spec: JobSpec) -> dict[str, str]:
    variables = {
        "OMP_NUM_THREADS": str(spec.threads),
        # The ranks' output is searched for the reason of a failure, so keep unrelated messages out.
        "KINETO_LOG_LEVEL": "99",
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore::FutureWarning"),
    }
    return variables | ({"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if spec.link == GLOO else {})


def _record(own: Path) -> Record | None:
    try:
        return read(own)
    except RecordError:
        return None


def _trained(own: Path) -> Trained | None:
    try:
        return msgspec.json.decode((own / TRAINED_NAME).read_bytes(), type=Trained)
    except (OSError, msgspec.DecodeError):
        return None


def _failure(outcome: Outcome, own: Path, record: Record | None, timeout_s: float) -> str:
    """Why a job gave no figures; empty if it did."""
    if outcome.ending is Ending.TIMEOUT:
        return f"it was not measured within {timeout_s:g} s (--timeout)" + last_words(own)
    if outcome.exit_code:
        return exit_in_words(outcome.exit_code) + last_words(own)
    if record is None or not record.summary.measured:
        return "it trained, and the library measured nothing" + last_words(own)
    if not record.valid_windows:
        problems = [problem for window in record.windows for problem in window.problems]
        return "no window of it counts" + (f": {problems[0]}" if problems else "")
    return ""


def figures_of(record: Record) -> StudyFigures | None:
    """The means over the windows that count; None if none does."""
    windows = record.valid_windows
    if not windows:
        return None
    pooled = record.summary.pooled(ONE_LOOK)  # a study's job has a fixed length
    values = {figure.key: pooled[figure.name] for figure in FIGURES if figure.name in pooled}
    return StudyFigures(
        values={**values, **_metrics(windows)},
        num_windows=len(windows),
        num_steps=sum([_counted_steps(record.whole(window)) for window in windows]),
    )


def _metrics(windows: Sequence[OverlapReport]) -> dict[str, Estimate]:
    """Values without an interval in a window; over several windows they have one."""
    found: dict[str, list[Estimate]] = {}
    for window in windows:
        for value in window.values():
            if value.figure.section in ("power", "gpu") or value.figure in THROUGHPUT:
                found.setdefault(value.key, []).append(Estimate(value.number, None, None, window.num_steps, 1))
    pooled = {key: pool(values) for key, values in found.items()}
    return {key: estimate for key, estimate in pooled.items() if estimate is not None}


def _counted_steps(window: OverlapReport) -> int:
    """Timed steps of one mode."""
    blocks = window.samples[0].timed if window.samples else ()
    return sum([len(block.step_ms) for block in blocks if block.mode is Mode.OVERLAPPED])
