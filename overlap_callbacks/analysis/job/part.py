"""What any set of ranks measured in one window, in a form that can be added: plain data."""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.results.window import RankWindow


class JobPart(msgspec.Struct, frozen=True):
    """What a set of ranks measured in one window."""

    windows: tuple[RankWindow, ...]


def encode(part: JobPart) -> bytes:
    """A part as it is sent between ranks."""
    return msgspec.msgpack.encode(part)


def decode(message: bytes) -> JobPart:
    """The part that a rank sent.

    Raises:
        msgspec.DecodeError: the message is no part.
    """
    return msgspec.msgpack.decode(message, type=JobPart)
