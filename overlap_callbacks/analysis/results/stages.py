"""The bubble of a pipeline, stage by stage, beside the one that its schedule should have: plain data."""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.results.arrivals import are_amounts


class StageBubble(msgspec.Struct, frozen=True):
    """What the ranks of one stage did in an overlapped step under the profiler, means over these ranks.

    Attributes:
        stage: of the pipeline.
        num_ranks: ranks that told.
        step_ms: the step: compute, communication and idle time, each moment once.
        bubble_ms: time in which they were idle, or in which nothing ran but messages that waited for their peer.
    """

    stage: int
    num_ranks: int
    step_ms: float
    bubble_ms: float

    @property
    def fraction(self) -> float:
        """The bubble as a share of the step."""
        return self.bubble_ms / self.step_ms if self.step_ms > 0 else 0.0


class PipelineBubble(msgspec.Struct, frozen=True):
    """The bubble of a pipeline.

    Attributes:
        num_stages: stages, p.
        micro_batches: of a step, m, as the messages of the first stage tell; None where they do not.
        chunks: model chunks of a rank, v, where they are interleaved; else 1.
        stages: as measured; of those beyond the 64th, none.
    """

    num_stages: int
    micro_batches: int | None
    chunks: int
    stages: tuple[StageBubble, ...]

    @property
    def sound(self) -> bool:
        """Whether it can be: a record may be damaged."""
        return are_amounts(self.num_stages, self.chunks, self.micro_batches or 0) and all(
            [
                are_amounts(stage.stage, stage.num_ranks, stage.bubble_ms, stage.step_ms)
                and min(stage.num_ranks, stage.step_ms) > 0
                for stage in self.stages
            ]
        )

    @property
    def expected_fraction(self) -> float | None:
        """(p-1)/(p-1+vm), of a step without its gradients' communication; None where m is not known."""
        if self.micro_batches is None or min(self.micro_batches, self.num_stages, self.chunks) < 1:
            return None
        waiting = self.num_stages - 1
        return waiting / (waiting + self.chunks * self.micro_batches)

    @property
    def fraction(self) -> float | None:
        """As measured, mean over the ranks; None without any."""
        step_ms = sum([stage.num_ranks * stage.step_ms for stage in self.stages])
        return sum([stage.num_ranks * stage.bubble_ms for stage in self.stages]) / step_ms if step_ms > 0 else None
