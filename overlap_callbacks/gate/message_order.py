"""Whether sends and receives finish if each is waited for before the next one is posted. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

# Its direction, the stage that receives it, the micro-batch.
Message = tuple[str, int, int]


def all_finish(orders: Sequence[Sequence[Message]]) -> bool:
    """Whether all ranks finish if each does one message at a time, and waits for the other side of each."""
    remaining = [list(reversed(order)) for order in orders]  # the next message stands last
    while True:
        sides = Counter(order[-1] for order in remaining if order)
        met = {message for message, count in sides.items() if count == 2}
        if not met:
            return not sides
        for order in remaining:
            if order and order[-1] in met:
                order.pop()
