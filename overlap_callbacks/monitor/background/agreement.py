"""Do all ranks measure the same window, at the same step of the job?

Where they do not, each of them still has whole blocks and step times, and their mean is of steps in different modes:
a valid figure that is wrong. So every rank hands in what it is about to measure with its recorded step, and rank 0
compares before anything is measured.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.gate.collectives import POINT_TO_POINT
from overlap_callbacks.gate.deadlock import CollectiveSequence


class WindowTerms(msgspec.Struct, frozen=True):
    """What a rank is about to measure.

    Attributes:
        step: number of the window's first step.
        options: of the schedule, by name, and the form of sequential mode (``sequential``).
        control: whether no step is serialised.
    """

    step: int
    options: dict[str, Any]
    control: bool = False

    @property
    def digest(self) -> str:
        """Equal for equal terms, on any rank."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()


class OrderMessage(msgspec.Struct, frozen=True):
    """What a rank hands in to the order check.

    Attributes:
        sequence: digest of its sequence of collectives.
        terms: what it is about to measure; None for a mode pinned by hand, in which nothing is measured.
        counts: how many collectives it had issued on each group before the recorded step, by the group's name.
    """

    sequence: str
    terms: WindowTerms | None = None
    counts: dict[str, int] = {}


def different_terms(messages: Mapping[int, OrderMessage]) -> str | None:
    """Which ranks are about to measure something else than rank 0, and what, in words; None if all do the same."""
    ours = messages[0].terms
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, message in sorted(messages.items()):
        difference = _difference(message.terms, ours)
        if difference:
            ranks_of[difference].append(rank)
    found = [f"{name_ranks(ranks)} with {difference}" for difference, ranks in ranks_of.items()]
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


def different_step(messages: Mapping[int, OrderMessage], sequences: Mapping[int, CollectiveSequence]) -> str | None:
    """Which ranks recorded another step of the job than others, in words; None if all recorded the same.

    The members of a group have issued as many collectives on it when they are at the same step. Backends count sends
    and receives too, and their number differs from rank to rank: groups that have any in the step prove nothing.

    Args:
        messages: of all ranks.
        sequences: the sequence of each rank.
    """
    proves_nothing = _with_messages(sequences.values())
    counts: dict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    for rank, sequence in sorted(sequences.items()):
        for name, members in sequence.groups.items():
            if rank in members and name in messages[rank].counts and name not in proves_nothing:
                counts[name, members][rank] = messages[rank].counts[name]
    for (name, members), by_rank in sorted(counts.items()):
        first = min(by_rank)
        others = [rank for rank, count in sorted(by_rank.items()) if count != by_rank[first]]
        if others:
            label = sequences[first].labels.get(name, name)
            return (
                f"{name_ranks(others)} recorded another step of the job than rank {first}: {by_rank[others[0]]} "
                f"collectives came before it on group {label!r} (ranks {members[0]} to {members[-1]}) on rank "
                f"{others[0]}, and {by_rank[first]} on rank {first}"
            )
    return None


def _with_messages(sequences: Iterable[CollectiveSequence]) -> set[str]:
    """Names of the groups on which a rank sends or receives in the step."""
    return {item.group for sequence in sequences for item in sequence.items if item.operator in POINT_TO_POINT}
