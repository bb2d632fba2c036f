"""The ranks' submissions to the order check, merged on the way to rank 0, and whether all measure the same window.

If they did not, the mean over ranks would mix steps of different modes: a valid-looking figure that is wrong. So every
rank submits what it is about to measure with its recorded steps, and rank 0 compares before anything is measured.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.analysis.rank_set import Run, in_runs, joined
from overlap_callbacks.gate.collectives import POINT_TO_POINT
from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.gate.step_log import StepLog

# Maximum bytes of compressed sequences that travel together. A sequence of 4,000 collectives takes a few kilobytes.
MAX_SEQUENCE_BYTES = 8 * 2**20
# Maximum collectives that rank 0 compares, over all different sequences: a few seconds of work.
MAX_COMPARED = 1_000_000


class WindowConfig(msgspec.Struct, frozen=True):
    """What a rank is about to measure."""

    step: int  # number of the window's first step
    # of the schedule, by name; also the form of sequential mode (``sequential``) and the ``arms``
    options: dict[str, Any]
    control: bool = False  # an A/A run, in which no step is serialised
    serialises: bool = True  # the window's arm has sequential steps

    @property
    def digest(self) -> str:
        """Equal for equal configurations, on any rank."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()


class RecordedKinds(NamedTuple):
    """What a rank's recorded steps issued."""

    kinds: tuple[CollectiveSequence, ...]  # the sequence of each kind of step, in order of first occurrence
    of_steps: tuple[int, ...] = (0,)  # the kind of each step, as an index into ``kinds``
    counts: Mapping[str, int] = MappingProxyType({})  # collectives issued before, by group name
    delayable: bytes = b""  # what a causal job can delay, encoded; empty in others

    @classmethod
    def of(cls, logs: Sequence[StepLog], rank: int) -> RecordedKinds:
        """From the logs of the recorded steps (at least one)."""
        kinds: dict[object, CollectiveSequence] = {}
        keys = [(log.signature, log.dropped > 0, log.compiled) for log in logs]
        for key, log in zip(keys, logs, strict=True):
            if key not in kinds:
                kinds[key] = CollectiveSequence.of(log.collectives, rank, incomplete=key[1], compiled=key[2])
        places = {key: place for place, key in enumerate(kinds)}
        # A group that the job also uses outside the log in any of the steps proves nothing.
        counts = {
            name: count
            for name, count in logs[0].issued_before.items()
            if all(name in log.issued_before for log in logs)
        }
        return cls(tuple(kinds.values()), tuple([places[key] for key in keys]), counts)

    def granted(self, only: int) -> tuple[CollectiveSequence, ...]:
        """The kinds that a ruling allows; ``only`` as in ``Ruling``."""
        return self.kinds if only < 0 else (self.kinds[kind_of_step(self.of_steps, only)],)


def kind_of_step(of_steps: Sequence[int], step: int) -> int:
    """The kind of a recorded step; of the last one if the rank recorded fewer."""
    return of_steps[min(step, len(of_steps) - 1)]


class GroupNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Summary of a rank's use of one group; enough to detect agreement."""

    label: str  # readable name of the group
    first: int  # its lowest and highest rank; -1 if not known
    last: int
    members: str  # digest of its ranks
    places: str  # digest of its collectives' positions in the sequences
    exchanges: bool  # the rank sends or receives on it
    per_step: tuple[int, ...] = ()  # collectives on it in each recorded step

    @classmethod
    def of(cls, recorded: RecordedKinds) -> dict[str, GroupNote]:
        """By group name."""
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
    """What a rank submits to the order check, in addition to its sequences; see ``RecordedKinds``.

    ``incomplete``, ``compiled`` and ``communicates`` are as in ``CollectiveSequence``, of any of its sequences.
    """

    kinds: tuple[str, ...]  # digests of its sequences
    of_steps: tuple[int, ...] = (0,)
    config: WindowConfig | None = None  # what it is about to measure; None for a pinned mode
    counts: dict[str, int] = {}
    groups: dict[str, GroupNote] = {}  # the groups in its sequences, by name
    incomplete: bool = False
    compiled: bool = False
    communicates: bool = True

    @classmethod
    def of(cls, recorded: RecordedKinds, config: WindowConfig | None = None) -> OrderMessage:
        """From a rank's own sequences."""
        return cls(
            kinds=tuple([kind.digest for kind in recorded.kinds]),
            of_steps=recorded.of_steps,
            config=config,
            counts={} if config is None else dict(recorded.counts),
            groups=GroupNote.of(recorded),
            incomplete=any(kind.incomplete for kind in recorded.kinds),
            compiled=any(kind.compiled for kind in recorded.kinds),
            communicates=any(kind.communicates for kind in recorded.kinds),
        )


class Submission(NamedTuple):
    """A message, and the runs of ranks that submit it: few, whatever the number of ranks."""

    message: OrderMessage
    runs: list[Run]

    @property
    def first_rank(self) -> int:
        return self.runs[0][0]


