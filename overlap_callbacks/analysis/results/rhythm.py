"""A rhythm of the job: something that it does at every k-th step, such as logging or waiting for a loader's worker."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt


class Rhythm(msgspec.Struct, frozen=True):
    """Steps that recur and take longer than the others.

    Attributes:
        period: steps from one to the next.
        phase: step n is one of them if ``n % period == phase``.
        extra_ms: how much longer they take than a usual step; below zero if they take less.
        step_ms: a usual step.
    """

    period: int
    phase: int
    extra_ms: float
    step_ms: float

    def hits(self, steps: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these steps are hits; shape (number of steps,)."""
        return np.equal(np.asarray(steps, dtype=np.int64) % self.period, self.phase)
