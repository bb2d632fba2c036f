"""``overlap check``: limits on a run's figures, whether it keeps them, and which communication is exposed."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from overlap_callbacks.analysis.formatting import PLAIN, bytes_in_words, count
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.results.catalogue import FIGURES, STEP_TIMES, figure_named
from overlap_callbacks.analysis.results.env_overrides import RUN_DIR
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.step_parts import exposed_share
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.analysis.statistics import Pooling
from overlap_callbacks.experiments.supervisor import Ending, GrowingRecord, exit_in_words, interruptible, supervise
from overlap_callbacks.report.record import Record

# Not a headline figure: exposed communication over the step, both under the profiler.
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
        is_maximum: whether it is an upper limit; otherwise a lower one.
        bound: the limit's value.
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
        """The figure's name in a sentence."""
        if self.figure == EXPOSED_SHARE:
            return "exposed communication, as a share of a profiled step,"
        figure = figure_named(self.figure)
        return f"the {figure.short} step" if figure in STEP_TIMES else figure.short

    @property
    def as_option(self) -> str:
        """The limit as typed on the command line."""
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
    """The figures accepted by ``--max`` and ``--min``."""
    return [figure.name for figure in FIGURES]


def parsed_limit(option: str, text: str) -> Limit:
    """The limit given by ``NAME=VALUE`` of ``--max`` or ``--min``.

    Raises:
        ValueError: it has another form, or there is no such figure.
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
    """Judge a run by limits. A figure is its mean over the windows that count. An unmeasured figure is not a pass.

    Args:
        summary: of the run.
        limits: one or more.
        sure: count a limit as broken only if the whole interval lies beyond it. Without an interval the figure itself
            decides.
        pooling: whether intervals are valid at one look or at all looks; None: at all looks while the job runs.
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


# -- running a job for its record


_STDERR = 2


