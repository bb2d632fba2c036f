"""The bubble of each pipeline stage, summed over ranks in limited space, and what its schedule should give.

A single rank knows only part of it. How long its messages waited for their peers is known if both kernels of a message
were compared (``waiting``). In a large job only some are, drawn at random to represent similar ones of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.communication.rank_grids import ranks_in
from overlap_callbacks.analysis.results.messages import JobMessages
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import PipelineBubble, StageBubble
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.analysis.sums import table_sum

MAX_STAGES = 64
# Minimum number of messages of a kind on a stage that can represent all.
ENOUGH = 4
_NS_PER_MS = 1e6


class StageSum(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ranks of one stage; times are integer nanoseconds, so that sums do not depend on the tree of ranks.

    Attributes:
        stage: of the pipeline.
        num_ranks: ranks.
        step_ns, bubble_ns, most_ns: sums over them; the last is all time without compute, an upper bound of the bubble.
        chunks: model chunks per rank, the maximum.
    """

    stage: int
    num_ranks: int
    step_ns: int
    bubble_ns: int
    most_ns: int
    chunks: Annotated[int, max] = 1


def stages_of(window: RankWindow) -> tuple[StageSum, ...]:
    """The stage of one rank; empty if it has no pipeline, or no profile shows its bubble."""
    stage, chunks = (-1, 1) if window.messages is None else (window.messages.stage, window.messages.chunks)
    blocks = [b for b in window.profiled if b.mode is Mode.OVERLAPPED and b.bubble_ms is not None]
    steps = sum([block.num_steps for block in blocks])
    if stage < 0 or not steps:
        return ()
    busy_ms = [b.compute_busy_ms + b.comm_busy_ms - b.hidden_comm_ms + b.idle_ms for b in blocks]
    step_ms = sum([ms * block.num_steps for ms, block in zip(busy_ms, blocks, strict=True)]) / steps
    compute_ms = sum([block.compute_busy_ms * block.num_steps for block in blocks]) / steps
    bubble_ms = sum([(block.bubble_ms or 0.0) * block.num_steps for block in blocks]) / steps
    step_ns, bubble_ns, most_ns = (round(ms * _NS_PER_MS) for ms in (step_ms, bubble_ms, step_ms - compute_ms))
    return (StageSum(stage, 1, step_ns, bubble_ns, max(bubble_ns, most_ns), chunks),)


add_stages = table_sum(StageSum, 1, limit=MAX_STAGES)


