"""Pairs a profile's communication kernels with the collectives that the gate saw, and lists those without a partner.

Within a lane (a stream of the device, or a thread of Gloo) kernels run in the order of issue; across lanes they do not:

- NCCL runs an asynchronous collective, a send or a receive on a stream of its communicator.
- It runs a synchronous one (``async_op=False``, since torch 2.8) on the issuing stream, which all groups share. FSDP2
  has one stream for its all-gathers and one for its reduce-scatters.
- Each of Gloo's threads serves one group; sends and receives of all groups share one.

Lanes are learned from steps whose kernels start in the order of issue: sequential ones. Then each step is paired lane
by lane. If a lane's kernels and collectives differ in number, a kernel gets only what all its candidates share, and its
lane's usual dimension if there is one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.dimension_rules import UNKNOWN
from overlap_callbacks.analysis.kernels.issued import (
    COPIED,
    SEND_RECV,
    Expected,
    Issued,
    IssuedGroup,
    expected_kernels,
    is_device_profile,
    readings,
    runs_as,
)
from overlap_callbacks.analysis.kernels.table import (
    Indices,
    KernelTable,
    Kind,
    StringTable,
    as_communication,
    copies_of,
    may_communicate,
)
from overlap_callbacks.analysis.sums import grouped

PEER_COPY = "peer_copy"

# A lane has a usual dimension, and a collective a usual lane, if this share of the learned pairs agrees.
_AGREEMENT = 0.9
# Kernel kinds shared by several kinds of collectives. NCCL runs all-to-alls, gathers and scatters as
# ``ncclDevKernel_SendRecv``; RCCL has one name for all, ``ncclDevKernel_Generic``.
_AMBIGUOUS = (SEND_RECV, PEER_COPY, name_rules.OTHER)


class AlignedStep(NamedTuple):
    """One step.

    Attributes:
        expected: what its collectives should launch, in order of issue.
        copies: rows of the copies that communicate.
        without_kernel: collectives, blocks and batches without a kernel; barriers need none.
        surplus: kernels of each kind (by their names) that belong to no collective.
    """

    expected: Sequence[Expected]
    copies: Indices
    without_kernel: tuple[Expected, ...]
    surplus: Mapping[str, int]

    @property
    def maybe_copied(self) -> tuple[Expected, ...]:
        """Those without a kernel that copy engines may have carried out."""
        return tuple([part for part in self.without_kernel if part.kind in COPIED])

    @property
    def copies_explain(self) -> bool:
        """Whether the copies explain the collectives without a kernel: at least one copy each."""
        return 0 < len(self.maybe_copied) <= len(self.copies)

    @property
    def missing(self) -> tuple[Expected, ...]:
        """Collectives with neither a kernel nor copies."""
        explained = COPIED if self.copies_explain else frozenset[str]()
        return tuple([part for part in self.without_kernel if part.kind not in explained])


@dataclass(frozen=True)
class Alignment:
    """A profile paired with the gate's log.

    Attributes:
        kernels: the profile, with the log's kinds of collectives, and copies that are a collective's work as
            communication.
        on_device: whether communication is kernels of a device; otherwise it is a library's ranges on the host.
        issued: the log.
        steps: what should run in each of its steps, and what is left over.
        by_row: the collective of each communication kernel of these steps, by row; unknown fields are empty.
    """

    kernels: KernelTable
    on_device: bool
    issued: Issued
    steps: Mapping[int, AlignedStep]
    by_row: Mapping[int, Expected]

    @cached_property
    def groups(self) -> dict[str, IssuedGroup]:
        """The process groups by their names."""
        return {collective.group.name: collective.group for calls in self.issued.values() for collective in calls}

    @cached_property
    def dimensions(self) -> tuple[Indices, tuple[str, ...]]:
        """Each row's dimension as an index into the names returned with it; -1 for rows that do not communicate."""
        labels, dimension = StringTable(), np.full(len(self.kernels), -1, dtype=np.int64)
        for row in np.flatnonzero(self.kernels.kind == Kind.COMMUNICATION).tolist():
            part = self.by_row.get(row)
            dimension[row] = labels[(part and part.dimension) or UNKNOWN]
        return dimension, labels.texts


