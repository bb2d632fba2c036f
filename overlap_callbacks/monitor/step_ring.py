"""When each of the last steps began. It shows what windows cannot see: every fiftieth step takes longer, say."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlap_callbacks.instruments import clocks

# A power of two: a step's place in the ring is its number's last bits.
SIZE = 4096
MASK = SIZE - 1


class StepRing:
    """The host's clock at the begin of each of the last 4,096 steps.

    The training thread writes, two numbers a step; any thread may read.

    Attributes:
        steps: number of the step at each place; -1 where there is none, or where it is no ordinary step.
        begun_ns: when it began.
    """

    def __init__(self) -> None:
        self.steps = [-1] * SIZE
        self.begun_ns = [0] * SIZE

    def begin(self, step: int) -> None:
        """Step number ``step`` begins."""
        place = step & MASK
        self.steps[place] = step
        self.begun_ns[place] = clocks.now()

    def spoil(self, step: int) -> None:
        """The step is not like others: it has instruments, a mode of its own, or a pause in it."""
        place = step & MASK
        if self.steps[place] == step:
            self.steps[place] = -1

    def durations(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The ordinary steps that ended, in order: their numbers, and how long each took from begin to begin, in ms."""
        steps, begun_ns = np.array(self.steps, dtype=np.int64), np.array(self.begun_ns, dtype=np.int64)
        order = np.argsort(steps, kind="stable")
        steps, begun_ns = steps[order], begun_ns[order]
        known = steps >= 0
        steps, begun_ns = steps[known], begun_ns[known]
        step_ms = np.diff(begun_ns) / 1e6
        # The ring may turn while it is read, and a job may start again at an earlier step.
        ended = (np.diff(steps) == 1) & (step_ms > 0)
        return steps[:-1][ended], step_ms[ended]
