"""Which of several runs is the fastest and by how much, in a sentence with its interval. Pure.

Runs are independent of each other. The interval of a change from one to another follows from their own intervals
(``overlap_callbacks.analysis.independent``), so it knows what varies within them, and nothing of what varies from one
run of a job to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.formatting import PLAIN, change_in_words, listed, may_be_chance, range_in_words
from overlap_callbacks.analysis.headline import Headline
from overlap_callbacks.analysis.independent import relative_change
from overlap_callbacks.analysis.results.estimate import Estimate

THESE_RUNS = "It holds for these runs: repeat them to see what differs from run to run."
_MOST_NAMED = 3


class RunSpeed(NamedTuple):
    """How fast a run is.

    Attributes:
        name: of the run.
        step_ms: time of a step as the job is configured, with overlap.
        work_per_s: tokens, or samples, a second; None to compare steps.
    """

    name: str
    step_ms: Estimate
    work_per_s: Estimate | None = None


class Fastest(NamedTuple):
    """What is known of the fastest of several runs.

    Attributes:
        headline: in words.
        name: of the run that is faster than all others for certain; empty if none is.
    """

    headline: Headline
    name: str = ""


def fastest(runs: Sequence[RunSpeed], work: str = "") -> Fastest:
    """Which run is the fastest, against the one that comes next.

    Nothing is claimed of a run whose interval against the fastest one holds zero. To pick the shortest of several
    makes no false claim more likely: its distance from the next one is smaller than that of any two.

    Args:
        runs: two or more.
        work: what ``work_per_s`` counts, ``tokens`` or ``samples``, if that is compared; it is known of all runs then.
    """
    ordered = sorted(runs, key=lambda run: -_of(run, work).value if work else run.step_ms.value)
    first, second, *_ = ordered
    changes = {run.name: relative_change(_of(run, work), _of(first, work)) for run in ordered[1:]}
    change = changes[second.name]
    if change is None:  # a time of nothing, in a record that somebody else has written
        return Fastest(Headline("Which run is faster is not known: a step of no time was recorded."))
    unsure = [name for name, each in changes.items() if not _sure(each)]
    sentence = _sentence(first.name, second.name, change, unsure, len(runs), work)
    return Fastest(Headline(sentence, _interval(first, second, change, work)), "" if unsure else first.name)


def _of(run: RunSpeed, work: str) -> Estimate:
    return run.work_per_s if work and run.work_per_s is not None else run.step_ms


def _sure(change: Estimate | None) -> bool:
    return change is not None and change.ci_low is not None and not may_be_chance(change)


def _sentence(first: str, second: str, change: Estimate, unsure: Sequence[str], num_runs: int, work: str) -> str:
    words = f"{change_in_words(change.value, 'more', 'fewer')} {work} a second" if work else _longer(change)
    than = second if work else f"those of {second}"
    seems = change.ci_low is None
    if num_runs == 2:
        if work:
            claim = f"{first} {'seems to train' if seems else 'trains'} {words} than {than}"
        else:
            claim = f"Steps of {first} {'seem' if seems else 'are'} {words} than {than}"
    else:
        most = f"the most {work} a second" if work else "the shortest steps"
        claim = f"{first} {'seems to have' if seems else 'has'} {most}: {words} than {than}, the next run"
    if seems:
        return f"{claim}, from too few blocks to be sure."
    if second in unsure:
        return f"{claim}, which may be chance."
    return f"{claim}." + (f" Its lead over {listed(unsure, _MOST_NAMED)} may be chance." if unsure else "")


def _longer(change: Estimate) -> str:
    return change_in_words(change.value, "longer", "shorter")


def _interval(first: RunSpeed, second: RunSpeed, change: Estimate, work: str) -> str:
    unit = f"{work}/s" if work else "ms"
    both = " against ".join([PLAIN.quantity(_of(run, work).value, unit) for run in (first, second)])
    bounds = range_in_words(change, "more", "fewer") if work else range_in_words(change, "longer", "shorter")
    if not bounds:
        return f"{both}."
    return f"95% interval: {bounds} ({both}). {THESE_RUNS}"