def align(
    kernels: KernelTable, issued: Issued, serialised: Collection[int] = (), whole: Collection[int] | None = None
) -> Alignment:
    """Pair the communication kernels of a profile with the collectives that the gate saw.

    Args:
        kernels: the whole profile.
        issued: the collectives of each profiled step, by its index, in the order of issue.
        serialised: steps in which the gate serialised; without any, lanes are learned from all.
        whole: steps whose log is complete; only there may further copies be a collective's work. None for all.
    """
    on_device = is_device_profile(kernels, issued)
    in_order = np.argsort(kernels.intervals.start_ns, kind="stable")
    in_order = in_order[((kernels.kind == Kind.COMMUNICATION) & ~copies_of(kernels))[in_order]]
    sides = {
        step: _Sides(in_order[kernels.step[in_order] == step], expected_kernels(calls, on_device=on_device))
        for step, calls in issued.items()
    }
    steps = _left_over(kernels, sides, on_device=on_device)
    if on_device and (copies := _further_copies(kernels, steps, issued if whole is None else whole)):
        kernels = as_communication(kernels, copies)
        steps = _left_over(kernels, sides, on_device=on_device)
    by_row = _paired(kernels, sides, set(serialised), on_device=on_device)
    for step in steps.values():
        if step.copies_explain:
            by_row |= dict.fromkeys(step.copies.tolist(), _in_common(step.maybe_copied))
    if on_device:
        kernels = _relabelled(kernels, by_row, steps.values())
        steps = _left_over(kernels, sides, on_device=on_device)
    return Alignment(kernels, on_device, issued, steps, by_row)


class _Sides(NamedTuple):
    """The rows of a step's communication kernels, ordered by start, without copies; and the log's side of the step."""

    rows: Indices
    expected: Sequence[Expected]


# -- leftovers


def _left_over(kernels: KernelTable, sides: Mapping[int, _Sides], *, on_device: bool) -> dict[int, AlignedStep]:
    """What has no partner in each step, judging only by the numbers of kernels of each kind."""
    kinds = [runs_as(kind, on_device=on_device) for kind in kernels.collectives]
    copied = (kernels.kind == Kind.COMMUNICATION) & copies_of(kernels)
    found = {}
    for step, (rows, expected) in sides.items():
        left = Counter([kinds[kind] for kind in kernels.collective[rows].tolist()])
        unmatched = _take_all(left, expected)
        surplus = {kind: count for kind, count in left.items() if count}
        found[step] = AlignedStep(expected, np.flatnonzero(copied & (kernels.step == step)), unmatched, surplus)
    return found


def _take_all(left: Counter[str], expected: Sequence[Expected]) -> tuple[Expected, ...]:
    """Match each collective with a kernel of its own name, or one it may run as. Returns those without one."""

    def take(kinds: Iterable[str]) -> bool:
        kind = next((kind for kind in kinds if left[kind] > 0), None)
        if kind is not None:
            left[kind] -= 1
        return kind is not None

    unmatched = [part for part in expected if part.kind != "barrier" and not take((part.runs_as, part.kind))]
    unmatched = [part for part in unmatched if not take([kind for kind in left if part.may_run_as(kind)])]
    # A barrier is one kernel or none, and a block is one or more.
    for part in expected:
        for _ in range(1 if part.kind == "barrier" else part.members - 1):
            take((part.runs_as, *[kind for kind in left if part.may_run_as(kind)]))
    return tuple(unmatched)


