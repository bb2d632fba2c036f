"""What one start of a job has spent its time on, as in the record."""

from __future__ import annotations

import msgspec


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Times since the first step, on rank 0; they add up to ``total_s``.

    Attributes:
        begun_s, total_s: when the first step began, in seconds since 1970; the time since then.
        input_s: waiting for the next batch, between steps; None if it is not told apart from the steps.
        measuring_s: what windows cost, as charged to ``max_overhead``.
        paused_s: pauses by ``monitor.pause()``.
    """

    begun_s: float
    total_s: float
    steps_s: float
    input_s: float | None
    evaluation_s: float
    checkpoint_s: float
    paused_s: float
    measuring_s: float
