"""Do all ranks measure the same window, at the same step of the job?

Where they do not, each of them still has whole blocks and step times, and their mean is of steps in different modes:
a valid figure that is wrong. So every rank hands in what it is about to measure with its recorded steps, and rank 0
compares before anything is measured.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.analysis.rank_set import Run, in_runs
from overlap_callbacks.gate.collectives import POINT_TO_POINT
from overlap_callbacks.gate.deadlock import CollectiveSequence


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


class RecordedKinds(NamedTuple):
    """What a rank's recorded steps issued.

    Attributes:
        kinds: the sequence of each kind of step, in the order of their first steps.
        of_steps: the kind of each step, as its place among them.
    """

    kinds: tuple[CollectiveSequence, ...]
    of_steps: tuple[int, ...] = (0,)

    def granted(self, only: int) -> tuple[CollectiveSequence, ...]:
        """The kinds that a ruling allows.

        Args:
            only: as in ``Ruling``.
        """
        return self.kinds if only < 0 else (self.kinds[kind_of_step(self.of_steps, only)],)


def kind_of_step(of_steps: Sequence[int], step: int) -> int:
    """The kind of a recorded step; of the last one where a rank recorded fewer."""
    return of_steps[min(step, len(of_steps) - 1)]


class GroupNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank's sequences have to do with one group, in short: enough where all ranks agree.

    Attributes:
        label: name of the group for people.
        first, last: of its ranks; -1 where they are not known.
        members: digest of its ranks.
        places: digest of the places in the sequences that its collectives have.
        exchanges: whether the rank sends or receives on it.
        per_step: how many collectives each recorded step issued on it.
    """

    label: str
    first: int
    last: int
    members: str
    places: str
    exchanges: bool
    per_step: tuple[int, ...] = ()

    @classmethod
    def of(cls, recorded: RecordedKinds) -> dict[str, GroupNote]:
        """By the group's name."""
        groups = {name: ranks for kind in recorded.kinds for name, ranks in kind.groups.items()}
        labels = {name: label for kind in recorded.kinds for name, label in kind.labels.items()}
        items = [item for kind in recorded.kinds for item in kind.items]
        places: dict[str, list[int]] = {name: [] for name in groups}
        for place, item in enumerate(items):
            places[item.group].append(place)
        exchanging = {item.group for item in items if item.operator in POINT_TO_POINT}
        numbers = [Counter([item.group for item in kind.items]) for kind in recorded.kinds]
        return {
            name: cls(
                label=labels.get(name, name),
                first=ranks[0] if ranks else -1,
                last=ranks[-1] if ranks else -1,
                members=_digest(array("q", ranks).tobytes()),
                places=_digest(array("q", places[name]).tobytes()),
                exchanges=name in exchanging,
                per_step=tuple([numbers[kind][name] for kind in recorded.of_steps]),
            )
            for name, ranks in groups.items()
        }


class OrderMessage(msgspec.Struct, frozen=True):
    """What a rank hands in to the order check, beside its sequences.

    Attributes:
        kinds: digests of the sequences of its kinds of steps.
        of_steps: as in ``RecordedKinds``.
        terms: what it is about to measure; None for a mode pinned by hand, in which nothing is measured.
        counts: how many collectives it had issued on each group before the recorded steps, by the group's name.
        groups: those on which its sequences have anything, by name.
        incomplete, compiled, communicates: as in ``CollectiveSequence``, of any of its sequences.
    """

    kinds: tuple[str, ...]
    of_steps: tuple[int, ...] = (0,)
    terms: WindowTerms | None = None
    counts: dict[str, int] = {}
    groups: dict[str, GroupNote] = {}
    incomplete: bool = False
    compiled: bool = False
    communicates: bool = True

    @classmethod
    def of(
        cls, recorded: RecordedKinds, terms: WindowTerms | None = None, counts: Mapping[str, int] | None = None
    ) -> OrderMessage:
        """Of a rank's own sequences."""
        return cls(
            kinds=tuple([kind.digest for kind in recorded.kinds]),
            of_steps=recorded.of_steps,
            terms=terms,
            counts=dict(counts or {}),
            groups=GroupNote.of(recorded),
            incomplete=any(kind.incomplete for kind in recorded.kinds),
            compiled=any(kind.compiled for kind in recorded.kinds),
            communicates=any(kind.communicates for kind in recorded.kinds),
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
    """Which ranks recorded other steps of the job than others, in words; None if all recorded the same.

    The members of a group have issued as many collectives on it when they are at the same step, and issue as many in
    each step. Backends count sends and receives too, and their number differs from rank to rank: groups that have any
    in the steps prove nothing.
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
        for _, of, other in found:
            if other.per_step != note.per_step:
                return (
                    f"rank {of.first_rank} and rank {first} recorded steps of different kinds: their collectives on "
                    f"group {note.label!r} (ranks {note.first} to {note.last}), step by step, are "
                    f"{_listed(other.per_step)} on rank {of.first_rank}, and {_listed(note.per_step)} on rank {first}"
                )
    return None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def in_step(messages: Iterable[OrderMessage]) -> bool:
    """Whether all members of each group have its collectives at the same places of their sequences.

    Then their orders have no cycle, for what waits comes after what it waits for on every rank. Sequences with sends or
    receives are not told of: the two ends of a message are at places of their own. Nor are several kinds of steps,
    which may meet in one step.
    """
    notes: dict[str, GroupNote] = {}
    for message in messages:
        if len(message.kinds) > 1:
            return False
        for name, note in message.groups.items():
            other = notes.setdefault(name, note)
            if note.exchanges or (note.members, note.places) != (other.members, other.places):
                return False
    return True


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