def _further_copies(kernels: KernelTable, steps: Mapping[int, AlignedStep], whole: Collection[int]) -> dict[int, str]:
    """Copies within the device that did the work of collectives without a kernel: the kind of each, by row.

    All steps must agree: if one has fewer such copies than collectives to explain, all copies stay plain copies.
    """
    needed = {step: len(steps[step].maybe_copied) - len(steps[step].copies) for step in whole}
    candidates = may_communicate(kernels)
    found = {step: np.flatnonzero(candidates & (kernels.step == step)) for step, count in needed.items() if count > 0}
    if any(len(rows) < needed[step] for step, rows in found.items()):
        return {}
    return {row: PEER_COPY for rows in found.values() for row in rows.tolist()}


# -- pairs


class _Kernel(NamedTuple):
    row: int
    kind: str
    lane: int


def _paired(
    kernels: KernelTable, sides: Mapping[int, _Sides], serialised: set[int], *, on_device: bool
) -> dict[int, Expected]:
    """The collective of each kernel, by row."""
    kinds = [runs_as(kind, on_device=on_device) for kind in kernels.collectives]
    ran: dict[int, list[_Kernel]] = {}
    for step, (rows, _) in sides.items():
        columns = zip(rows.tolist(), kernels.collective[rows].tolist(), kernels.lane[rows].tolist(), strict=True)
        ran[step] = [_Kernel(row, kinds[kind], lane) for row, kind, lane in columns]
    lanes = _Lanes(on_device)
    for chosen in (serialised & set(sides), set(sides)):
        for step in sorted(chosen):
            lanes.learn(ran[step], sides[step].expected)
        if lanes.votes:
            break
    found: dict[int, Expected] = {}
    for step, side in sides.items():
        for own, expected in lanes.parts(ran[step], side.expected):
            found |= zip([kernel.row for kernel in own], lanes.match(own, expected), strict=True)
    return found


def _in_order(kinds: Sequence[str], expected: Sequence[Expected]) -> list[Expected] | None:
    """What each kernel is if they ran in order of issue; None if the numbers or the kinds rule that out."""
    for reading in readings(expected):
        if len(reading) == len(kinds) and all(part.may_run_as(kind) for kind, part in zip(kinds, reading, strict=True)):
            return reading
    return None


def _in_order_of_kind(kinds: Sequence[str], expected: Sequence[Expected]) -> list[Expected] | None:
    """The same if order of issue held only among kernels of the same kind."""
    for reading in readings(expected):
        following = grouped(reading, lambda part: part.runs_as)
        if Counter(kinds) == {kind: len(parts) for kind, parts in following.items()}:
            return [following[kind].pop(0) for kind in kinds]
    return None


def _in_common(parts: Sequence[Expected]) -> Expected:
    """The kind and the dimension that all share; empty if they differ."""
    kinds, dimensions = {part.kind for part in parts}, {part.dimension for part in parts}
    kind, dimension = (found.pop() if len(found) == 1 else "" for found in (kinds, dimensions))
    return Expected(kind, "", "", dimension, own_lane=False)


