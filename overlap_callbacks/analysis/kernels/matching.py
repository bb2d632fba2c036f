"""Matches the communication kernels of a profile with the collectives that the gate saw, in order within each lane.

A lane is a stream of the device, or a thread of Gloo. A lane runs in order. Two lanes do not: a collective on one of
them may start before another that was issued earlier. So a match needs to know which collectives run on which lane:

- NCCL runs an asynchronous collective, a send or a receive on a stream of its communicator. Such a lane is its group's.
- It runs a synchronous collective (``async_op=False``, since torch 2.8) on the stream that issued it. All groups share
  those lanes. FSDP2 has one for its all-gathers and one for its reduce-scatters; others run between the compute.
- Gloo's threads are each of one group; sends and receives of all groups share one.

The lanes are learned from steps whose kernels start in the order of issue: sequential ones. Then each step is matched
lane by lane. Where a lane has another number of kernels than of collectives, its order tells nothing; then the lane's
usual dimension counts, if it has one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from overlap_callbacks.analysis.kernels.accounting import accounts, copies_of
from overlap_callbacks.analysis.kernels.issued import (
    SEND_RECV,
    Expected,
    Issued,
    expected_kernels,
    is_device_profile,
    readings,
    runs_as,
)
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind

# A lane has a usual dimension, and a collective a usual lane, if this share of what was learned agrees.
_AGREEMENT = 0.9

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Match:
    """What the gate's log tells about a kernel.

    Attributes:
        kind: of its collective; None where the log leaves several.
        dimension: of parallelism; None where the log leaves several.
        size_bytes: the larger of what its collective reads and writes; None where the log leaves several.
        group: name of its process group; None where order does not tell which collective it is.
    """

    kind: str | None = None
    dimension: str | None = None
    size_bytes: int | None = None
    group: str | None = None


@dataclass(frozen=True)
class _Kernel:
    row: int
    kind: str
    lane: int


def matched(kernels: KernelTable, issued: Issued, serialised: Collection[int] = ()) -> dict[int, Match]:
    """What the gate's log tells about the communication kernels of the profiled steps, by row.

    Args:
        kernels: the whole profile.
        issued: the collectives of each step, by its index, in the order of issue.
        serialised: indices of the steps in which the gate made collectives wait for each other. If there are none,
            lanes are learned from all steps.

    Returns:
        A match for each communication kernel of the steps in ``issued``, and for the copies that the log explains.
    """
    on_device = is_device_profile(kernels, issued)
    kernels_of = _by_step(kernels, on_device)
    steps = {
        step: (kernels_of.get(step, []), expected_kernels(collectives, on_device=on_device))
        for step, collectives in issued.items()
    }
    lanes = _Lanes(on_device)
    for chosen in (set(serialised) & set(steps), set(steps)):
        for step in sorted(chosen):
            lanes.learn(*steps[step])
        if lanes.votes:
            break
    found: dict[int, Match] = {}
    for step_kernels, expected in steps.values():
        for part_kernels, part_expected in lanes.parts(step_kernels, expected):
            for kernel, match in zip(part_kernels, lanes.match(part_kernels, part_expected), strict=True):
                found[kernel.row] = match
    return found | _matched_copies(kernels, issued)


def _matched_copies(kernels: KernelTable, issued: Issued) -> dict[int, Match]:
    """The matches of copies: they are the work of the collectives of their step that have no kernel."""
    rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & (kernels.step >= 0) & copies_of(kernels))
    found = {}
    if len(rows):
        by_step = accounts(kernels, issued)
        for row, step in zip(rows.tolist(), kernels.step[rows].tolist(), strict=True):
            account = by_step.get(step)
            if account is not None and account.copies_explain:
                parts = account.lacking_copied
                found[row] = Match(_only(part.kind for part in parts), _only(part.dimension for part in parts))
    return found


def _by_step(kernels: KernelTable, on_device: bool) -> dict[int, list[_Kernel]]:
    """The communication kernels of each step, in order of their starts; without copies."""
    rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & (kernels.step >= 0) & ~copies_of(kernels))
    rows = rows[np.argsort(kernels.intervals.start_ns[rows], kind="stable")]
    by_step: dict[int, list[_Kernel]] = defaultdict(list)
    kinds = [runs_as(kind, on_device=on_device) for kind in kernels.collectives]  # as before a relabelling
    columns = (kernels.step[rows], rows, kernels.collective[rows], kernels.lane[rows])
    for step, row, kind, lane in zip(*[column.tolist() for column in columns], strict=True):
        by_step[step].append(_Kernel(row, kinds[kind], lane))
    return by_step


def _in_order(kinds: Sequence[str], expected: Sequence[Expected]) -> list[Expected] | None:
    """What each kernel is if they ran in the order of issue; None if the numbers or the kinds do not allow that."""
    for way in readings(expected):
        if len(way) == len(kinds) and all(part.may_run_as(kind) for kind, part in zip(kinds, way, strict=True)):
            return way
    return None


def _in_order_of_kind(kinds: Sequence[str], expected: Sequence[Expected]) -> list[Expected] | None:
    """The same if only kernels of one kind ran in the order of issue."""
    for way in readings(expected):
        if Counter(kinds) == Counter(part.runs_as for part in way):
            waiting = _grouped(way, lambda part: part.runs_as)
            following = {kind: iter(parts) for kind, parts in waiting.items()}
            return [next(following[kind]) for kind in kinds]
    return None


def _grouped(values: Iterable[_Value], key: Callable[[_Value], str]) -> dict[str, list[_Value]]:
    groups: dict[str, list[_Value]] = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    return groups


def _only(values: Iterable[str]) -> str | None:
    """The value that all have; None if they differ, or there are none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


