"""What ``overlap show`` prints first, as plain data: a run's answer in some twenty lines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.causal import responses_of
from overlap_callbacks.analysis.formatting import (
    CLEAR,
    PLAIN,
    certainty,
    certainty_in_words,
    change_decimals,
    decimals_of,
    listed,
    one_line,
    shortened,
)
from overlap_callbacks.analysis.goodput import goodput_sentence
from overlap_callbacks.analysis.headline import next_step, run_headline, signless_bounds, step_change
from overlap_callbacks.analysis.results.catalogue import STEP_TIMES
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.settled import Verdict
from overlap_callbacks.analysis.run_summary import COUNTS
from overlap_callbacks.analysis.watch import change_sentence
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.arms import arms
from overlap_callbacks.report.views.causal import answer
from overlap_callbacks.report.views.quality import cost_in_words, unreadable, windows_that_count
from overlap_callbacks.report.views.runs import attention, head_of
from overlap_callbacks.report.views.step_charts import named_parts, part_in_words, whole_step
from overlap_callbacks.report.views.step_parts import step_parts

# More windows become one line of small bars.
MAX_WINDOWS = 4
_MAX_NAMED, _MAX_WHY = 3, 80
_SIDES = ("one side", "other side")  # of a control run
# A window is odd if it is further from the median than both.
_MIN_ODD, _DEVIATIONS, _MAD_TO_SD = 0.02, 4.0, 1.4826


class Bar(NamedTuple):
    """A step time: as a length, and in words with its interval."""

    label: str
    ms: float
    words: str


class Short(NamedTuple):
    """The screen, from top to bottom. Parts without content are empty.

    Attributes:
        attention: what must be read before any figure.
        headline: its sentences.
        doubts: about them: why they are doubtful, and the settled difference.
        bars: the step time without contention, with overlap, and without.
        parts: where the time of a step goes.
        windows: a line for each of a few windows, in columns.
        saved: what overlap saves in each of many windows, as a fraction.
        odd: about those windows.
        arms: the best switch, if any was turned.
        causal: which collective holds the step up, if any was delayed.
        step: the one thing to do next.
        cost: of measuring, and about the intervals.
        head: what ran where.
        num_notes: on windows, which everything has.
    """

    attention: tuple[str, ...]
    headline: tuple[str, ...]
    doubts: tuple[str, ...]
    bars: tuple[Bar, ...]
    parts: str
    windows: tuple[tuple[str, ...], ...]
    saved: tuple[float, ...]
    odd: str
    arms: str
    causal: str
    step: str
    cost: str
    head: str
    num_notes: int


def short_of(record: Record) -> Short:
    found = run_headline(record.summary, len(record.arms))
    if not record.windows and record.runs and record.runs[-1].world_size == 1:
        found = found._replace(sentence="One rank: nothing to overlap, so its steps are timed.", what_to_do="")
    settled = record.summary.settled()
    shown = found.settled if settled is not None and settled.verdict is not Verdict.SHORT else ""
    few = len(record.windows) <= MAX_WINDOWS
    counting = [window for window in record.valid_windows if window.speedup_vs_sequential is not None]
    cost = cost_in_words(record, PLAIN)
    broken = [f"{unreadable(record)}."] if record.broken_lines else []
    return Short(
        tuple([*[note.text for notes in attention(record) for note in notes], *broken]),
        (found.sentence, *found.also),
        tuple(filter(None, (found.why and f"Why: {found.why}", shown, *map(change_sentence, record.changes[-1:])))),
        () if record.control else _bars(record.figures),
        _parts(record),
        _lines(record) if few else (),
        () if few or record.control else tuple([_saved(window) for window in counting]),
        "" if few or record.control else _odd(record, counting),
        "".join([section.answer for section in arms(record)]),
        answer(delayed) if (delayed := responses_of(record.causal)) else "",
        next_step(record.summary, found, record.bottleneck()),
        " ".join(
            filter(None, (goodput_sentence(record.goodput), cost and f"Cost of measuring: {cost}.", found.interval))
        ),
        head_of(record),
        len({problem for window in record.windows for problem in window.problems}),
    )


def _bars(figures: dict[str, Estimate]) -> tuple[Bar, ...]:
    known = [(figure.title, figures[figure.name]) for figure in STEP_TIMES if figure.name in figures]
    decimals = min([decimals_of(time.value, "ms") for _, time in known], default=0)
    made = []
    for title, time in known:
        words = PLAIN.quantity(time.value, "ms", decimals=decimals)
        bounds = PLAIN.interval(time, "ms", decimals=decimals).removesuffix(" ms")
        made.append(Bar(title, time.value, f"{words} ({bounds})" if bounds else words))
    return tuple(made)


def _parts(record: Record) -> str:
    parts = record.summary.step_parts()
    if parts is None:
        return "".join([section.answer for section in step_parts(record)])  # without a profile, by marks
    shares = [part_in_words(part, short=True) for part in named_parts(parts)]
    return f"{whole_step(parts, record.figures).removeprefix('a ').capitalize()}: {', '.join(shares)}."


def _saved(window: OverlapReport) -> float:
    change = step_change(window.figures())
    return 0.0 if change is None else -change.value


def _lines(record: Record) -> tuple[tuple[str, ...], ...]:
    """A line for each window, with the same decimals: enough for the shortest step."""
    times = [time.value for window in record.windows for time in _times(window) if time is not None]
    decimals = max(1, decimals_of(min(times), "ms")) if times else 1
    return tuple([_line(window, record, decimals) for window in record.windows])


def _times(window: OverlapReport) -> tuple[Estimate | None, Estimate | None]:
    return window.e2e_overlapped_ms, window.e2e_sequential_ms


def _line(window: OverlapReport, record: Record, decimals: int) -> tuple[str, ...]:
    """A window in columns: its number, its first step, both step times, and what overlap saves."""
    state = record.summary.state_of(window)
    name = (f"window {window.window}", f"step {window.first_step:,}")
    change = step_change(window.figures())
    if state != COUNTS or change is None:
        return *name, "", "", "not compared" if state == COUNTS else _why(window, state)
    times = [
        "" if time is None else f"{PLAIN.quantity(time.value, 'ms', decimals=decimals)} {mode}"
        for time, mode in zip(_times(window), _SIDES if record.control else ("with", "without"), strict=True)
    ]
    if record.control:
        return *name, *times, PLAIN.in_brackets(change, "fraction", signed=True)
    words = f"{_in_words(-change.value, change_decimals(change))} ({signless_bounds(change)})"
    return *name, *times, words if certainty(change) == CLEAR else certainty_in_words(change)


def _why(window: OverlapReport, state: str) -> str:
    """Why a window does not count, on one line: e.g. ``cut short: an exception in the user's step``."""
    problem = one_line("; ".join(window.problems[:1])).removeprefix(f"{state}: ")
    return f"{state}: {problem}" if problem else state


def _in_words(saved: float, decimals: int | None = None) -> str:
    return f"{'saves' if saved > 0 else 'costs'} {PLAIN.percent(abs(saved), decimals=decimals)}"


def _odd(record: Record, counting: Sequence[OverlapReport]) -> str:
    """How many windows count, why the last other one does not, and where overlap saves another share than in most."""
    saved = [_saved(window) for window in counting]
    told = [windows_that_count(record.summary)]
    if saved:
        median = statistics.median(saved)
        told.append(f"overlap {_in_words(median)} in the median one")
        deviation = _MAD_TO_SD * statistics.median([abs(value - median) for value in saved])
        limit = max(_MIN_ODD, _DEVIATIONS * deviation)
        odd = [
            f"window {window.window} (step {window.first_step:,}, {_in_words(value)})"
            for window, value in zip(counting, saved, strict=True)
            if abs(value - median) > limit
        ]
        told.append(f"odd: {listed(odd, _MAX_NAMED)}" if odd else "none is odd")
    others = [(window, state) for window in record.windows if (state := record.summary.state_of(window)) != COUNTS]
    why = f" Window {others[-1][0].window}, {shortened(_why(*others[-1]), _MAX_WHY)}." if others else ""
    return f"{'; '.join(told)}.{why}"
