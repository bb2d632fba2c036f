"""What each step spends its time on: parts that add up exactly, in whole nanoseconds.

A step lasts from its beginning to the next step's. A mark says what begins: a part, which lasts until the next mark. So
the parts of a step add up to its length, whatever the marks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# In the order of a step, which is the order of the frontier's prefixes. The first is of steps whose forward pass is not
# marked. ``other``: between two parts that do not say whose it is.
PARTS = (
    "input_forward_backward", "input", "forward", "backward", "waiting", "optimizer",
    "paused", "evaluation", "checkpoint", "other",
)  # fmt: skip
TOGETHER, INPUT, FORWARD, BACKWARD, WAITING, OPTIMIZER, PAUSED, EVALUATION, CHECKPOINT, OTHER = range(len(PARTS))
# Marks that are no part. What follows a backward pass is told by the next mark: another batch, or the optimizer, also
# where it is not marked.
AFTER_BACKWARD = len(PARTS)
AS_AT_FIRST = AFTER_BACKWARD + 1  # the part with which the step began goes on
FIRST_STEP = AS_AT_FIRST + 1  # the mark of the beginning of step n is FIRST_STEP + n


@dataclass(frozen=True, eq=False)
class StepVectors:
    """Parts of complete steps of one rank.

    Attributes:
        steps: step numbers, in the order in which they ran.
        begun_ns: host time (``time.perf_counter_ns``) at the beginning of each.
        parts_ns: time in each of ``PARTS`` (columns) of each step (rows); -1 throughout if not known.
        ordinary: False for steps of windows, and for those with a pause: no rhythm and no change is sought in them.
    """

    steps: Ints
    begun_ns: Ints
    parts_ns: Ints
    ordinary: Bools

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def step_ns(self) -> Ints:
        """Length of each step, from its beginning to the next one's: the exact sum of its parts."""
        return np.asarray(self.parts_ns.sum(axis=1), dtype=np.int64)

    def where(self, chosen: Bools | slice) -> StepVectors:
        return StepVectors(self.steps[chosen], self.begun_ns[chosen], self.parts_ns[chosen], self.ordinary[chosen])

    @classmethod
    def joined(cls, stretches: Sequence[StepVectors]) -> StepVectors:
        """Several stretches, one after another."""
        if not stretches:
            none = np.zeros(0, dtype=np.int64)
            return cls(none, none, np.zeros((0, len(PARTS)), dtype=np.int64), none.astype(np.bool_))
        return cls(
            np.concatenate([stretch.steps for stretch in stretches]),
            np.concatenate([stretch.begun_ns for stretch in stretches]),
            np.concatenate([stretch.parts_ns for stretch in stretches]),
            np.concatenate([stretch.ordinary for stretch in stretches]),
        )


def parts_of(marks: Ints, times_ns: Ints) -> Ints:
    """The parts of complete steps, as rows.

    Args:
        marks: what begins, in order: a part, or one of the other marks above. The first and the last are beginnings of
            steps; the last one's step is not complete.
        times_ns: when, on one clock.
    """
    begins = marks >= FIRST_STEP
    step_of = np.cumsum(begins) - 1
    num_steps = int(step_of[-1])
    # Without a mark of its forward pass a step's input and passes are one, as with a compiled model.
    told = np.zeros(num_steps + 1, dtype=np.bool_)
    told[step_of[marks == FORWARD]] = True
    at_first = np.where(told, INPUT, TOGETHER)[step_of]
    following = np.append(marks[1:], FIRST_STEP)
    after_backward = np.select(
        [
            np.isin(following, (OPTIMIZER, OTHER)) | (following >= FIRST_STEP),
            following == BACKWARD,
            (following == FORWARD) | (following == WAITING),
        ],
        [OPTIMIZER, BACKWARD, at_first],
        OTHER,
    )
    parts = np.select([marks >= AS_AT_FIRST, marks == AFTER_BACKWARD], [at_first, after_backward], marks)
    parts[(parts == BACKWARD) & ~told[step_of]] = TOGETHER
    places = (step_of * len(PARTS) + parts)[:-1]
    # Sums of whole numbers below 2**53 are exact.
    sums = np.bincount(places, weights=np.diff(times_ns), minlength=num_steps * len(PARTS))
    return sums.astype(np.int64).reshape(num_steps, len(PARTS))