class Submissions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The submissions of any set of ranks; equal ones are stored once."""

    messages: list[tuple[bytes, list[Run]]]  # each different message, encoded, with the runs of ranks that submit it
    sequences: dict[str, bytes]  # each different sequence, compressed, by digest; if too many, some are missing
    delayable: list[bytes] = []  # each different one of ``RecordedKinds``; if too many, some are missing

    @classmethod
    def of(
        cls, rank: int, kinds: Iterable[CollectiveSequence], message: OrderMessage, delayable: bytes = b""
    ) -> Submissions:
        """From one rank: the sequences of its kinds of steps, and the message that names them."""
        encoded = msgspec.msgpack.encode(message, order="deterministic")
        sequences = [zlib.compress(kind.encode(), 1) for kind in kinds]
        by_digest = dict(zip(message.kinds, sequences, strict=True))
        return cls([(encoded, [(rank, rank)])], by_digest, [delayable] if delayable else [])

    @classmethod
    def merge(cls, parts: Iterable[Submissions]) -> Submissions:
        """Combine the ranks of all parts."""
        runs: dict[bytes, list[Run]] = {}
        sequences: dict[str, bytes] = {}
        delayable: dict[bytes, None] = {}
        room = MAX_SEQUENCE_BYTES
        for part in parts:
            for one in part.delayable:
                if one not in delayable and len(one) <= room:
                    delayable[one] = None
                    room -= len(one)
            for message, of_message in part.messages:
                runs.setdefault(message, []).extend(of_message)
            for digest, data in part.sequences.items():
                if digest not in sequences and len(data) <= room:
                    sequences[digest] = data
                    room -= len(data)
        return cls([(message, joined(of_message)) for message, of_message in runs.items()], sequences, list(delayable))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Submissions:
        return msgspec.msgpack.decode(data, type=cls)

    def each(self) -> list[Submission]:
        """Each different message and its ranks, ordered by lowest rank."""
        found = [
            Submission(msgspec.msgpack.decode(message, type=OrderMessage), joined(runs))
            for message, runs in self.messages
        ]
        return sorted(found, key=lambda of: of.runs)

    @property
    def runs(self) -> list[Run]:
        """The ranks that submitted."""
        return joined([run for _, runs in self.messages for run in runs])

    def decoded(self, digests: Iterable[str]) -> dict[str, CollectiveSequence] | None:
        """The sequences by digest; None if there are too many to compare."""
        found: dict[str, CollectiveSequence] = {}
        total = 0
        for digest in digests:
            data = self.sequences.get(digest)
            if data is None:
                return None
            found[digest] = CollectiveSequence.decode(zlib.decompress(data))
            total += len(found[digest].items)
            if total > MAX_COMPARED:
                return None
        return found


def config_mismatch(submitted: Sequence[Submission]) -> str | None:
    """Which ranks are about to measure something different from rank 0 (the first), and what; None if none are."""
    ours = submitted[0].message.config
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for message, runs in submitted:
        if difference := _difference(message.config, ours):
            ranks_of[difference].extend(in_runs(runs))
    found = [f"{name_ranks(sorted(ranks))} with {difference}" for difference, ranks in ranks_of.items()]
    return "; ".join(found) if found else None


def _difference(theirs: WindowConfig | None, ours: WindowConfig | None) -> str:
    """How a rank's configuration differs from rank 0's; empty if it does not."""
    if theirs is None or ours is None:
        return ""  # windows and pinned modes have different keys
    options = {"first step of the window": theirs.step, **theirs.options}
    expected = {"first step of the window": ours.step, **ours.options}
    return ", ".join(
        f"{name}={options.get(name)!r} (rank 0: {expected.get(name)!r})"
        for name in dict.fromkeys([*expected, *options])
        if options.get(name) != expected.get(name)
    )


def step_mismatch(submitted: Sequence[Submission]) -> str | None:
    """Which ranks recorded other steps of the job than the rest; None if all recorded the same.

    At the same step, the members of a group have issued the same number of collectives on it, and issue the same number
    in each step. Groups with sends or receives are skipped: backends count these too, and their number differs by rank.
    """
    skipped = {name for message, _ in submitted for name, note in message.groups.items() if note.exchanges}
    counts: dict[tuple[str, str], list[tuple[int, Submission, GroupNote]]] = defaultdict(list)
    for alike in submitted:
        for name, note in alike.message.groups.items():
            if note.first >= 0 and name in alike.message.counts and name not in skipped:
                counts[name, note.members].append((alike.message.counts[name], alike, note))
    for _, found in sorted(counts.items()):
        expected, lowest, note = min(found, key=lambda of: of[1].first_rank)
        first = lowest.first_rank
        others = sorted((rank, count) for count, of, _ in found if count != expected for rank in in_runs(of.runs))
        if others:
            return (
                f"{name_ranks([rank for rank, _ in others])} recorded another step of the job than rank {first}: "
                f"{others[0][1]} collectives came before it on group {note.label!r} (ranks {note.first} to "
                f"{note.last}) on rank {others[0][0]}, and {expected} on rank {first} [OC203]"
            )
        for _, of, other in found:
            if other.per_step != note.per_step:
                return (
                    f"rank {of.first_rank} and rank {first} recorded different kinds of steps: collectives per step on "
                    f"group {note.label!r} (ranks {note.first} to {note.last}) are {_listed(other.per_step)} on rank "
                    f"{of.first_rank}, and {_listed(note.per_step)} on rank {first} [OC204]"
                )
    return None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def in_step(messages: Iterable[OrderMessage]) -> bool:
    """Whether all members of each group have its collectives at the same positions of their sequences.

    Then their orders have no cycle, because on every rank a call comes after those it waits for. False for sequences
    with sends or receives, whose two ends have different positions, and for several kinds of steps, which may meet.
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