class Side(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank's side of the messages of two ranks, with the time of each step; fields as in ``CollectiveCalls``."""

    stage: int
    alike: str
    open_us: bytes
    time_us: tuple[float, ...]


class StageMessages(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Similar messages of a pipeline stage (as in ``CollectiveCalls``), per step, summed over ranks.

    Attributes:
        stage: its number.
        compared, dropped: ranks' rows that were compared, and those skipped because there were too many.
        waited_us, waited_isolated_us: of those compared, in overlapped and in sequential steps.
        bubble_us: the part of ``waited_us`` in which nothing else ran and that no rank could know alone.
    """

    stage: int
    alike: str
    compared: int = 0
    dropped: int = 0
    waited_us: float = 0.0
    waited_isolated_us: float = 0.0
    bubble_us: float = 0.0

    @property
    def is_told(self) -> bool:
        """Whether the compared ones can represent all."""
        return not self.dropped or self.compared >= ENOUGH

    @property
    def scale(self) -> float:
        """All messages over compared ones."""
        return 1 + self.dropped / self.compared if self.compared else 0.0


class MessageScale(NamedTuple):
    """Factors from compared messages to all messages: for their waiting, and for their bubbles."""

    waited: float
    bubble: float


def message_scale(rows: Sequence[StageMessages], *, sequential: bool) -> MessageScale:
    """The factors of a mode; zeros if a kind of message is not represented, to keep stages comparable."""
    if not all([row.is_told for row in rows]):
        return MessageScale(0.0, 0.0)
    waited = [(row.scale, row.waited_isolated_us if sequential else row.waited_us) for row in rows]
    return MessageScale(_factor(waited), _factor([(row.scale, row.bubble_us) for row in rows]))


def bubble_us(rows: Sequence[StageMessages], stage: int) -> float:
    """How long a stage's ranks wait in an overlapped step while nothing else runs, beyond what each knows alone."""
    if not all([row.is_told for row in rows]):
        return 0.0
    return sum([row.scale * row.bubble_us for row in rows if row.stage == stage])


def _factor(rows: Sequence[tuple[float, float]]) -> float:
    """Total over the compared part."""
    compared = sum([us for _, us in rows])
    return sum([scale * us for scale, us in rows]) / compared if compared > 0 else 1.0


def stage_messages(
    side: Side, bubble: npt.NDArray[np.float64], time: npt.NDArray[np.float64], sequential: npt.NDArray[np.bool_]
) -> StageMessages:
    """One side of compared messages; times are in us, those of the transfers of shape (steps, bins)."""
    waited = np.maximum(np.array(side.time_us) - time.sum(axis=1), 0)

    def mean(times_us: npt.NDArray[np.float64], own: npt.NDArray[np.bool_]) -> float:
        return float(times_us[own].mean()) if own.any() else 0.0

    amounts = (mean(waited, ~sequential), mean(waited, sequential), mean(bubble, ~sequential))
    return StageMessages(side.stage, side.alike, 1, 0, *amounts)


def pipeline_bubble(
    sums: Sequence[StageSum], messages: JobMessages | None, waited: Sequence[StageMessages]
) -> PipelineBubble | None:
    """The bubble of the job's pipeline; None without a pipeline, or if no profile shows it."""
    if messages is None or not sums:
        return None
    sizes = [group.group_size for group in messages.groups if group.dimension == "pipeline"]
    if max(sizes, default=0) < 2:
        return None
    batches, chunks = _schedule(messages, told=max([row.chunks for row in sums]))
    stages = [
        StageBubble(
            row.stage,
            row.num_ranks,
            row.step_ns / row.num_ranks / _NS_PER_MS,
            min(row.most_ns, row.bubble_ns + 1e3 * bubble_us(waited, row.stage)) / row.num_ranks / _NS_PER_MS,
        )
        for row in sums
    ]
    return PipelineBubble(max(sizes), batches, chunks, tuple(stages))


def _schedule(messages: JobMessages, told: int) -> tuple[int | None, int]:
    """Micro-batches per step and model chunks per rank, from the first stage's sends; None if unclear.

    The first stage sends the activations of each micro-batch to the second, once for each of its v chunks: vm messages.
    Interleaved, it sends gradients of all but its first chunk to the last stage: (v-1)m. The rule needs one message for
    each, so it takes those of the largest size. In a pipeline of two stages both go to the same one, (2v-1)m messages;
    so it takes v from the adapter (``told``), or 1.
    """
    sent: dict[int, int] = {}  # by distance to the receiver, messages per rank
    for group in messages.groups:
        if group.dimension != "pipeline" or group.stage != 0 or group.operator != "send" or not group.whole:
            continue
        largest = max(group.sizes, default=None)
        if largest is None or not group.alike:
            return None, 1
        places = ranks_in(group.offsets).tolist()
        if len(places) != 2:
            return None, 1
        sent[places[1]] = sent.get(places[1], 0) + largest[1] // group.num_members
    if not sent:
        return None, 1
    forward = sent[min(sent)]
    if len(sent) == 1:
        batches, rest = divmod(forward, 2 * told - 1)
        return (None, 1) if rest else (batches, told)
    batches = forward - sent[max(sent)]
    if len(sent) > 2 or batches < 1 or forward % batches:
        return None, 1
    return batches, forward // batches
