"""Distinct things that have names, such as hosts and devices, as digests: they can be counted over all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from overlap_callbacks.analysis.sums import distinct

# Digests of 48 bits: of 10,000 names two are alike with a chance of two in ten million.
_DIGEST_BYTES = 6
# Names that a part tells apart from those of other parts. Beyond, what two parts have in common counts twice; parts
# are of neighbouring ranks, and these share hosts and devices long before.
MAX_IDENTITIES = 4096


class Identities(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Distinct names, by their digests; ``num_more`` are not kept."""

    digests: tuple[bytes, ...] = ()
    num_more: int = 0

    @property
    def count(self) -> int:
        return len(self.digests) + self.num_more


def digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def add_identities(parts: Sequence[Identities]) -> Identities:
    found = distinct([part.digests for part in parts])
    num_more = sum(part.num_more for part in parts) + max(0, len(found) - MAX_IDENTITIES)
    return Identities(found[:MAX_IDENTITIES], num_more)
