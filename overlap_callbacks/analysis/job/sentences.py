"""What ranks say is wrong, as sentences of the whole job: their number does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.rank_problems import numbers_of, places_of, words_of
from overlap_callbacks.analysis.rank_set import RankSet, union_of

# Sentences that a part keeps, more than a report shows, and their characters in all.
MAX_SENTENCES = 64
MAX_CHARACTERS = 12_000


class Sentence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sentences of several ranks that differ in their numbers alone.

    Attributes:
        place: whether it is the first with its words on each rank, the second, and so on.
        text: of them that with the largest numbers; of equal ones that of the lowest rank.
        shown: the ranks that say just that.
        num_ranks: ranks that have such a sentence.
        first: rank and place at which one first stands.
    """

    place: int
    text: str
    shown: RankSet
    num_ranks: int
    first: tuple[int, int]


class Sentences(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sentences of ranks.

    Attributes:
        rows: the first of them.
        num_more: those that are not kept; of several parts that had to drop the same, each counts.
    """

    rows: tuple[Sentence, ...] = ()
    num_more: int = 0


def sentences_of(rank: int, problems: Sequence[str]) -> Sentences:
    """The sentences of one rank; they are never merged with each other."""
    distinct = list(dict.fromkeys(problems))
    place_of = places_of(distinct)
    rows = [Sentence(place_of[text], text, RankSet.of(rank), 1, (rank, place)) for place, text in enumerate(distinct)]
    return _bounded(rows, 0)


def add_sentences(parts: Iterable[Sentences]) -> Sentences:
    """The sentences of the ranks of all parts."""
    by_key: dict[tuple[str, int], list[Sentence]] = {}
    num_more = 0
    for part in parts:
        num_more += part.num_more
        for row in part.rows:
            by_key.setdefault((words_of(row.text), row.place), []).append(row)
    return _bounded([_merged(alike) for alike in by_key.values()], num_more)


def _bounded(rows: Sequence[Sentence], num_more: int) -> Sentences:
    kept: list[Sentence] = []
    left = MAX_CHARACTERS
    for row in sorted(rows, key=lambda row: row.first):
        left -= len(row.text)
        if kept and (left < 0 or len(kept) == MAX_SENTENCES):
            break
        kept.append(row)
    return Sentences(tuple(kept), num_more + len(rows) - len(kept))


def _merged(alike: Sequence[Sentence]) -> Sentence:
    if len(alike) == 1:
        return alike[0]
    largest = max(numbers_of(row.text) for row in alike)
    text = min((row for row in alike if numbers_of(row.text) == largest), key=lambda row: row.shown.lowest).text
    return Sentence(
        place=alike[0].place,
        text=text,
        shown=union_of(row.shown for row in alike if row.text == text),
        num_ranks=sum(row.num_ranks for row in alike),
        first=min(row.first for row in alike),
    )


def said(sentences: Sentences, num_ranks: int) -> list[str]:
    """One sentence for like ones of several ranks, and the ranks that have it unless all do.

    Args:
        sentences: of the ranks.
        num_ranks: ranks in all.
    """
    return list(dict.fromkeys(_said(row, num_ranks) for row in sentences.rows))


def _said(row: Sentence, num_ranks: int) -> str:
    if row.shown.count == num_ranks:
        return row.text
    others = row.num_ranks - row.shown.count
    more = f" (and like ones on {count(others, 'more rank')})" if others else ""
    return f"{row.shown.named()}: {row.text}{more}"
