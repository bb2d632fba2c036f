"""One training job: started, supervised and read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.analysis.results.study import Configuration, StudyFigures, StudyRow, StudyStart
from overlap_callbacks.analysis.statistics import ONE_LOOK, pool
from overlap_callbacks.experiments.study.job_spec import SPEC_NAME, TRAINED_NAME, WINDOW_STEPS, JobSpec, Trained
from overlap_callbacks.experiments.study.machine import Machine
from overlap_callbacks.experiments.study.models import scaled
from overlap_callbacks.experiments.study.refusals import GLOO, why_not
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
from overlap_callbacks.report.record import Record, RecordError, read

_WORKER = "overlap_callbacks.experiments.study.job.worker"


def refusal_of(start: StudyStart, configuration: Configuration, machine: Machine) -> StudyRow | None:
    """The row of a configuration that this machine cannot train; None where it may be able to."""
    model = scaled(configuration.model, start.scale)
    failure = why_not(configuration, model, start.ranks, start.link, machine)
    if not failure:
        return None
    return StudyRow(configuration=configuration, seconds=0.0, failure=failure, model=model.sizes())


def run_job(start: StudyStart, folder: Path, number: int, limits: Limits) -> StudyRow | None:
    """Train a configuration once.

    Args:
        start: of the study.
        folder: of its results.
        number: of the configuration, by its place in ``start``.
        limits: of time.

    Returns:
        None where the time of the study was over first.

    Raises:
        OSError: a file of the job cannot be written.
        KeyboardInterrupt: Ctrl-C. The job has ended.
    """
    began_s = time.monotonic()
    configuration = start.configurations[number]
    own = fresh_folder(folder, name_of(number, configuration))
    spec = _spec(start, configuration, own, limits.timeout_s)
    (own / SPEC_NAME).write_bytes(msgspec.json.encode(spec))
    command = [sys.executable, "-m", _WORKER, str(own)]
    outcome = run_kept(command, own, limits, environment=_environment(spec), ranks=rank_variables(start.ranks))
    if outcome is None:
        return None
    record = _record(own)
    failure = _failure(outcome, own, record, limits.timeout_s)
    trained = _trained(own)
    sizes = spec.model.sizes() | ({} if trained is None else {"parameters": trained.parameters})
    return StudyRow(
        configuration=configuration,
        seconds=time.monotonic() - began_s,
        figures=None if failure or record is None else figures_of(record),
        failure=failure or None,
        record=None if record is None else str((own / FILE_NAME).relative_to(folder.resolve())),
        model=sizes,
    )


def name_of(number: int, configuration: Configuration) -> str:
    """Name of a job's folder."""
    words = [configuration.model, configuration.strategy, f"b{configuration.batch}", configuration.precision]
    if configuration.power_cap_w is not None:
        words.append(f"{configuration.power_cap_w:g}W")
    if configuration.clock_cap_mhz is not None:
        words.append(f"{configuration.clock_cap_mhz:g}MHz")
    return f"{number:03d}-{'-'.join(words)}"


def _spec(start: StudyStart, configuration: Configuration, own: Path, timeout_s: float) -> JobSpec:
    return JobSpec(
        configuration=configuration,
        model=scaled(configuration.model, start.scale),
        ranks=start.ranks,
        link=start.link,
        threads=int(start.options["threads"]),
        windows=-(-start.steps // WINDOW_STEPS),
        scale=start.scale,
        timeout_s=timeout_s,
        folder=str(own),
    )


def _environment(spec: JobSpec) -> dict[str, str]:
    variables = {
        "OMP_NUM_THREADS": str(spec.threads),
        # What the ranks say is looked through for the reason of a failure: without what is not about it.
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
    """Why a job gave no figures, in a line; empty if it did."""
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


# -- figures of a job


# Of a report's metrics, the sections that a study has beside the figures of the catalogue.
_SECTIONS = ("power", "device", "memory", "throughput")


def figures_of(record: Record) -> StudyFigures | None:
    """The means over the windows that count; None where none does."""
    windows = record.valid_windows
    if not windows:
        return None
    pooled = record.summary.pooled(ONE_LOOK)  # a job of a study has a fixed length
    values = {figure.key: pooled[figure.name] for figure in FIGURES if figure.name in pooled}
    return StudyFigures(
        values={**values, **_metrics(windows)},
        num_windows=len(windows),
        num_steps=sum([_counted_steps(record.whole(window)) for window in windows]),
    )


def _metrics(windows: Sequence[OverlapReport]) -> dict[str, Estimate]:
    """What a window gives without an interval; over several windows it has one."""
    found: dict[str, list[Estimate]] = {}
    for window in windows:
        for value in window.values():
            if value.figure.section in _SECTIONS:
                found.setdefault(value.key, []).append(Estimate(value.number, None, None, window.num_steps, 1))
    pooled = {key: pool(values) for key, values in found.items()}
    return {key: estimate for key, estimate in pooled.items() if estimate is not None}


def _counted_steps(window: OverlapReport) -> int:
    """Timed steps of a mode."""
    blocks = window.samples[0].timed if window.samples else ()
    return sum([len(block.step_ms) for block in blocks if block.mode is Mode.OVERLAPPED])
