"""What the ranks of a window say is wrong, as sentences of the whole job: their number does not grow with the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from overlap_callbacks.analysis.formatting import count, name_ranks
from overlap_callbacks.analysis.results.window import RankWindow

# Sentences that a report keeps. The record has those of every rank.
MAX_PROBLEMS = 30

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def by_rank(samples: Sequence[RankWindow], problems_of: Callable[[RankWindow], Sequence[str]]) -> list[str]:
    """The ranks' problems, each once, and the ranks that have it unless all do.

    Problems of several ranks that differ in their numbers alone are one: that with the largest first number, else the
    second, and so on; of equal ones that of the lowest rank. The problems of one rank are never merged with each other.
    """
    # The same problem is the first with its words on each rank, or the second, and so on.
    alike: dict[tuple[str, int], dict[int, str]] = {}
    for sample in samples:
        problems = list(dict.fromkeys(problems_of(sample)))
        number_of = {text: (_NUMBER.sub("#", text), place) for text, place in _places(problems)}
        for problem in problems:
            alike.setdefault(number_of[problem], {})[sample.rank] = problem
    return list(dict.fromkeys(_merged(problem_of, len(samples)) for problem_of in alike.values()))


def bounded(problems: Sequence[str]) -> tuple[str, ...]:
    """The same, each once, with a count in the place of those that are too many."""
    distinct = tuple(dict.fromkeys(problems))
    if len(distinct) <= MAX_PROBLEMS:
        return distinct
    more = len(distinct) - MAX_PROBLEMS
    return (*distinct[:MAX_PROBLEMS], f"and {count(more, 'more problem')}: the record has those of each rank")


def _places(problems: Sequence[str]) -> list[tuple[str, int]]:
    """The place of each problem of a rank among those that differ from it in numbers alone, the largest first."""
    seen: dict[str, int] = {}
    places = []
    for problem in sorted(problems, key=_numbers, reverse=True):
        words = _NUMBER.sub("#", problem)
        places.append((problem, seen.get(words, 0)))
        seen[words] = seen.get(words, 0) + 1
    return places


def _merged(problem_of: dict[int, str], num_ranks: int) -> str:
    """One sentence for like problems of several ranks."""
    shown = max(problem_of.values(), key=_numbers)  # the first of equal ones
    ranks = [rank for rank, problem in problem_of.items() if problem == shown]
    if len(ranks) == num_ranks:
        return shown
    others = len(problem_of) - len(ranks)
    more = f" (and like ones on {count(others, 'more rank')})" if others else ""
    return f"{name_ranks(ranks)}: {shown}{more}"


def _numbers(text: str) -> tuple[float, ...]:
    """The numbers of a text, in order."""
    return tuple([_value(found) for found in _NUMBER.findall(text)])


def _value(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0  # a version or an address
