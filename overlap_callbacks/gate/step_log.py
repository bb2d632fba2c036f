"""What the gate saw in one step, and which sequence of collectives it may serialise."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from overlap_callbacks.gate.collectives import Collective, Group, OperatorSpec, Splits
from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.gate.let_pass import LetPass

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from overlap_callbacks.instruments import clocks, device


class Serialiser(Protocol):
    """Puts one collective between two waits.

    Attributes:
        completes: whether a collective is complete once ``after`` has returned True.
    """

    completes: bool

    def obstacle(self, tensor: torch.Tensor | None) -> LetPass | None:
        """Why what is issued now cannot be serialised; None if it can.

        Args:
            tensor: the first of the collective; None for a batch whose tensors are not known yet.
        """

    def before(self, call: CollectiveCall) -> None:
        """Order what came before the call."""

    def after(self, call: CollectiveCall, work: dist.Work | None) -> bool:
        """Order what comes after the call; False if the collective did not finish in time."""

    def before_batch(self) -> Callable[[], None]:
        """Order what came before a batch of sends and receives.

        Returns:
            What to call once all works of the batch were waited for.
        """


class CollectiveCall(msgspec.Struct, gc=False):
    """One collective while its step runs; a ``Collective`` once the step has ended.

    One is made for every collective of a measured step, on the training thread. So it is a struct, which is made in a
    third of the time of a class with slots, and it refers to the operator's spec instead of its name. Its fields are
    those of ``Collective``, and two more: ``serialiser``, the one that ordered what comes before the call, and is to
    order what comes after it (None where it is not serialised); and ``stream``, on which it was issued, where the
    serialiser orders streams.
    """

    spec: OperatorSpec
    group: Group
    bytes_in: int
    bytes_out: int
    dtype: torch.dtype | None
    coalesced: int
    peer: int
    tag: int
    issued_ns: int
    posted: int = 0
    asynchronous: bool = True
    on_device: bool = False
    start: clocks.Mark | None = None
    end: clocks.Mark | None = None
    splits: Splits | None = None
    serialiser: Serialiser | None = None
    stream: device.Stream | None = None

    def to_collective(self) -> Collective:
        """What the log keeps of the call."""
        return Collective(
            self.spec.name,
            self.group,
            self.bytes_in,
            self.bytes_out,
            self.dtype,
            self.coalesced,
            self.peer,
            self.tag,
            self.issued_ns,
            self.start,
            self.end,
            self.posted,
            self.asynchronous,
            self.on_device,
            self.splits,
        )


class StepRecorder:
    """Keeps the calls of one step after another, in storage that is held ready. Threads may share it.

    Args:
        capacity: calls of one step for which there is room.
    """

    def __init__(self, capacity: int) -> None:
        self._storage: list[CollectiveCall | None] = [None] * capacity
        self._slots = itertools.count()  # next() is atomic under the GIL, so threads never share a slot

    def append(self, call: CollectiveCall) -> None:
        """Keep a call if there is room; count it in any case."""
        slot = next(self._slots)
        if slot < len(self._storage):
            self._storage[slot] = call

    @property
    def any_seen(self) -> bool:
        """Whether there was a call since the last ``drain``."""
        return bool(self._storage) and self._storage[0] is not None

    def drain(self) -> tuple[tuple[Collective, ...], int]:
        """The calls since the last ``drain``, in the order of issue, and how many found no room."""
        used = next(self._slots)
        self._slots = itertools.count()
        kept = min(used, len(self._storage))
        calls = self._storage[:kept]
        self._storage[:kept] = [None] * kept
        return tuple([call.to_collective() for call in calls if call is not None]), used - kept


@dataclass(frozen=True)
class Divergence:
    """The first collective of a sequential step that the order check had not seen at its place.

    Attributes:
        index: of the collective in its step.
        expected: operator and group name at this place of the checked kind that the step was like until then; None if
            that has no further collective.
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
    """What the gate saw in one step: the collectives of the measured thread, and of autograd's threads for it.

    Attributes:
        collectives: in the order of issue.
        dropped: collectives that found the storage full, and are missing above.
        divergence: where the step left the checked sequence, and was no longer serialised; None if it did not.
        quiet: whether the step was watched and nothing was in flight at its end: its collectives were all complete,
            and nobody else had issued any.
        foreign: names of the groups on which somebody else communicated during the step, as far as the groups tell:
            another thread, or code that does not go through torch's dispatcher.
        compiled: whether torch.compile compiled something in the step. Collectives may then be missing above, and the
            step took longer than others do.
        let_pass: how many collectives of a sequential step stood where they should and could not be serialised, by
            the reason.
        unsupported_device: type of a device that cannot be timed, on which a collective's tensors were; empty
            if there was none.
        let_pass_bytes: of those that were let pass, of each the larger of its tensors read and written.
        captured: whether collectives were issued while a CUDA graph was captured. They launched no kernel, and the step
            took longer than others do.
        issued_before: how many collectives this rank had issued on each group when the step began, by the group's name;
            of groups that count, and on which nobody else communicated.
        issued: how many collectives this rank issued in the step on all its groups, on any thread, as the groups count;
            None if one of them does not.
        micro_batches: of the step; 0 where no adapter counts them.
    """

    collectives: tuple[Collective, ...]
    dropped: int
    divergence: Divergence | None
    quiet: bool = False
    foreign: tuple[str, ...] = ()
    compiled: bool = False
    let_pass: Mapping[LetPass, int] = field(default_factory=dict)
    unsupported_device: str = ""
    let_pass_bytes: int = 0
    captured: bool = False
    issued_before: Mapping[str, int] = field(default_factory=dict)
    issued: int | None = None
    micro_batches: int = 0

    @functools.cached_property
    def signature(self) -> tuple[tuple[str, str, int, int, int, int], ...]:
        """Equal for steps of one kind: they issue the same collectives, in the same order."""
        return tuple([(c.operator, c.group.name, c.coalesced, c.peer, c.tag, c.posted) for c in self.collectives])


