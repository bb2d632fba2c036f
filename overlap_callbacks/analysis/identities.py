"""A set of things that are known by a name (hosts, devices), as digests: it can be counted, and added to another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

# Digests of 48 bits: of 10,000 names two are alike with a chance of two in ten million.
DIGEST_BYTES = 6
# Names that a part tells apart from those of other parts. Beyond, what two parts have in common counts twice; parts
# are of neighbouring ranks, and these share hosts and devices long before.
MAX_IDENTITIES = 4096


class Identities(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Distinct names.

    Attributes:
        digests: of the names, one after the other.
        num_more: names whose digests are not kept.
    """

    digests: bytes = b""
    num_more: int = 0

    @classmethod
    def of(cls, *names: str) -> Identities:
        """These names."""
        return cls(b"".join(sorted({digest(name) for name in names})))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.digests) // DIGEST_BYTES + self.num_more


def digest(name: str) -> bytes:
    """Of a name."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def add_identities(parts: Iterable[Identities]) -> Identities:
    """The names of all parts."""
    distinct: set[bytes] = set()
    num_more = 0
    for part in parts:
        num_more += part.num_more
        content = part.digests
        distinct.update([content[at : at + DIGEST_BYTES] for at in range(0, len(content), DIGEST_BYTES)])
    if len(distinct) > MAX_IDENTITIES:
        return Identities(num_more=num_more + len(distinct))
    return Identities(b"".join(sorted(distinct)), num_more)
