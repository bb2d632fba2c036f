"""Trains what is left of a study, one configuration after the other, within its time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from overlap_callbacks.analysis.results.study import Configuration, StudyRow
from overlap_callbacks.experiments.capping import NotPossibleError
from overlap_callbacks.experiments.lines_file import LinesFile
from overlap_callbacks.experiments.study.machine import Machine
from overlap_callbacks.experiments.study.models import Model, Transformer, scaled
from overlap_callbacks.experiments.study.one_job import refusal_of, run_job
from overlap_callbacks.experiments.study.results import Results
from overlap_callbacks.experiments.supervisor import Limits

# Of the time for all, what ending the last job and making the page may take.
_CLOSING_S = 20.0
_LEAST_WORK_SHARE = 0.5


@dataclass(frozen=True)
class Progress:
    """Where a study stands.

    Attributes:
        num_done: configurations that are done, those of an earlier start included.
        num_planned: configurations in all.
        current: that trains now; None between two.
        left_s: expected time for those that are left; None before the first was measured.
        last: the row that was written last; None before it.
    """

    num_done: int
    num_planned: int
    current: Configuration | None
    left_s: float | None
    last: StudyRow | None = None


@dataclass
class Runner:
    """Trains the configurations of a study.

    Attributes:
        results: so far; each row is added as its job ends.
        file: gets each row too.
        machine: this one.
        timeout_s: maximum time of a job.
        total_s: maximum time of all, from ``run`` on; infinite for no limit.
        retry: whether what failed before is tried again.
        around_job: what a configuration needs around its job, e.g. a power cap of the devices; raises a
            ``NotPossibleError`` where that cannot be, and a ``CannotGoOnError`` where it cannot be put back.
        on_progress: called whenever something has changed.
    """

    results: Results
    file: LinesFile
    machine: Machine
    timeout_s: float
    total_s: float = math.inf
    retry: bool = False
    around_job: Callable[[Configuration], AbstractContextManager[object]] = lambda _: nullcontext()
    on_progress: Callable[[Progress], None] = lambda _: None

    def run(self) -> bool:
        """Train what is left. Returns False if the time was over first.

        Raises:
            OSError: results cannot be written.
            KeyboardInterrupt: Ctrl-C. All rows so far are kept.
            CannotGoOnError: what stood around a job cannot be put back. The job's row is kept too.
        """
        deadline_s = time.monotonic() + self.total_s - _CLOSING_S
        last = None
        planned = [*self.results.left, *(self.results.failed if self.retry else [])]
        for place, configuration in enumerate(planned):
            left_s = deadline_s - time.monotonic()
            expected_s = self._expected_s(configuration)
            # The first job says how long others take, so it is started whatever the time.
            if expected_s is not None and expected_s > left_s:
                return False
            self.on_progress(self._progress(planned[place:], configuration, last))
            last = self._row(configuration, Limits(self.timeout_s, max(1.0, left_s)))
            if last is None:
                return False
            self.on_progress(self._progress(planned[place + 1 :], None, last))
        return True

    def _row(self, configuration: Configuration, limits: Limits) -> StudyRow | None:
        """The row, once it is on the disk; None if the time was over."""
        start = self.results.start
        refused = refusal_of(start, configuration, self.machine)
        if refused is not None:
            return self._kept(refused)
        try:
            with self.around_job(configuration):
                number = start.configurations.index(configuration)
                row = run_job(start, self.results.folder, number, limits)
                return None if row is None else self._kept(row)
        except NotPossibleError as error:
            model = scaled(configuration.model, start.scale)
            failed = StudyRow(configuration=configuration, seconds=0.0, failure=str(error), model=model.sizes())
            return self._kept(failed)

    def _kept(self, row: StudyRow) -> StudyRow:
        self.file.write(row)
        self.results.rows.append(row)
        return row

    def _expected_s(self, configuration: Configuration) -> float | None:
        """Time that a job will take at most, by those that were measured; None before there is one."""
        measured = [row for row in self.results.rows if row.figures is not None]
        if not measured:
            return None
        alike = [row for row in measured if row.configuration.strategy == configuration.strategy] or measured
        work = self._work(configuration)
        return max([row.seconds * _growth(work / self._work(row.configuration)) for row in alike])

    def _work(self, configuration: Configuration) -> float:
        """What a step computes, for comparison: numbers of the model's input times its blocks and its width."""
        return configuration.batch * _work(scaled(configuration.model, self.results.start.scale))

    def _progress(self, left: list[Configuration], current: Configuration | None, last: StudyRow | None) -> Progress:
        expected = [self._expected_s(configuration) for configuration in left]
        known = [value for value in expected if value is not None]
        left_s = sum(known) if len(known) == len(expected) and known else None
        num_planned = len(self.results.start.configurations)
        return Progress(num_planned - len(left), num_planned, current, left_s, last)


def _growth(work: float) -> float:
    """How many times as long a job takes that has so many times the work of another.

    Half of a measured job's time is taken to be work. Of small jobs it is less: they mostly start their ranks. Of large
    ones it is more, and one that runs out of the time of the study is ended.
    """
    return 1 + _LEAST_WORK_SHARE * max(0.0, work - 1)


def _work(model: Model) -> float:
    if isinstance(model, Transformer):
        return float(model.shape.sequence * model.shape.layers * model.shape.layer_weights)
    return float(model.image**2 * model.num_blocks * model.channels**2)
