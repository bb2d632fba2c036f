"""What messages of a pipeline waited for their peers, by stage, from those whose two kernels were compared.

Of a large job, some messages are compared, drawn by chance; those that are alike on a stage stand for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

# Of messages that are alike on a stage, so many stand for all.
ENOUGH = 4


class Side(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank's side of the messages of two ranks.

    Attributes:
        stage: of the pipeline.
        alike, open_us: as in ``CollectiveCalls``.
        time_us: of each step.
    """

    stage: int
    alike: str
    open_us: bytes
    time_us: tuple[float, ...]


class BlockWaiting(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Waiting in a profiled block, per step, summed over ranks.

    Attributes:
        block: its number.
        waited_us: the collectives' kernels beyond the transfer.
        message_us: the same of messages, of those that were compared.
        bubble_us: the part of it in which nothing else ran and which no rank could tell alone.
    """

    block: int
    waited_us: float
    message_us: float = 0.0
    bubble_us: float = 0.0


class StageMessages(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Messages of a stage of a pipeline that are alike, per step, summed over ranks.

    Attributes:
        stage: its number.
        alike: as in ``CollectiveCalls``.
        compared, dropped: ranks' rows that were compared, and that were not because there are many.
        waited_us, waited_isolated_us: of those compared, in overlapped and in sequential steps.
        bubble_us, bubble_isolated_us: as in ``BlockWaiting``.
    """

    stage: int
    alike: str
    compared: int = 0
    dropped: int = 0
    waited_us: float = 0.0
    waited_isolated_us: float = 0.0
    bubble_us: float = 0.0
    bubble_isolated_us: float = 0.0

    @property
    def is_told(self) -> bool:
        """Whether those compared can stand for all."""
        return not self.dropped or self.compared >= ENOUGH

    @property
    def times(self) -> float:
        """How many times as many there are in all."""
        return 1 + self.dropped / self.compared if self.compared else 0.0


class MessageWaiting(NamedTuple):
    """By how much more all messages of a mode waited than those that were compared.

    Attributes:
        waited, bubble: factors.
    """

    waited: float
    bubble: float

    def of(self, block: BlockWaiting) -> tuple[float, float]:
        """All waiting of a block, and the part of it that is the bubble's, in us."""
        return block.waited_us + self.waited * block.message_us, self.bubble * block.bubble_us


def message_waiting(rows: Sequence[StageMessages], *, sequential: bool) -> MessageWaiting:
    """Of a mode; zeros where some kind of message cannot be told: then none is, so that stages stay comparable."""
    if not all([row.is_told for row in rows]):
        return MessageWaiting(0.0, 0.0)
    waited = [(row.times, row.waited_isolated_us if sequential else row.waited_us) for row in rows]
    bubble = [(row.times, row.bubble_isolated_us if sequential else row.bubble_us) for row in rows]
    return MessageWaiting(_factor(waited), _factor(bubble))


def bubble_us(rows: Sequence[StageMessages], stage: int) -> float:
    """What the ranks of a stage wait in an overlapped step while nothing else runs, beyond what each can tell."""
    if not all([row.is_told for row in rows]):
        return 0.0
    return sum([row.times * row.bubble_us for row in rows if row.stage == stage])


def _factor(rows: Sequence[tuple[float, float]]) -> float:
    """All of it, over those compared."""
    compared = sum([us for _, us in rows])
    return sum([times * us for times, us in rows]) / compared if compared > 0 else 1.0


def stage_messages(
    side: Side, bubble: npt.NDArray[np.float64], time: npt.NDArray[np.float64], sequential: npt.NDArray[np.bool_]
) -> StageMessages:
    """One side of messages that were compared.

    Args:
        side: it.
        bubble: of each step, in us.
        time: of the transfers, in us; shape (steps, bins).
        sequential: which steps are.
    """
    waited = np.maximum(np.array(side.time_us) - time.sum(axis=1), 0)

    def mean(times_us: npt.NDArray[np.float64], own: npt.NDArray[np.bool_]) -> float:
        return float(times_us[own].mean()) if own.any() else 0.0

    amounts = [mean(times_us, own) for times_us in (waited, bubble) for own in (~sequential, sequential)]
    return StageMessages(side.stage, side.alike, 1, 0, *amounts)
