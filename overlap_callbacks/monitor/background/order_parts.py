"""What ranks hand in to the order check, put together on its way to rank 0: what is equal, once."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import msgspec

from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.monitor.background.agreement import OrderMessage
from overlap_callbacks.monitor.background.tree import Run, in_runs, joined

# Bytes of compressed sequences that travel together at most. A sequence of 4,000 collectives takes some kilobytes.
MAX_SEQUENCE_BYTES = 8 * 2**20
# Collectives that rank 0 compares at most, over all different sequences: some seconds of work.
MAX_COMPARED = 1_000_000


class OrderPart(msgspec.Struct, frozen=True, array_like=True):
    """What any set of ranks hands in.

    Attributes:
        messages: each different one, encoded, with the first and the last rank of each run of ranks that hand it in.
        sequences: each different one, compressed, by its digest; some are missing where they are too many.
    """

    messages: list[tuple[bytes, list[Run]]]
    sequences: dict[str, bytes]

    @classmethod
    def of(cls, rank: int, sequence: CollectiveSequence, message: OrderMessage) -> OrderPart:
        """What one rank hands in."""
        encoded = msgspec.msgpack.encode(message, order="deterministic")
        return cls([(encoded, [(rank, rank)])], {message.sequence: zlib.compress(sequence.encode(), 1)})

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

    def by_rank(self) -> dict[int, OrderMessage]:
        """Each rank's message; ranks with equal messages share one object."""
        found: dict[int, OrderMessage] = {}
        for encoded, runs in self.messages:
            message = msgspec.msgpack.decode(encoded, type=OrderMessage)
            found.update(dict.fromkeys(in_runs(runs), message))
        return found

    @property
    def ranks(self) -> set[int]:
        return {rank for _, runs in self.messages for rank in in_runs(runs)}

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