def run_for_windows(command: Sequence[str], folder: Path, windows: int | None, timeout_s: float) -> str:
    """Run a command until it ends, or its record in ``folder`` has enough windows. Its output goes to our stderr.

    Args:
        command: program and arguments.
        folder: for the record.
        windows: windows that must count before the command is ended; None to let it finish.
        timeout_s: maximum time.

    Returns:
        Why it failed; empty if it did not.

    Raises:
        KeyboardInterrupt: Ctrl-C, once the command has ended.
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
                stdout=_STDERR,  # stdout is for the verdict
            )
    except OSError as error:
        return f"the command cannot be started: {error.strerror}"
    if outcome.ending is Ending.TIMEOUT:
        return f"the command took longer than {timeout_s:g} s (--timeout)"
    # Once it has measured enough windows, its exit code does not matter.
    if outcome.ending is Ending.BY_ITSELF and outcome.exit_code:
        return f"the command failed ({exit_in_words(outcome.exit_code)})"
    return ""


# -- exposed communication. A record has the exposed time of each dimension of parallelism, a mean over ranks and steps,
# and the collectives that a dimension issues in a step. A collective is named as the cause if it is the only kind in
# its dimension. For one profiled step of the lowest rank the record has each collective: its position among those of
# its name identifies the bucket or the layer.

_LATEST_MS = 1e12
# Maximum collectives of one dimension named in a line, and maximum lines for collectives of one step.
_MAX_NAMED = 3


def exposed_lines(record: Record) -> list[str]:
    """Which communication is exposed in the last window that counts: by dimension, then by collective."""
    return [*_dimension_lines(record), *_collective_lines(record)]


def _dimension_lines(record: Record) -> list[str]:
    """A line for each dimension with exposed communication, largest first."""
    window = record.latest_valid("dimensions")
    if window is None:
        return []
    rows = sorted([row for row in window.dimensions if row.exposed_ms > 0], key=lambda row: -row.exposed_ms)
    return [_line(row, window) for row in rows]


def _line(row: DimensionTime, window: OverlapReport) -> str:
    shown = f"{PLAIN.quantity(row.exposed_ms, 'ms')} of {PLAIN.quantity(row.comm_ms, 'ms')}"
    line = f"window {window.window}, dimension {row.dimension}: {shown} in flight are exposed"
    kinds = [found for found in window.collectives if found.dimension == row.dimension]
    if not kinds:
        return line
    kinds.sort(key=lambda kind: -kind.size_bytes)
    names = "; ".join(map(_name, kinds[:_MAX_NAMED])) + ("; ..." if len(kinds) > _MAX_NAMED else "")
    # Rank 0's collectives; the dimension's messages are a mean over ranks, including sends and receives.
    if len(kinds) == 1 and kinds[0].messages == row.messages:
        return f"{line}, all of it by {names}"
    return f"{line}; rank {window.first_rank} issues {names} in it (which of them is exposed, the record does not tell)"


def _name(kind: CollectiveTime) -> str:
    ranks = count(kind.group_size, "rank")
    return (
        f"{kind.operator.strip('_')} on group {kind.group} of {ranks} "
        f"({kind.messages} a step, {bytes_in_words(kind.size_bytes)} in all)"
    )


def _collective_lines(record: Record) -> list[str]:
    """A line for each of the most exposed collectives of one step."""
    window = record.latest_valid("pictures")
    if window is None:
        return []
    return [
        f"window {window.window}, one step of rank {window.first_rank}: {_one(row)} is exposed for "
        f"{PLAIN.quantity(row.exposed_ms, 'ms')} of {PLAIN.quantity(row.in_flight_ms, 'ms')}"
        for row in _of_one_step(window)[:_MAX_NAMED]
    ]


def _one(row: ExposedCollective) -> str:
    place = f" {row.place} of {row.of}" if row.of else ""
    return f"{row.name}{place}" + (f" ({bytes_in_words(row.size_bytes)})" if row.size_bytes else "")


def _of_one_step(window: OverlapReport) -> list[ExposedCollective]:
    pictures = (picture for picture in window.pictures if picture.mode is Mode.OVERLAPPED)
    return [row for picture in pictures for row in exposed_collectives(picture)]


def exposed_as_data(record: Record) -> dict[str, Sequence[Any]]:
    """The same as plain data: ``dimensions``, and ``collectives`` of one step of the lowest rank."""
    dimensions, pictures = (record.latest_valid(part) for part in ("dimensions", "pictures"))
    return {
        "dimensions": () if dimensions is None else dimensions.dimensions,
        "collectives": [] if pictures is None else [row._asdict() for row in _of_one_step(pictures)],
    }


class ExposedCollective(NamedTuple):
    """A collective of a step, and how much of it compute does not hide.

    Attributes:
        name: of its kernel; on CPU of its operator.
        place: number among those of its name in the step, by start, from 1; 0 if the record does not keep them all.
        of: number of its name in the step; 0 likewise.
        size_bytes: the larger of what it reads and writes; 0 if unknown.
        in_flight_ms: its length.
        exposed_ms: its time without compute. If several collectives are in flight, the time counts for the one that
            began first, so that the rows add up to the step's exposed communication.
    """

    name: str
    place: int
    of: int
    size_bytes: int
    in_flight_ms: float
    exposed_ms: float


def exposed_collectives(picture: StepTimeline) -> list[ExposedCollective]:
    """The exposed collectives of one step, most exposed first; empty if the record has no kernels of it.

    A gap in compute that is too short for the record counts as compute; see ``StepTimeline.closed_compute_ms``.
    """
    detail = picture.detail
    if detail is None:
        return []
    rows = [row for row in detail.named_slices if row.communicates]
    if not rows:
        return []
    start_ns = _nanoseconds([row.start_ms for row in rows])
    end_ns = _nanoseconds([row.start_ms + row.length_ms for row in rows])
    # Sorted by start, so the earlier ones cover a collective up to their latest end.
    latest_ns = np.maximum.accumulate(np.append(start_ns[0], end_ns[:-1]))
    own = Intervals(np.maximum(start_ns, latest_ns), end_ns)
    compute = Intervals(
        _nanoseconds([start for start, _ in picture.compute]), _nanoseconds([end for _, end in picture.compute])
    )
    exposed_ns = np.maximum(own.durations_ns, 0) - own.covered_ns(compute)
    counts = Counter(row.name for row in rows)
    seen: Counter[int] = Counter()
    found = []
    for row, exposed in zip(rows, exposed_ns.tolist(), strict=True):
        seen[row.name] += 1
        of = counts[row.name] if detail.communication_left_out == 0 else 0
        place = seen[row.name] if of else 0
        name = detail.names[row.name]
        found.append(ExposedCollective(name, place, of, row.size_bytes, row.length_ms, exposed / 1e6))
    return sorted([row for row in found if row.exposed_ms > 0], key=lambda row: -row.exposed_ms)


def _nanoseconds(milliseconds: list[float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    # A damaged record may hold any time: clip to 64 bits.
    times_ms = np.array(milliseconds, np.float64).clip(-_LATEST_MS, _LATEST_MS)
    return np.rint(times_ms * 1e6).astype(np.int64)
