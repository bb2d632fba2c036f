"""What the gate saw in one step, and what it was to expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.deadlock import CollectiveSequence


@dataclass(frozen=True)
class Divergence:
    """The first collective of a sequential step that the order check had not seen at its place."""

    index: int
    expected: tuple[str, str] | None
    found: Collective

    def __str__(self) -> str:
        if self.expected is None:
            expected = "no further collective"
        else:
            operator, group = self.expected
            expected = f"{operator} on {group!r}" if group else operator
        return f"collective {self.index} of the step was {self.found}, where the checked sequence has {expected}"


@dataclass(frozen=True)
class StepLog:
    """What the gate saw in one step.

    Attributes:
        collectives: in the order of issue.
        dropped: collectives that found the storage full, and are missing above.
        divergence: where the step left the checked sequence, and was no longer serialised; None if it did not.
        quiet: whether the step was watched and nothing was in flight at its end: its collectives were all complete,
            and no thread but ours had issued any.
    """

    collectives: tuple[Collective, ...]
    dropped: int
    divergence: Divergence | None
    quiet: bool = False

    @property
    def num_calls(self) -> int:
        """Collectives of the step, whether there was room to keep them or not."""
        return len(self.collectives) + self.dropped

    @property
    def own(self) -> list[Collective]:
        """Those of the training thread and of autograd's threads."""
        return [collective for collective in self.collectives if collective.own_thread]


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
    """

    keys: Sequence[tuple[str, str]] = ()
    single_group: str | None = None
    batches: Sequence[Batch] = ()

    @classmethod
    def of(cls, sequence: CollectiveSequence) -> ExpectedSequence:
        """What a recorded step that passed the check tells of the steps to come."""
        return cls(sequence.keys, sequence.single_group, sequence.batches)
