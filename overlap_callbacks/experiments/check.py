"""``overlap check``: limits on a run's figures, whether it keeps them, and which communication is exposed."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from overlap_callbacks.analysis.exposure import exposed_parts
from overlap_callbacks.analysis.formatting import NOT_RESOLVED, PLAIN, bytes_in_words, count, decimals_of, says_nothing
from overlap_callbacks.analysis.headline import NOTHING_OVERLAPS, next_step, run_headline
from overlap_callbacks.analysis.name_rules import collective_in_words
from overlap_callbacks.analysis.results.catalogue import FIGURES, STEP_TIMES, figure_named
from overlap_callbacks.analysis.results.env_overrides import RUN_DIR
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import meant
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.step_parts import Bound, exposed_share
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.experiments.supervisor import Ending, GrowingRecord, exit_in_words, interruptible, supervise
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.sections import exposure_of

# Not a headline figure: exposed communication over the step, both under the profiler.
EXPOSED_SHARE = "exposed_share"
# Of a figure next to its limit.
_MOST_DECIMALS = 5


# What exposes communication; and the subjects of advice that leaves the figure as it is, or makes it worse.
_EXPOSED = (Bound.COMMUNICATION, Bound.STRAGGLER, Bound.BUBBLE)
_ON_EXPOSED = {EXPOSED_SHARE, "exposed_comm_ms", "hidden_comm_fraction", "hidden_comm_ms"}
_NOT_ON_EXPOSED = {"overlap-off", "faster-compute", "power-cap", "ctas"}
_ON_SLOWDOWN = {"overlap-off", "settings", "power-cap", "ctas"}


class State(Enum):
    """Whether a limit holds. Inconclusive: it lies within the figure's interval, or there is none."""

    HOLDS = "holds"
    BROKEN = "is broken"
    INCONCLUSIVE = "is inconclusive"
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
    doubt: str = ""  # why the interval decides nothing

    def sentence(self) -> str:
        """E.g. ``exposed communication is 23.1% of a profiled step (95% interval ...), and 10.0% is allowed``."""
        limit = self.limit
        side = "at most" if limit.is_maximum else "at least"
        if self.measured is None:
            return f"{limit.name} was not measured ({limit.option} {limit.bound:g})"
        decimals = self._decimals(self.measured)
        found = PLAIN.quantity(self.measured.value, limit.unit, decimals=decimals)
        bounds = PLAIN.ends(self.measured, limit.unit, decimals=decimals)
        signed = limit.figure != EXPOSED_SHARE and figure_named(limit.figure).signed
        # An interval that decides is of use, however wide.
        if self.state is State.INCONCLUSIVE and says_nothing(
            self.measured, limit.unit, signed=signed, most=2 * abs(limit.bound)
        ):
            bounds = NOT_RESOLVED
        yet = f" (95% interval {bounds})" if bounds else " (no interval yet)"
        bound = PLAIN.quantity(limit.bound, limit.unit, decimals=max(decimals, decimals_of(limit.bound, limit.unit)))
        doubt = f"; but it is {self.doubt}" if self.doubt else ""
        return f"{limit.name} is {found}{yet}, and {side} {bound} is allowed{doubt}"

    def _decimals(self, measured: Estimate) -> int:
        """As many as usual, or enough that no other end of the interval looks like the limit, nor the limit like 0."""
        limit, least = self.limit, decimals_of(measured.value, self.limit.unit)
        scale = 100 if limit.unit == "fraction" else 1
        known = [end for end in (measured.ci_low, measured.ci_high) if end is not None]
        ends = [end for end in known if not math.isclose(end, limit.bound, rel_tol=1e-9)]

        def differ(decimals: int) -> bool:
            bound = round(scale * limit.bound, decimals)
            return bool(bound or not limit.bound) and all([round(scale * end, decimals) != bound for end in ends])

        return next((decimals for decimals in range(least, _MOST_DECIMALS) if differ(decimals)), _MOST_DECIMALS)


def step_to_take(record: Record, figure: str) -> str:
    """What to try first against a limit on this figure that is broken or inconclusive; or that there is no advice."""
    found = record.bottleneck(_EXPOSED if figure in _ON_EXPOSED else ())
    advice = () if found is None else found.advice
    if figure in _ON_EXPOSED:
        advice = tuple([row for row in advice if row.topic not in _NOT_ON_EXPOSED])
    elif figure == "compute_slowdown":
        advice = tuple([row for row in advice if row.topic in _ON_SLOWDOWN])
    headline = run_headline(record.summary, len(record.arms))
    on_overlap = headline.state == NOTHING_OVERLAPS and figure in _ON_EXPOSED
    if found is not None and not advice and not on_overlap:
        return "No advice: nothing that was measured shows what would change this figure."
    known = headline if on_overlap else headline._replace(what_to_do="")
    return next_step(record.summary, known, None if found is None else found._replace(advice=advice))


