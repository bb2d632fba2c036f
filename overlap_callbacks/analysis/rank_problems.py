"""Problems of ranks as sentences: which differ in their numbers alone, and how many a report keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence

from overlap_callbacks.analysis.formatting import count

# Sentences that a report keeps. The record has those of every rank whose measurements it keeps whole.
MAX_PROBLEMS = 30

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def bounded(problems: Sequence[str], *, num_more: int = 0, of_each: bool = True) -> tuple[str, ...]:
    """The same, each once, with a count in the place of those that are too many.

    Args:
        problems: sentences.
        num_more: sentences that were dropped before.
        of_each: whether the record keeps what each rank measured, and its problems with it.
    """
    distinct = tuple(dict.fromkeys(problems))
    if len(distinct) <= MAX_PROBLEMS and not num_more:
        return distinct
    more = count(max(0, len(distinct) - MAX_PROBLEMS) + num_more, "more problem")
    last = f"and {more}: the record has those of each rank" if of_each else too_many(more)
    return (*distinct[:MAX_PROBLEMS], last)


def too_many(more: str) -> str:
    """What stands in the place of the problems of a large job that are not kept, e.g. of ``3 more problems``."""
    return f"and {more}: the record has those of the ranks that it keeps whole"


def words_of(text: str) -> str:
    """A text without its numbers: alike for texts that differ in their numbers alone."""
    return _NUMBER.sub("#", text)


def places_of(problems: Sequence[str]) -> dict[str, int]:
    """The place of each problem of a rank among those that differ from it in numbers alone.

    The first is that with the largest first number, else the second, and so on.
    """
    seen: dict[str, int] = {}
    places = {}
    for problem in sorted(problems, key=numbers_of, reverse=True):
        words = words_of(problem)
        places[problem] = seen.get(words, 0)
        seen[words] = places[problem] + 1
    return places


def numbers_of(text: str) -> tuple[float, ...]:
    """The numbers of a text, in order."""
    return tuple([_value(found) for found in _NUMBER.findall(text)])


def _value(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0  # a version or an address
