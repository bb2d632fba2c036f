"""Which of several runs is fastest, in words, and how certain that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.apart import change as change_of
from overlap_callbacks.analysis.formatting import CLEAR, PLAIN, certainty, certainty_in_words, listed
from overlap_callbacks.analysis.headline import NOT_MEASURED, Headline, Times, change_in_brackets, signless_bounds
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import ONE_LOOK, Pooling

THESE_RUNS = "It holds for these runs: repeat them to see what differs from run to run."
_MOST_NAMED = 3


class RunSpeed(NamedTuple):
    """How fast a run is, with overlap. ``work_per_s`` is tokens, or samples, a second; None to compare steps."""

    name: str
    step_ms: Estimate
    work_per_s: Estimate | None = None


class Fastest(NamedTuple):
    """The result of comparing several runs. ``name`` is empty unless that run is clearly faster than the others."""

    headline: Headline
    name: str = ""


def fastest(runs: Sequence[RunSpeed], work: str = "", pooling: Pooling = ONE_LOOK) -> Fastest:
    """Which of two or more runs is fastest, compared with the next one.

    Nothing is claimed about a run whose interval against the fastest one includes zero. Selecting the minimum does not
    inflate the error rate here: its distance from the next one is smaller than that of any other pair. ``work``: what
    all runs' ``work_per_s`` counts, ``tokens`` or ``samples``, if that is compared. ``pooling``: of the intervals.
    """
    ordered = sorted(runs, key=lambda run: -_of(run, work).value if work else run.step_ms.value)
    first, second, *_ = ordered
    changes = {run.name: change_of([_of(run, work)], _of(first, work), pooling=pooling) for run in ordered[1:]}
    change = changes[second.name]
    if change is None:  # a zero time, only in corrupt records
        return Fastest(Headline("Which run is faster is not known: a step of no time was recorded."))
    unsure = [name for name, each in changes.items() if each is None or certainty(each) != CLEAR]
    sentence = _claim(first, second, change, work)
    if certainty(change) == CLEAR and unsure:
        sentence += f" Its lead over {listed(unsure, _MOST_NAMED)} is inconclusive."
    interval = THESE_RUNS if change.ci_low is not None else ""
    state = certainty(change) or NOT_MEASURED
    return Fastest(Headline(sentence, interval=interval, state=state), "" if unsure else first.name)


def _of(run: RunSpeed, work: str) -> Estimate:
    return run.work_per_s if work and run.work_per_s is not None else run.step_ms


def _claim(first: RunSpeed, second: RunSpeed, change: Estimate, work: str) -> str:
    if not work:
        return faster_in_words(first.name, second.name, change, first.step_ms.value)
    both = " against ".join([PLAIN.quantity(_of(run, work).value, f"{work}/s") for run in (first, second)])
    if certainty(change) != CLEAR:
        return f"Which is faster, {first.name} or {second.name}: {certainty_in_words(change)}; {both}."
    words = f"{first.name} trains {PLAIN.percent(change.value)} more {work} a second than {second.name}"
    return f"{words}: {both} ({signless_bounds(change)})."


def faster_in_words(name: str, other: str, change: Estimate, step_ms: float) -> str:
    """Which is faster, from a step's time and by how much that differs from the other's."""
    times = Times.of(change, step_ms)
    both = f"{times.less} against {times.more}"
    if certainty(change) != CLEAR:
        return f"Which is faster, {name} or {other}: {certainty_in_words(change)}; {both}."
    return f"{name} saves {times.difference} a step against {other}: {both} ({change_in_brackets(change)})."
