"""``overlap check --against``: whether a run is slower than its baselines, what differs, and what became slower."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from overlap_callbacks.analysis.apart import change, level, would_do
from overlap_callbacks.analysis.formatting import (
    PLAIN,
    change_in_words,
    count,
    decimals_of,
    includes_zero,
    listed,
    short_kernel_name,
)
from overlap_callbacks.analysis.name_rules import collective_in_words
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.statistics import LOG, MIN_WINDOWS, Pooling
from overlap_callbacks.analysis.statistics import PLAIN as SAME
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.comparison import differences_of, steps_of, unlike

WITHIN = 0.03
# Half of the rest is wrong on the slower side: 0.5 % for the step time, 0.2 % for all parts together.
CONFIDENCE, CONFIDENCE_OF_PARTS = 0.99, 0.996
# Windows whose tables are read, parts below this share of a step, and rows shown.
_MOST_WINDOWS, _LEAST_SHARE, MOST_ROWS = 64, 0.005, 6
_FIGURES = ("compute_ms", "exposed_comm_ms", "idle_ms")


class Answer(Enum):
    """Whether the run is slower than its baselines."""

    SLOWER = "regression"
    NOT_SLOWER = "no regression"
    UNKNOWN = "not enough data"


class Part(NamedTuple):
    """A part of the step: a figure, a kernel of overlapped steps, or collectives alone. ``change_ms`` is of a step."""

    kind: str
    name: str
    baseline_ms: float
    run_ms: float
    change_ms: Estimate

    @property
    def is_slower(self) -> bool:
        return self.change_ms.ci_low is not None and self.change_ms.ci_low > 0

    def row(self) -> str:
        """E.g. ``+1.90 ms (+1.20 to +2.60 ms): aten::mm, 20.10 to 22.00 ms``."""
        decimals = decimals_of(self.change_ms.value, "ms")
        base, run = (PLAIN.quantity(time, "ms", decimals=decimals) for time in (self.baseline_ms, self.run_ms))
        more = PLAIN.quantity(self.change_ms.value, "ms", signed=True, decimals=decimals)
        ends = PLAIN.ends(self.change_ms, "ms", signed=True, decimals=decimals)
        return f"{more}{f' ({ends})' if ends else ''}: {self.name}, {base.removesuffix(' ms')} to {run}"


class Verdict(NamedTuple):
    """A run against its baselines.

    Attributes:
        change: of the step time, relative, with a 99 % interval; None where a side has no time.
        would_do: how many windows of each run, or baselines, would be enough; None if unknown.
        differs: settings of the job, each with the run's value and those of the baselines.
        parts: the most slower first.
        paths: the files of the baselines.
    """

    answer: Answer
    within: float
    run: Estimate
    baselines: tuple[Estimate, ...]
    change: Estimate | None
    would_do: int | None
    differs: tuple[tuple[str, str, tuple[str, ...]], ...]
    parts: tuple[Part, ...]
    paths: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What counts as independent: the run if there are several baselines, else the window."""
        return "run" if len(self.baselines) > 1 else "window"


def parsed_within(text: str | None) -> float:
    """The limit that ``--within`` gives, as a fraction; ``WITHIN`` without one.

    Raises:
        ValueError: it is not a percentage above 0 and below 100 %, such as ``3%``, or such a fraction.
    """
    if text is None:
        return WITHIN
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    share = value / 100 if text.endswith("%") else value
    if not 0 < share < 1:
        meant = f"; did you mean {value:g}%?" if 1 <= value < 100 else ""
        raise ValueError(f"--within must be a percentage above 0, e.g. 3%, got {text}{meant}")
    return share


class Side(NamedTuple):
    """What is compared of a run: the step of each window, and by kind and name the time of each part in each window."""

    steps: Sequence[Estimate]
    parts: Mapping[tuple[str, str], Sequence[Estimate]]


def verdict(record: Record, baselines: Sequence[Record], within: float = WITHIN) -> Verdict:
    """Compare a run with one or more baselines; see ``judged``.

    Raises:
        ValueError: a run has no window that counts.
    """
    found = judged(side_of(record), list(map(side_of, baselines)), within, running=record.running)
    paths = tuple([str(baseline.path) for baseline in baselines])
    return found._replace(differs=tuple(differences_of(record, baselines)), paths=paths)


