"""The gate's log of one step, and the sequences of collectives that it may serialise."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.gate.serialiser import NotSerialised
from overlap_callbacks.instruments import clocks


class StepRecorder:
    """Records at most ``capacity`` calls of one step, in preallocated storage. Threads may share it."""

    def __init__(self, capacity: int) -> None:
        self._storage: list[Collective | None] = [None] * capacity
        self._slots = itertools.count()  # next() is atomic under the GIL, so threads never share a slot

    def append(self, call: Collective) -> None:
        slot = next(self._slots)
        if slot < len(self._storage):
            self._storage[slot] = call

    @property
    def any_seen(self) -> bool:
        """Whether there was a call since the last ``drain``."""
        return bool(self._storage) and self._storage[0] is not None

    def drain(self) -> tuple[tuple[Collective, ...], int]:
        """The calls since the last ``drain``, in order of issue, and how many did not fit."""
        used = next(self._slots)
        self._slots = itertools.count()
        kept = min(used, len(self._storage))
        calls = self._storage[:kept]
        self._storage[:kept] = [None] * kept
        return tuple([call for call in calls if call is not None]), used - kept


@dataclass(frozen=True)
class Divergence:
    """The first collective of a sequential step that the order check had not seen at its position.

    Attributes:
        index: of the collective in its step.
        expected: operator and group there in the checked kind of step that matched until then; None at its end.
        found: the collective.
        num_kinds: how many kinds of steps were checked.
    """

    index: int
    expected: tuple[str, str] | None
    found: Collective
    num_kinds: int = 1

    def __str__(self) -> str:
        if self.num_kinds > 1:
            return (
                f"collective {self.index} of the step was {self.found}, which none of the {self.num_kinds} checked "
                f"kinds of steps has there"
            )
        if self.expected is None:
            expected = "no further collective"
        else:
            operator, group = self.expected
            expected = f"{operator} on {group!r}" if group else operator
        return f"collective {self.index} of the step was {self.found}, where the checked sequence has {expected}"


@dataclass(frozen=True)
class StepLog:
    """The gate's log of one step: collectives of the measured thread, and of autograd's threads on its behalf.

    Attributes:
        collectives: in the order of issue.
        dropped: collectives missing above because the storage was full.
        divergence: where the step left the checked sequences and serialising stopped; None if it did not.
        quiet: the step was watched, its collectives were all complete at its end, and there were no foreign ones.
        foreign: groups on which another thread, or code that bypasses the dispatcher, is known to have communicated.
        compiled: torch.compile compiled during the step. Collectives may be missing above, and the step took longer.
        not_serialised: collectives of a sequential step in the checked order that were not serialised, by reason.
        unsupported_device: device type of a collective that cannot be timed; empty if there was none.
        not_serialised_bytes: of these collectives, the larger of bytes read and written.
        captured: collectives were issued while a CUDA graph was captured: without kernels, in a longer step.
        issued_before: collectives that this rank had issued on each group when the step began, by group name;
            only groups that count and have no foreign collectives.
        issued: collectives that this rank issued in the step, on any thread, as its groups count; None if one does not.
        micro_batches: of the step; 0 if no adapter counts them.
        delays: applied to its collectives: ms, or the marks of a device around each.
    """

    collectives: tuple[Collective, ...]
    dropped: int
    divergence: Divergence | None
    quiet: bool = False
    foreign: tuple[str, ...] = ()
    compiled: bool = False
    not_serialised: Mapping[NotSerialised, int] = field(default_factory=dict)
    unsupported_device: str = ""
    not_serialised_bytes: int = 0
    captured: bool = False
    issued_before: Mapping[str, int] = field(default_factory=dict)
    issued: int | None = None
    micro_batches: int = 0
    delays: tuple[float | tuple[clocks.Mark, clocks.Mark], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it holds everything that the step communicated, and nothing unusual for a step."""
        return not (self.dropped or self.compiled or self.captured)

    @functools.cached_property
    def signature(self) -> tuple[tuple[str, str, int, int, int, int], ...]:
        """Equal for steps of one kind, which issue the same collectives in the same order."""
        return tuple([(c.operator, c.group.name, c.coalesced, c.peer, c.tag, c.posted) for c in self.collectives])


# Sends and receives posted together: operator, group name, and the peer's rank in the group.
Batch = tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class ExpectedSequence:
    """The collectives that passed the order check: only these may be serialised.

    Attributes:
        keys: operator and group name of each collective, in the order of issue.
        single_group: name of the only group, without sends and receives: its communicator enforces the order, so that
            deviations are harmless.
        batches: the batches of sends and receives that ``Gate.post`` posted.
        others: keys and batches of the other kinds of steps that passed.
    """

    keys: Sequence[tuple[str, str]] = ()
    single_group: str | None = None
    batches: Sequence[Batch] = ()
    others: Sequence[tuple[Sequence[tuple[str, str]], Sequence[Batch]]] = ()

    @property
    def can_deadlock(self) -> bool:
        """Whether a rank that leaves the sequence could wait in vain: one communicator alone enforces its order."""
        return self.single_group is None

    @classmethod
    def of(cls, kinds: Sequence[CollectiveSequence]) -> ExpectedSequence:
        """The collectives that steps may serialise after their kinds have passed the order check."""
        first, *rest = kinds
        groups = {of.single_group for of in kinds if of.items}
        single_group = groups.pop() if len(groups) == 1 else None
        return cls(first.keys, single_group, first.batches, tuple([(of.keys, of.batches) for of in rest]))


class SequenceTracker:
    """Follows a sequential step along the checked sequences, one at a time.

    If the step departs from one, tracking continues with another that is the same up to there, if any. From the
    ``divergence`` on, where the step has left all of them, nothing is admitted.
    """

    def __init__(self, expected: ExpectedSequence) -> None:
        self.divergence: Divergence | None = None
        self._expected = expected
        self._keys, self._batches = expected.keys, expected.batches  # of the kind being followed
        self._index = 0  # of the next collective

    def admits(self, call: Collective) -> bool:
        """Whether the next collective may be serialised: the order check saw it at this position."""
        index = self._index
        self._index = index + 1
        if self.divergence is not None:
            return False
        keys = self._keys
        expected = keys[index] if index < len(keys) else None
        operator, group = call.operator, call.group
        if expected is not None and operator == expected[0] and group.name == expected[1]:
            return True
        if self._expected.single_group == group.name and not call.point_to_point:
            return True
        before = keys[:index]
        found = (*before, (operator, group.name))
        for keys, batches in self._expected.others:
            if tuple(keys[: index + 1]) == found:
                self._keys, self._batches = keys, batches
                return True
        self._depart(index, expected, call)
        return False

    def admits_batch(self, number: int, calls: Sequence[Collective]) -> bool:
        """Whether the order check saw this batch: waiting for another might never end.

        ``number``: index of the batch in its step, from 0. ``calls``: all its sends and receives.
        """
        if self.divergence is not None:
            return False
        batch = tuple([(call.operator, call.group.name, call.peer) for call in calls])
        batches = self._batches
        if (batches[number] if number < len(batches) else None) == batch:
            return True
        before, found = tuple(self._keys[: self._index]), (*batches[:number], batch)
        for keys, batches in self._expected.others:
            if tuple(keys[: self._index]) == before and tuple(batches[: number + 1]) == found:
                self._keys, self._batches = keys, batches
                return True
        if calls:
            self._depart(self._index - 1, ("another batch", ""), calls[-1])
        return False

    def _depart(self, index: int, expected: tuple[str, str] | None, call: Collective) -> None:
        self.divergence = Divergence(index, expected, call, 1 + len(self._expected.others))