def limit_names() -> list[str]:
    """The figures accepted by ``--max`` and ``--min``."""
    return [figure.name for figure in FIGURES]


def parsed_limit(option: str, text: str) -> Limit:
    """The limit given by ``NAME=VALUE`` of ``--max`` or ``--min``.

    Raises:
        ValueError: it has another form, there is no such figure, or the limit cannot be one.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{option} {text}: the form is NAME=NUMBER, e.g. {option} compute_slowdown=0.2")
    known = limit_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, 3) or [one for one in known if name.lower() in one]
        hint = f"did you mean {', '.join(near)}?" if name and near else f"there are {', '.join(known)}"
        raise ValueError(f"{option} {text}: there is no such figure; {hint}")
    return limit_on(name, option, value)


def limit_on(figure: str, option: str, text: str) -> Limit:
    """The limit on a figure by a number; a ``ValueError`` if it is none, or cannot be one (``Figure.refusal``)."""
    is_percent = text.endswith("%")
    asked = f"{option} {figure}" if option in ("--max", "--min") else option
    try:
        bound = float(text.removesuffix("%"))
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise ValueError(f"{asked} must be a number, got {text!r}")
    if is_percent:
        raise ValueError(f"{asked} must be a fraction, got {text}{meant(bound) if bound >= 0 else ''}")
    refusal = figure_named("hidden_comm_fraction" if figure == EXPOSED_SHARE else figure).refusal(bound)
    if refusal:
        raise ValueError(f"{asked} {refusal}")
    return Limit(option, figure, option.startswith("--max"), bound)


def judge(summary: RunSummary, limits: Sequence[Limit]) -> list[Finding]:
    """Judge a run by limits, each by the interval of its figure in the headline, over the windows that count.

    An unmeasured figure, or one without an interval or whose interval decides nothing, is not a pass.
    """
    pooled, undecided = summary.pooled(), summary.undecided()
    exposed = exposed_share(pooled)
    if exposed is not None:
        pooled[EXPOSED_SHARE] = exposed
    if "exposed_comm_ms" in undecided:
        undecided[EXPOSED_SHARE] = undecided["exposed_comm_ms"]
    return [_finding(limit, pooled.get(limit.figure), undecided.get(limit.figure, "")) for limit in limits]


def _finding(limit: Limit, measured: Estimate | None, doubt: str) -> Finding:
    if measured is None:
        return Finding(limit, State.NOT_MEASURED, None)
    if doubt or measured.ci_low is None or measured.ci_high is None:
        return Finding(limit, State.INCONCLUSIVE, measured, doubt)
    beyond = [limit.is_beyond(end) for end in (measured.ci_low, measured.ci_high)]
    state = State.BROKEN if all(beyond) else State.INCONCLUSIVE if any(beyond) else State.HOLDS
    return Finding(limit, state, measured)


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
        return f"the command cannot be started: {command[0]}: {error.strerror}"
    if outcome.ending is Ending.TIMEOUT:
        return f"the command took longer than {timeout_s:g} s (--timeout)"
    # Once it has measured enough windows, its exit code does not matter.
    if outcome.ending is Ending.BY_ITSELF and outcome.exit_code:
        return f"the command failed ({exit_in_words(outcome.exit_code)})"
    return ""


# -- exposed communication. A record has the exposed time of each dimension of parallelism, a mean over ranks and steps,
# and the collectives that a dimension issues in a step. A collective is named as the cause if it is the only kind in
# its dimension.

# Maximum collectives of one dimension named in a line.
_MAX_NAMED = 3


def exposed_lines(record: Record) -> list[str]:
    """Which communication is exposed: by dimension in the last window that counts, then by size and place."""
    lines, exposure = _dimension_lines(record), exposure_of(record)
    if exposure is not None:
        whole, parts = exposed_parts(exposure.found)
        lines += [f"{exposure.windows}: of {whole} {part}" for part in parts]
    return lines


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
    return f"{line}; rank {window.first_rank} issues {names} in it (the record does not say which of them is exposed)"


def _name(kind: CollectiveTime) -> str:
    ranks = count(kind.group_size, "rank")
    return (
        f"{collective_in_words(kind.operator)} on group {kind.group} of {ranks} "
        f"({kind.messages} a step, {bytes_in_words(kind.size_bytes)} in all)"
    )


def exposed_as_data(record: Record) -> dict[str, Sequence[Any]]:
    """The same as plain data: ``dimensions``, and ``collectives`` by size and by place in the step."""
    dimensions, exposure = record.latest_valid("dimensions"), exposure_of(record)
    return {
        "dimensions": () if dimensions is None else dimensions.dimensions,
        "collectives": () if exposure is None else exposure.found.rows,
    }