def judged(run: Side, baselines: Sequence[Side], within: float = WITHIN, *, running: bool = False) -> Verdict:
    """Whether a run is slower than its baselines.

    A regression: the interval of the step time's change lies above 0, and the change is at least ``within``. None: all
    of the interval is below ``within``. Else the data are not enough.

    Args:
        run: what was measured of it.
        baselines: the same of one or more.
        within: how much slower than the baselines the run may be, as a fraction.
        running: whether the run may go on: its interval then holds at all looks.

    Raises:
        ValueError: one has no windows.
    """
    pooling = Pooling(running, CONFIDENCE)
    own = level(run.steps, LOG, pooling)
    levels = [known for each in baselines if (known := level(each.steps, LOG, Pooling(confidence=CONFIDENCE)))]
    if own is None or len(levels) < max(1, len(baselines)):
        raise ValueError("each run must have a window that counts")
    found = change(levels, own, LOG, pooling)
    few = _too_few(own, levels)
    answer, wanted = Answer.UNKNOWN if few or found is None else answer_of(found, within), None
    if answer is Answer.UNKNOWN and found is not None:
        wanted = MIN_WINDOWS if few else would_do(levels, own, _half_wanted(found, within), pooling)
    parts = _parts(run.parts, [each.parts for each in baselines], own.value, pooling)
    return Verdict(answer, within, own, tuple(levels), found, wanted, (), tuple(parts))


def _too_few(run: Estimate, baselines: Sequence[Estimate]) -> bool:
    """Whether a run whose windows are the units has fewer than ``MIN_WINDOWS``."""
    units = (run, *baselines) if len(baselines) == 1 else (run,)
    return min([each.num_blocks for each in units]) < MIN_WINDOWS


def answer_of(found: Estimate, within: float = WITHIN) -> Answer:
    """The answer that a change of the step time gives; see ``judged``."""
    if found.ci_low is None or found.ci_high is None:
        return Answer.UNKNOWN
    if found.ci_high < within:
        return Answer.NOT_SLOWER
    return Answer.SLOWER if found.ci_low > 0 and found.value >= within else Answer.UNKNOWN


def _half_wanted(found: Estimate, within: float) -> float:
    """Half the width, of logarithms, that would decide, if the change stays; not below a quarter of the limit."""
    apart = found.value if found.value >= within else within - found.value
    return math.log1p(max(within / 4, min(within, apart)))


# -- parts of the step


_Times = Mapping[tuple[str, str], Sequence[Estimate]]
_NEVER = (Estimate(0.0, 0.0, 0.0, 0, 0),) * MIN_WINDOWS


def _parts(own: _Times, others: Sequence[_Times], step_ms: float, pooling: Pooling) -> Iterator[Part]:
    """Those that are large enough in either, with intervals that hold together; the most slower first."""
    least_ms = _LEAST_SHARE * step_ms
    sides = {}
    for key in own.keys() | set().union(*others):
        levels = [level(_part(side, key), SAME) for side in (own, *others)]
        known = [each for each in levels if each is not None]
        if len(known) == len(levels) and max([each.value for each in known]) >= least_ms:
            sides[key] = known[1:], known[0]
    each = pooling._replace(confidence=1 - (1 - CONFIDENCE_OF_PARTS) / max(1, len(sides)))
    found = []
    for (kind, name), (bases, run) in sides.items():
        apart = change(bases, run, SAME, each)
        if apart is not None:
            mean_ms = math.fsum([base.value for base in bases]) / len(bases)
            found.append(Part(kind, name, mean_ms, run.value, apart))
    yield from sorted(found, key=lambda part: (not part.is_slower, -part.change_ms.value, part.name))


def _part(side: _Times, key: tuple[str, str]) -> Sequence[Estimate]:
    """A part's times; none if the side measured no such kind. A kernel that it does not have took no time."""
    kind = key[0]
    never = _NEVER if kind != "figure" and any([other == kind for other, _ in side]) else ()
    return side.get(key, never)


def side_of(record: Record) -> Side:
    """The windows that count; parts of the last ones that have kernels."""
    windows = record.last_valid("kernels", _MOST_WINDOWS)
    found: dict[tuple[str, str], list[Estimate]] = defaultdict(list)
    tables = list(map(_table, windows))
    for key in {key for table in tables for key in table}:
        found[key] = [Estimate(table.get(key, 0.0), None, None, 0, 1) for table in tables]
    for name in _FIGURES:
        values = [value for window in windows if (value := window.figures().get(name)) is not None]
        if values:  # their errors are of logarithms
            found["figure", figure_named(name).short] = [Estimate(one.value, None, None, 0, 1) for one in values]
    return Side(steps_of(record), found)


