"""Do all ranks measure the same window, at the same step of the job?

Where they do not, each of them still has whole blocks and step times, and their mean is of steps in different modes:
a valid figure that is wrong. So every rank hands in what it is about to measure with its recorded step, and rank 0
compares before anything is measured.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.gate.collectives import POINT_TO_POINT
from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.monitor.background.tree import Run, in_runs


class WindowTerms(msgspec.Struct, frozen=True):
    """What a rank is about to measure.

    Attributes:
        step: number of the window's first step.
        options: of the schedule, by name, the form of sequential mode (``sequential``) and the ``arms``.
        control: whether it is an A/A run, in which no step is serialised.
        serialises: whether the window's arm has sequential steps.
    """

    step: int
    options: dict[str, Any]
    control: bool = False
    serialises: bool = True

    @property
    def digest(self) -> str:
        """Equal for equal terms, on any rank."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()


class GroupNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank's sequence has to do with one group, in short: enough where all ranks agree.

    Attributes:
        label: name of the group for people.
        first, last: of its ranks; -1 where they are not known.
        members: digest of its ranks.
        places: digest of the places in the sequence that its collectives have.
        exchanges: whether the rank sends or receives on it.
    """

    label: str
    first: int
    last: int
    members: str
    places: str
    exchanges: bool

    @classmethod
    def of(cls, sequence: CollectiveSequence) -> dict[str, GroupNote]:
        """By the group's name."""
        places: dict[str, list[int]] = {name: [] for name in sequence.groups}
        for place, item in enumerate(sequence.items):
            places[item.group].append(place)
        exchanging = {item.group for item in sequence.items if item.operator in POINT_TO_POINT}
        return {
            name: cls(
                label=sequence.labels.get(name, name),
                first=ranks[0] if ranks else -1,
                last=ranks[-1] if ranks else -1,
                members=_digest(array("q", ranks).tobytes()),
                places=_digest(array("q", places[name]).tobytes()),
                exchanges=name in exchanging,
            )
            for name, ranks in sequence.groups.items()
        }


class OrderMessage(msgspec.Struct, frozen=True):
    """What a rank hands in to the order check, beside its sequence.

    Attributes:
        sequence: digest of its sequence of collectives.
        terms: what it is about to measure; None for a mode pinned by hand, in which nothing is measured.
        counts: how many collectives it had issued on each group before the recorded step, by the group's name.
        groups: those on which its sequence has anything, by name.
        incomplete, compiled, communicates: as in ``CollectiveSequence``.
    """

    sequence: str
    terms: WindowTerms | None = None
    counts: dict[str, int] = {}
    groups: dict[str, GroupNote] = {}
    incomplete: bool = False
    compiled: bool = False
    communicates: bool = True

    @classmethod
    def of(
        cls, sequence: CollectiveSequence, terms: WindowTerms | None = None, counts: Mapping[str, int] | None = None
    ) -> OrderMessage:
        """Of a rank's own sequence."""
        return cls(
            sequence=sequence.digest,
            terms=terms,
            counts=dict(counts or {}),
            groups=GroupNote.of(sequence),
            incomplete=sequence.incomplete,
            compiled=sequence.compiled,
            communicates=sequence.communicates,
        )


class HandedIn(NamedTuple):
    """A message, and the ranks that hand it in, as the first and the last of each run.

    What all ranks agree on is found from these few, whatever the number of ranks.
    """

    message: OrderMessage
    runs: list[Run]

    @property
    def first_rank(self) -> int:
        return self.runs[0][0]


def different_terms(handed_in: Sequence[HandedIn]) -> str | None:
    """Which ranks are about to measure something else than rank 0, and what, in words; None if all do the same.

    Args:
        handed_in: of all ranks, that of rank 0 first.
    """
    ours = handed_in[0].message.terms
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for message, runs in handed_in:
        if difference := _difference(message.terms, ours):
            ranks_of[difference].extend(in_runs(runs))
    found = [f"{name_ranks(sorted(ranks))} with {difference}" for difference, ranks in ranks_of.items()]
    return "; ".join(found) if found else None


def _difference(theirs: WindowTerms | None, ours: WindowTerms | None) -> str:
    """In what a rank's terms differ from rank 0's; empty if in nothing."""
    if theirs is None or ours is None:
        return ""  # the keys of windows differ from those of pinned modes
    options = {"first step of the window": theirs.step, **theirs.options}
    expected = {"first step of the window": ours.step, **ours.options}
    return ", ".join(
        f"{name}={options.get(name)!r} (rank 0: {expected.get(name)!r})"
        for name in dict.fromkeys([*expected, *options])
        if options.get(name) != expected.get(name)
    )


def different_step(handed_in: Sequence[HandedIn]) -> str | None:
    """Which ranks recorded another step of the job than others, in words; None if all recorded the same.

    The members of a group have issued as many collectives on it when they are at the same step. Backends count sends
    and receives too, and their number differs from rank to rank: groups that have any in the step prove nothing.
    """
    proves_nothing = {name for message, _ in handed_in for name, note in message.groups.items() if note.exchanges}
    counts: dict[tuple[str, str], list[tuple[int, HandedIn, GroupNote]]] = defaultdict(list)
    for alike in handed_in:
        for name, note in alike.message.groups.items():
            if note.first >= 0 and name in alike.message.counts and name not in proves_nothing:
                counts[name, note.members].append((alike.message.counts[name], alike, note))
    for _, found in sorted(counts.items()):
        expected, lowest, note = min(found, key=lambda of: of[1].first_rank)
        first = lowest.first_rank
        others = sorted((rank, count) for count, of, _ in found if count != expected for rank in in_runs(of.runs))
        if others:
            return (
                f"{name_ranks([rank for rank, _ in others])} recorded another step of the job than rank {first}: "
                f"{others[0][1]} collectives came before it on group {note.label!r} (ranks {note.first} to "
                f"{note.last}) on rank {others[0][0]}, and {expected} on rank {first}"
            )
    return None


def in_step(messages: Iterable[OrderMessage]) -> bool:
    """Whether all members of each group have its collectives at the same places of their sequences.

    Then their orders have no cycle, for what waits comes after what it waits for on every rank. Sequences with sends or
    receives are not told of: the two ends of a message are at places of their own.
    """
    notes: dict[str, GroupNote] = {}
    for message in messages:
        for name, note in message.groups.items():
            other = notes.setdefault(name, note)
            if note.exchanges or (note.members, note.places) != (other.members, other.places):
                return False
    return True


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