class _Lanes:
    """Which collectives run on which lane.

    Args:
        on_device: whether lanes are streams; else they are threads.

    Attributes:
        votes: how often a lane ran each kind of collective of each group, in steps that were matched in order.
    """

    def __init__(self, on_device: bool) -> None:
        self.votes: dict[int, Counter[Expected]] = defaultdict(Counter)
        self._on_device = on_device
        self._classes: dict[Expected, Expected] = {}
        self._places: tuple[dict[int, str], dict[Expected, str]] | None = None

    def learn(self, kernels: Sequence[_Kernel], expected: Sequence[Expected]) -> None:
        """Note which lanes a step's collectives ran on, if its kernels can be matched in order."""
        for kernel, part in zip(kernels, _in_order([k.kind for k in kernels], expected) or (), strict=False):
            if self._has_lane(kernel.kind):
                self.votes[kernel.lane][self._class(part)] += 1

    def parts(
        self, kernels: Sequence[_Kernel], expected: Sequence[Expected]
    ) -> list[tuple[list[_Kernel], list[Expected]]]:
        """A step in parts, each with lanes and collectives that belong together, by what was learned."""
        if self._places is None:
            self._places = self._learned_places()
        of_lane, of_class = self._places

        def place_of_kernel(kernel: _Kernel) -> str:
            return of_lane.get(kernel.lane, "") if self._has_lane(kernel.kind) else SEND_RECV

        def place_of_expected(part: Expected) -> str:
            return of_class.get(self._class(part), "") if self._has_lane(part.kind) else SEND_RECV

        own, theirs = _grouped(kernels, place_of_kernel), _grouped(expected, place_of_expected)
        return [(own[place], theirs.get(place, [])) for place in own]

    def match(self, kernels: Sequence[_Kernel], expected: Sequence[Expected]) -> list[Match]:
        """What each kernel of a part is."""
        kinds = [kernel.kind for kernel in kernels]
        found = _in_order(kinds, expected) or _in_order_of_kind(kinds, expected)
        if found is not None:
            return [Match(part.kind, part.dimension, part.size_bytes or None, part.group) for part in found]
        return [self._without_order(kernel, set(kinds), expected) for kernel in kernels]

    def _without_order(self, kernel: _Kernel, kinds: Collection[str], expected: Sequence[Expected]) -> Match:
        """What can be told of a kernel where the numbers differ."""
        possible = [
            part
            for part in expected
            if part.may_run_as(kernel.kind)
            and part.kind != "barrier"
            # A collective runs as another kind (an all-gather as broadcasts) only where none has its own name.
            and (part.runs_as not in kinds or part.runs_as == kernel.kind)
        ]
        dimension = _only(part.dimension for part in possible)
        votes = self.votes.get(kernel.lane)
        if votes and self._has_lane(kernel.kind):
            by_dimension: Counter[str] = Counter()
            for part, count in votes.items():
                by_dimension[part.dimension] += count
            usual, count = by_dimension.most_common(1)[0]
            dimension = usual if count >= _AGREEMENT * sum(by_dimension.values()) else dimension
        return Match(_only(part.kind for part in possible), dimension)

    def _has_lane(self, kind: str) -> bool:
        """Whether lanes tell groups: the sends and receives of all groups share one of Gloo's threads."""
        return self._on_device or kind != SEND_RECV

    def _class(self, part: Expected) -> Expected:
        """What runs on the same lanes: all of a group on its own lane, else one kind of collective of a group."""
        found = self._classes.get(part)
        if found is None:
            kind = "" if part.own_lane else part.kind
            found = self._classes[part] = Expected(kind, "", part.group, part.dimension, part.own_lane)
        return found

    def _learned_places(self) -> tuple[dict[int, str], dict[Expected, str]]:
        """Names of places, where a place is a set of lanes and of classes that run on no other.

        Returns:
            The place of each lane, and the place of each class.
        """
        of_lane: dict[int, str] = {}
        of_class: dict[Expected, str] = {}
        for lane, votes in self.votes.items():
            owner = votes.most_common(1)[0][0]
            if owner.own_lane:
                of_lane[lane] = of_class[owner] = f"group {owner.group}"
        totals: Counter[Expected] = sum(self.votes.values(), Counter[Expected]())
        shared: dict[int, set[Expected]] = {
            lane: {part for part, n in votes.items() if not part.own_lane and n > (1 - _AGREEMENT) * totals[part]}
            for lane, votes in self.votes.items()
            if lane not in of_lane
        }
        while shared:  # lanes that share a class belong together
            lanes, classes = {next(iter(shared))}, set[Expected]()
            while True:
                classes = classes.union(*[shared[lane] for lane in lanes])
                joined = {lane for lane in shared if lane in lanes or shared[lane] & classes}
                if joined == lanes:
                    break
                lanes = joined
            place = f"lane {min(lanes)}"
            of_lane |= dict.fromkeys(lanes, place)
            of_class |= dict.fromkeys(classes, place)
            shared = {lane: parts for lane, parts in shared.items() if lane not in lanes}
        return of_lane, of_class
