"""Merges the ranks' problems into a bounded list of sentences for the job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.rank_set import RankSet, union
from overlap_callbacks.analysis.sums import digest, grouped

# Maximum sentences in a report. The record has those of every rank whose measurements it keeps in full.
MAX_PROBLEMS = 30
# Maximum sentences kept on the way, and their total characters.
_MAX_KEPT = 64
_MAX_CHARACTERS = 12_000

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


class Sentence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sentences of several ranks that count as one, such as those that differ only in their numbers.

    Attributes:
        key: digest of what they have in common.
        text: the one with the largest numbers; if equal, the lowest rank's.
        shown: the ranks with exactly this text.
        first: the first rank, and the sentence's index among that rank's sentences.
    """

    key: bytes
    text: str
    shown: RankSet
    num_ranks: int
    first: tuple[int, int]


class Sentences(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sentences of ranks; ``num_more`` were dropped: if several parts dropped the same one, each counts it."""

    rows: tuple[Sentence, ...] = ()
    num_more: int = 0

    def of_job(self, num_ranks: int) -> list[str]:
        """One sentence for similar ones of several ranks, with the ranks that have it, unless all ``num_ranks`` do."""
        return list(dict.fromkeys(_with_ranks(row, num_ranks) for row in self.rows))


def sentences_of(rank: int, problems: Iterable[str], *, by_words: bool = True) -> Sentences:
    """The sentences of one rank, which are never merged with each other.

    ``by_words``: sentences of different ranks that differ only in numbers are merged: the one with the largest numbers
    with that of another rank, then the next.
    """
    distinct = list(dict.fromkeys(problems))
    own = RankSet.of((rank, rank))
    key_of = {text: text for text in distinct}
    if by_words:
        alike = grouped(sorted(distinct, key=_numbers_of, reverse=True), lambda text: _NUMBER.sub("#", text))
        key_of = {text: f"{at} {words}" for words, texts in alike.items() for at, text in enumerate(texts)}
    return _bounded([Sentence(digest(key_of[text]), text, own, 1, (rank, at)) for at, text in enumerate(distinct)], 0)


def add_sentences(parts: Sequence[Sentences]) -> Sentences:
    alike = grouped([row for part in parts for row in part.rows], lambda row: row.key)
    return _bounded([_merged(rows) for rows in alike.values()], sum(part.num_more for part in parts))


def _bounded(rows: Sequence[Sentence], num_more: int) -> Sentences:
    kept: list[Sentence] = []
    left = _MAX_CHARACTERS
    for row in sorted(rows, key=lambda row: row.first):
        left -= len(row.text)
        if kept and (left < 0 or len(kept) == _MAX_KEPT):
            break
        kept.append(row)
    return Sentences(tuple(kept), num_more + len(rows) - len(kept))


def _merged(rows: Sequence[Sentence]) -> Sentence:
    shown = min(rows, key=lambda row: ([-number for number in _numbers_of(row.text)], row.shown.lowest))
    return Sentence(
        key=shown.key,
        text=shown.text,
        shown=union([row.shown for row in rows if row.text == shown.text]),
        num_ranks=sum(row.num_ranks for row in rows),
        first=min(row.first for row in rows),
    )


def _with_ranks(row: Sentence, num_ranks: int) -> str:
    if row.shown.count == num_ranks:
        return row.text
    others = row.num_ranks - row.shown.count
    more = f" (and like ones on {count(others, 'more rank')})" if others else ""
    return f"{row.shown.named()}: {row.text}{more}"


def bounded(problems: Sequence[str], *, num_more: int = 0, of_each: bool = True) -> tuple[str, ...]:
    """The sentences without repetition, and a count instead of those beyond the limit.

    ``num_more`` were dropped before. ``of_each``: the record keeps what each rank measured, and its problems.
    """
    distinct = tuple(dict.fromkeys(problems))
    if len(distinct) <= MAX_PROBLEMS and not num_more:
        return distinct
    more = count(max(0, len(distinct) - MAX_PROBLEMS) + num_more, "more problem")
    last = f"and {more}: the record has those of each rank" if of_each else too_many(more)
    return (*distinct[:MAX_PROBLEMS], last)


def too_many(more: str) -> str:
    """The text that replaces dropped problems of a large job, e.g. for ``3 more problems``."""
    return f"and {more}: the record has those of the ranks that it keeps whole"


def _numbers_of(text: str) -> tuple[float, ...]:
    return tuple([_value(found) for found in _NUMBER.findall(text)])


def _value(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0  # a version or an address