class _Lanes:
    """Learns which collectives run on which lane.

    ``votes``: how often a lane ran each kind of collective of each group, in steps matched in order.
    """

    def __init__(self, on_device: bool) -> None:
        self.votes: dict[int, Counter[Expected]] = defaultdict(Counter)
        self._on_device = on_device
        self._classes: dict[Expected, Expected] = {}

    def learn(self, kernels: Sequence[_Kernel], expected: Sequence[Expected]) -> None:
        """Note the lanes of a step's collectives, if its kernels can be matched in order."""
        for kernel, part in zip(kernels, _in_order([k.kind for k in kernels], expected) or (), strict=False):
            if self._has_lane(kernel.kind):
                self.votes[kernel.lane][self._class(part)] += 1

    def parts(
        self, kernels: Sequence[_Kernel], expected: Sequence[Expected]
    ) -> list[tuple[list[_Kernel], list[Expected]]]:
        """Split a step into parts: the kernels of some lanes, and the collectives that run on these as learned."""
        of_lane, of_class = self._places

        def place_of_kernel(kernel: _Kernel) -> str:
            return of_lane.get(kernel.lane, "") if self._has_lane(kernel.kind) else SEND_RECV

        def place_of_expected(part: Expected) -> str:
            return of_class.get(self._class(part), "") if self._has_lane(part.kind) else SEND_RECV

        own, theirs = grouped(kernels, place_of_kernel), grouped(expected, place_of_expected)
        # Where a framework is sequential by itself, its collectives have another lane there (FSDP2: that of compute).
        # Those without a kernel ran on the lanes that are not known, if the kind of a kernel tells the group there.
        left = [part for part in expected if place_of_expected(part) not in own]
        if "" in own and len({(part.runs_as, part.group) for part in left}) == len({part.runs_as for part in left}):
            theirs[""] = [part for part in expected if place_of_expected(part) in ("", *theirs.keys() - own.keys())]
        return [(own[place], theirs.get(place, [])) for place in own]

    def match(self, kernels: Sequence[_Kernel], expected: Sequence[Expected]) -> list[Expected]:
        """What each kernel of a part is."""
        kinds = [kernel.kind for kernel in kernels]
        found = _in_order(kinds, expected) or _in_order_of_kind(kinds, expected)
        return found or [self._without_order(kernel, set(kinds), expected) for kernel in kernels]

    def _without_order(self, kernel: _Kernel, kinds: Collection[str], expected: Sequence[Expected]) -> Expected:
        """What is known of a kernel that cannot be paired because the numbers differ."""
        found = _in_common(
            [
                part
                for part in expected
                if part.may_run_as(kernel.kind)
                and part.kind != "barrier"
                # A collective runs as another kind (an all-gather as broadcasts) only if no kernel has its own name.
                and (part.runs_as not in kinds or part.runs_as == kernel.kind)
            ]
        )
        votes = self.votes.get(kernel.lane)
        if votes and self._has_lane(kernel.kind):
            by_dimension: Counter[str] = Counter()
            for part, count in votes.items():
                by_dimension[part.dimension] += count
            usual, count = by_dimension.most_common(1)[0]
            if count >= _AGREEMENT * votes.total():
                return msgspec.structs.replace(found, dimension=usual)
        return found

    def _has_lane(self, kind: str) -> bool:
        """Whether lanes identify groups: the sends and receives of all groups share one of Gloo's threads."""
        return self._on_device or kind != SEND_RECV

    def _class(self, part: Expected) -> Expected:
        """The collectives that share lanes with this one: all of its group if that has its own lane, else its kind."""
        found = self._classes.get(part)
        if found is None:
            kind = "" if part.own_lane else part.kind
            found = self._classes[part] = Expected(kind, "", part.group, part.dimension, part.own_lane)
        return found

    @cached_property
    def _places(self) -> tuple[dict[int, str], dict[Expected, str]]:
        """The place of each lane and class. A place is a set of lanes plus the classes that run only on them."""
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


# -- kinds


def _relabelled(kernels: KernelTable, by_row: Mapping[int, Expected], steps: Iterable[AlignedStep]) -> KernelTable:
    """The same kernels; if a name may mean several kinds of collectives, the kernel gets the kind from the log."""
    ambiguous = [kernels.collectives.index(kind) for kind in _AMBIGUOUS if kind in kernels.collectives]
    rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & np.isin(kernels.collective, ambiguous))
    if not len(rows):
        return kernels
    # If no step issued a send or a receive, an unpaired SendRecv is of the most frequent kind that runs as one.
    kinds = Counter(part.kind for step in steps for part in step.expected if part.runs_as == SEND_RECV)
    usual = kinds.most_common(1)[0][0] if kinds and SEND_RECV not in kinds else ""
    labels, collective = StringTable(kernels.collectives), kernels.collective.copy()
    for row in rows.tolist():
        kind = by_row[row].kind if row in by_row else ""
        if kernels.collectives[collective[row]] == SEND_RECV:
            kind = kind or usual
        if kind and kind != name_rules.OTHER:
            collective[row] = labels[kind]
    return dataclasses.replace(kernels, collective=collective, collectives=labels.texts)
