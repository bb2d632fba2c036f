"""What comes from the ranks below is taken if it can be; ranks whose message cannot be count as not heard."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.job.part import encode, part_of
from overlap_callbacks.monitor.background.reporter import gather_from_children
from overlap_callbacks.monitor.background.tree import Tree
from tests.samples import window


class FakeExchange:
    """Rank 0 of four, to which the others have sent these messages."""

    def __init__(self, messages: dict[int, bytes]) -> None:
        self.tree = Tree(0, 4)
        self.unheard: tuple[int, ...] = ()
        self._messages = messages

    def gather(self, key: str, timeout_s: float, stop: Any) -> dict[int, bytes]:
        return self._messages


def message(rank: int) -> bytes:
    return encode(part_of(window(rank)))


def changed(field: str, value: Any) -> bytes:
    """What rank 2 sends, with one field changed."""
    part = part_of(window(2))
    values = msgspec.msgpack.decode(encode(part))
    values[part.__struct_fields__.index(field)] = value
    return msgspec.msgpack.encode(values)


def changed_power(field: str, value: Any) -> bytes:
    """What rank 2 sends, with one field of its power changed."""
    power = part_of(window(2)).power
    values = msgspec.to_builtins(power)
    values[power.__struct_fields__.index(field)] = value
    return changed("power", values)


def numbers(number: int) -> bytes:
    return np.ones(number).tobytes()


def blocks_without_numbers() -> bytes:
    """What rank 2 sends, with sums of its timed blocks, and of none of them."""
    values = msgspec.msgpack.decode(message(2))
    figures = part_of(window(2)).__struct_fields__.index("figures")
    (group,) = values[figures][0][1]
    group[2][0][0] = []
    return msgspec.msgpack.encode(values)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"nonsense",
        message(2)[:-1],
        message(1),
        changed("heard", []),
        changed("heard", [[2, 10**12]]),
        changed("heard", [[2, 1]]),
        changed("num_steps", "many"),
        changed("spread", [b"1234567"]),
        changed("spread", [numbers(21)]),
        changed("spread", [numbers(35)]),
        changed_power("devices", [[b"a device", [False, 2, numbers(5)]]]),
        changed_power("others", [[numbers(7)]]),
        blocks_without_numbers(),
    ],
)
def test_of_a_message_that_cannot_be_no_rank_counts(damaged: bytes) -> None:
    exchange: Any = FakeExchange({1: message(1), 2: damaged, 3: message(3)})
    part = gather_from_children(exchange, part_of(window(0)), "window", 1.0, lambda _: False)
    assert (part.heard, exchange.unheard) == (((0, 1), (3, 3)), (2,))