def _table(window: OverlapReport) -> dict[tuple[str, str], float]:
    times_ms: dict[tuple[str, str], float] = defaultdict(float)
    for kernel in window.kernels:
        times_ms["kernel", short_kernel_name(kernel.name)] += kernel.overlapped_ms
    for row in window.collectives:
        if row.transfer is not None:
            group = f"{row.dimension or row.group}, {count(row.group_size, 'rank')}"
            times_ms["collective", f"{collective_in_words(row.operator)} of {group}, alone"] += row.transfer[1]
    return times_ms


# -- in words


def headline(found: Verdict) -> str:
    """The answer in one sentence, with what could be seen."""
    limit = PLAIN.percent(found.within, decimals=decimals_within(found.within))
    step = PLAIN.quantity(found.run.value, "ms")
    several = f"the mean of {count(len(found.baselines), 'baseline')}" if found.unit == "run" else "the baseline"
    if found.change is None:
        return f"Not enough data: a step takes {step}, and that of {several} has no time."
    base = PLAIN.quantity(found.run.value / (1 + found.change.value), "ms")
    ends = PLAIN.interval(found.change, "fraction", signed=True)
    bounds = f" (99% interval {ends})" if ends else ""
    longer = f", {change_in_words(found.change.value, 'longer', 'shorter')} than"
    says = (
        f"a step takes {step}{' against' if includes_zero(found.change) else longer} the {base} of {several}{bounds}."
    )
    if found.answer is Answer.SLOWER:
        return f"Regression: {says}"
    if found.answer is Answer.NOT_SLOWER:
        return f"No regression larger than {limit}: {says}"
    return f"Not enough data to tell whether a step is {limit} slower: {says}"


def decimals_within(within: float) -> int:
    """As many as the limit was given with, at most three."""
    return next((number for number in range(3) if math.isclose(100 * within, round(100 * within, number))), 3)


def more_lines(found: Verdict) -> list[str]:
    """What the unit is, what would be enough, what differs, and what became slower."""
    lines = [_unit(found)]
    if found.answer is Answer.UNKNOWN:
        lines.append(_enough(found))
    differs = [f"{name} ({own}; before {listed(list(dict.fromkeys(then)), 3)})" for name, own, then in found.differs]
    if differs:
        lines.append(f"What differs: {listed(differs, MOST_ROWS)}.")
    else:
        lines.append("What differs: nothing that the records know.")
    slower = [part for part in found.parts if part.is_slower]
    if slower:
        lines.append("What became slower, in a step (intervals hold together):")
        lines += [f"  {part.row()}" for part in slower[:MOST_ROWS]]
    elif found.answer is Answer.SLOWER:
        most = next((part for part in found.parts if part.change_ms.value > 0), None)
        seen = "" if most is None else f" As measured, the most: {most.row()}"
        lines.append(f"No kernel or collective is clearly slower by itself.{seen}")
    return lines


def _unit(found: Verdict) -> str:
    if found.unit == "run":
        return (
            f"The unit is the run: {count(len(found.baselines), 'baseline')}, and one more run is compared with them."
        )
    windows = f"{found.run.num_blocks} against {found.baselines[0].num_blocks}"
    more = "Runs and hosts differ by more than windows: give several baselines to see by how much"
    return f"The unit is the window ({windows}). {more}."


def _enough(found: Verdict) -> str:
    windows = found.unit == "window" or _too_few(found.run, found.baselines)
    what = "windows of each run" if windows else "baselines"
    if found.would_do is not None:
        return f"About {float(f'{found.would_do:.2g}'):g} {what} would do, if the next ones are like these."
    if found.unit == "run" and _half_of_own(found) > math.log1p(found.within):
        return "More baselines would not help: the windows of this run are too few, or scatter too much."
    return f"They scatter too much: no number of {what} that one would measure is enough."


def _half_of_own(found: Verdict) -> float:
    low, high = found.run.ci_low, found.run.ci_high
    return math.inf if low is None or high is None or low <= 0 else math.log(high / low) / 2


def as_data(found: Verdict) -> dict[str, Any]:
    """The same as plain data."""
    sides = zip(found.paths, found.baselines, strict=True)
    return {
        "answer": found.answer,
        "within": found.within,
        "confidence": CONFIDENCE,
        "unit": found.unit,
        "step_ms": found.run,
        "baselines": [{"path": path, "step_ms": step_ms} for path, step_ms in sides],
        "change": found.change,
        "would_do": found.would_do,
        "differs": [{"name": name, "run": own, "baselines": then} for name, own, then in found.differs],
        "parts": [{**part._asdict(), "is_slower": part.is_slower} for part in found.parts],
    }


def incomparable(record: Record, baseline: Record) -> str:
    """Why a run cannot be compared with a baseline; empty if it can."""
    if baseline.control:
        return "it is an A/A control"
    return unlike(record, baseline)
