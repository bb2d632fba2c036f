"""What ranks hand in to the order check, put together on its way to rank 0: what is equal, once."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import msgspec

from overlap_callbacks.analysis.rank_set import Run, joined
from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.monitor.background.agreement import HandedIn, OrderMessage

# Bytes of compressed sequences that travel together at most. A sequence of 4,000 collectives takes some kilobytes.
MAX_SEQUENCE_BYTES = 8 * 2**20
# Collectives that rank 0 compares at most, over all different sequences: some seconds of work.
MAX_COMPARED = 1_000_000


class OrderPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What any set of ranks hands in.

    Attributes:
        messages: each different one, encoded, with the first and the last rank of each run of ranks that hand it in.
        sequences: each different one, compressed, by its digest; some are missing where they are too many.
    """

    messages: list[tuple[bytes, list[Run]]]
    sequences: dict[str, bytes]

    @classmethod
    def of(cls, rank: int, kinds: Iterable[CollectiveSequence], message: OrderMessage) -> OrderPart:
        """What one rank hands in: the sequences of its kinds of steps, and the message that names them."""
        encoded = msgspec.msgpack.encode(message, order="deterministic")
        sequences = [zlib.compress(kind.encode(), 1) for kind in kinds]
        return cls([(encoded, [(rank, rank)])], dict(zip(message.kinds, sequences, strict=True)))

    @classmethod
    def merge(cls, parts: Iterable[OrderPart]) -> OrderPart:
        """What the ranks of all parts hand in."""
        runs: dict[bytes, list[Run]] = {}
        sequences: dict[str, bytes] = {}
        room = MAX_SEQUENCE_BYTES
        for part in parts:
            for message, of_message in part.messages:
                runs.setdefault(message, []).extend(of_message)
            for digest, data in part.sequences.items():
                if digest not in sequences and len(data) <= room:
                    sequences[digest] = data
                    room -= len(data)
        return cls([(message, joined(of_message)) for message, of_message in runs.items()], sequences)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> OrderPart:
        return msgspec.msgpack.decode(data, type=cls)

    def handed_in(self) -> list[HandedIn]:
        """Each different message and who hands it in; that of the lowest rank first."""
        found = [
            HandedIn(msgspec.msgpack.decode(message, type=OrderMessage), joined(runs))
            for message, runs in self.messages
        ]
        return sorted(found, key=lambda of: of.runs)

    @property
    def runs(self) -> list[Run]:
        """Those who hand in anything, joined."""
        return joined([run for _, runs in self.messages for run in runs])

    def decoded(self, digests: Iterable[str]) -> dict[str, CollectiveSequence] | None:
        """The sequences by digest; None if they are more than are compared."""
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
