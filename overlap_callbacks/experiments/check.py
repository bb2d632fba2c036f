"""``overlap check``: limits on the figures of a run, and whether the run keeps to them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.catalogue import FIGURES, STEP_TIMES, figure_named
from overlap_callbacks.analysis.results.env_overrides import RUN_DIR
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.step_parts import exposed_share
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.analysis.statistics import Pooling
from overlap_callbacks.experiments.supervisor import Ending, GrowingRecord, exit_in_words, interruptible, supervise

# A quantity that is no headline figure: exposed communication over the step, both under the profiler.
EXPOSED_SHARE = "exposed_share"


class State(Enum):
    """Whether a limit holds."""

    HOLDS = "holds"
    BROKEN = "is broken"
    NOT_MEASURED = "cannot be judged"


@dataclass(frozen=True)
class Limit:
    """A limit on one figure.

    Attributes:
        option: as the user gave it, e.g. ``--max-exposed``.
        figure: of the catalogue, or ``EXPOSED_SHARE``.
        is_maximum: whether the figure may not be above; else it may not be below.
        bound: the limit itself.
    """

    option: str
    figure: str
    is_maximum: bool
    bound: float

    @property
    def unit(self) -> str:
        """``ms`` or ``fraction``."""
        return "fraction" if self.figure == EXPOSED_SHARE else figure_named(self.figure).unit

    @property
    def name(self) -> str:
        """What to call the figure in a sentence."""
        if self.figure == EXPOSED_SHARE:
            return "exposed communication, as a share of a profiled step,"
        figure = figure_named(self.figure)
        return f"the {figure.short} step" if figure in STEP_TIMES else figure.short

    @property
    def as_option(self) -> str:
        """As one types it."""
        value = f"{self.bound:g}"
        return f"{self.option} {f'{self.figure}={value}' if self.option in ('--max', '--min') else value}"

    def is_beyond(self, value: float) -> bool:
        """Whether a value breaks the limit."""
        return value > self.bound if self.is_maximum else value < self.bound


@dataclass(frozen=True)
class Finding:
    """A limit, whether it holds, and the figure over the windows that count; None if it was not measured."""

    limit: Limit
    state: State
    measured: Estimate | None

    def sentence(self) -> str:
        """E.g. ``exposed communication is 23.1% of a profiled step (95% interval ...), and 10.0% is allowed``."""
        limit = self.limit
        bound = PLAIN.quantity(limit.bound, limit.unit)
        side = "at most" if limit.is_maximum else "at least"
        if self.measured is None:
            return f"{limit.name} was not measured ({limit.option} {limit.bound:g})"
        return f"{limit.name} is {PLAIN.with_interval(self.measured, limit.unit)}, and {side} {bound} is allowed"


def limit_names() -> list[str]:
    """The figures that ``--max`` and ``--min`` take."""
    return [figure.name for figure in FIGURES]


def parsed_limit(option: str, text: str) -> Limit:
    """A limit from ``NAME=VALUE`` of ``--max`` or ``--min``.

    Raises:
        ValueError: it is not of that form, or there is no such figure.
    """
    name, equals, value = text.partition("=")
    try:
        bound = float(value)
    except ValueError:
        bound = math.nan
    if not equals or math.isnan(bound):
        raise ValueError(f"{option} {text}: the form is NAME=NUMBER, e.g. {option} compute_slowdown=0.2")
    if name not in limit_names():
        raise ValueError(f"{option} {text}: there is no figure {name}; there are {', '.join(limit_names())}")
    return Limit(option, name, option == "--max", bound)


def judge(
    summary: RunSummary, limits: Sequence[Limit], *, sure: bool = False, pooling: Pooling | None = None
) -> list[Finding]:
    """Judge a run by limits. A figure is its mean over the windows that count. One that was not measured is no pass.

    Args:
        summary: of the run.
        limits: one or more.
        sure: count a limit as broken only if the whole interval lies beyond it. Without an interval the figure alone
            decides.
        pooling: whether intervals hold at one look or at all; None for all looks while the job runs.
    """
    pooled = summary.pooled(pooling)
    exposed = exposed_share(pooled)
    if exposed is not None:
        pooled[EXPOSED_SHARE] = exposed
    return [_finding(limit, pooled.get(limit.figure), sure) for limit in limits]


def _finding(limit: Limit, measured: Estimate | None, sure: bool) -> Finding:
    if measured is None:
        return Finding(limit, State.NOT_MEASURED, None)
    nearest = measured.ci_low if limit.is_maximum else measured.ci_high
    deciding = nearest if sure and nearest is not None else measured.value
    return Finding(limit, State.BROKEN if limit.is_beyond(deciding) else State.HOLDS, measured)


# -- a job that is run for its record


_STDERR = 2


def run_for_windows(command: Sequence[str], folder: Path, windows: int | None, timeout_s: float) -> str:
    """Run a command until it ends, or its record in ``folder`` has enough windows. Its output goes to our stderr.

    Args:
        command: program and arguments.
        folder: gets the record.
        windows: that must count before the command is ended; None to let it end by itself.
        timeout_s: maximum time.

    Returns:
        Why it failed; empty if it did not, or at a Ctrl-C, once the command has ended, a KeyboardInterrupt.
    """
    growing = GrowingRecord(folder, details=False)

    def is_done() -> bool:
        record = None if windows is None else growing.read()
        return record is not None and len(record.valid_windows) >= (windows or 0)

    try:
        with interruptible():
            outcome = supervise(
                command,
                environment={**os.environ, RUN_DIR: str(folder)},
                is_done=is_done,
                timeout_s=timeout_s,
                stdout=_STDERR,  # stdout is the verdict's
            )
    except OSError as error:
        return f"the command cannot be started: {error.strerror}"
    if outcome.ending is Ending.TIMEOUT:
        return f"the command took longer than {timeout_s:g} s (--timeout)"
    # Once it has had the windows asked for, how it ends is its own affair.
    if outcome.ending is Ending.BY_ITSELF and outcome.exit_code:
        return f"the command failed ({exit_in_words(outcome.exit_code)})"
    return ""