# Sends and receives that are posted together: of each its operator, its group's name, and the peer's rank in it.
Batch = tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class ExpectedSequence:
    """The collectives that passed the order check: only these may be serialised.

    Attributes:
        keys: operator and group name of each collective, in the order of issue.
        single_group: name of the one group of a sequence that has no sends, no receives and no second group. The
            communicator itself enforces the order there, so departures from the sequence within the group are harmless.
        batches: the batches of sends and receives that ``Gate.post`` posted.
        others: keys and batches of the other kinds of steps that passed. ``single_group`` is that of all of them.
    """

    keys: Sequence[tuple[str, str]] = ()
    single_group: str | None = None
    batches: Sequence[Batch] = ()
    others: Sequence[tuple[Sequence[tuple[str, str]], Sequence[Batch]]] = ()

    @classmethod
    def of(cls, kinds: Sequence[CollectiveSequence]) -> ExpectedSequence:
        """What the steps after the recorded ones may serialise, once their kinds have passed the check."""
        first, *rest = kinds
        groups = {of.single_group for of in kinds if of.items}
        single_group = groups.pop() if len(groups) == 1 else None
        return cls(first.keys, single_group, first.batches, tuple([(of.keys, of.batches) for of in rest]))


class SequenceTracker:
    """Follows a sequential step along the sequences that were checked.

    It follows one kind of step at a time. Where the step departs from it, it goes on with one that is the same up to
    there, if there is any: so one kind costs as much as several, but for these places.

    Args:
        expected: the checked sequences.

    Attributes:
        divergence: where the step left all sequences; from there on nothing is admitted.
    """

    def __init__(self, expected: ExpectedSequence) -> None:
        self.divergence: Divergence | None = None
        self._expected = expected
        self._keys, self._batches = expected.keys, expected.batches  # of the kind that is followed
        self._index = 0  # of the next collective

    def admits(self, call: CollectiveCall) -> bool:
        """Whether the next collective may be serialised: it stands where the order check saw it."""
        index = self._index
        self._index = index + 1
        if self.divergence is not None:
            return False
        keys = self._keys
        expected = keys[index] if index < len(keys) else None
        spec, group = call.spec, call.group
        if expected is not None and spec.name == expected[0] and group.name == expected[1]:
            return True
        if self._expected.single_group == group.name and not spec.point_to_point:
            return True
        before = keys[:index]
        found = (*before, (spec.name, group.name))
        for keys, batches in self._expected.others:
            if tuple(keys[: index + 1]) == found:
                self._keys, self._batches = keys, batches
                return True
        self._depart(index, expected, call)
        return False

    def admits_batch(self, number: int, calls: Sequence[CollectiveCall]) -> bool:
        """Whether a batch is one that the order check saw: waiting for another might never end.

        Args:
            number: of the batch in its step, from 0.
            calls: its sends and receives, all of them posted.
        """
        if self.divergence is not None:
            return False
        batch = tuple([(call.spec.name, call.group.name, call.peer) for call in calls])
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

    def _depart(self, index: int, expected: tuple[str, str] | None, call: CollectiveCall) -> None:
        self.divergence = Divergence(index, expected, call.to_collective(), 1 + len(self._expected.others))
