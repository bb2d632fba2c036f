"""How long the streams of a device may wait in sequential steps before the host lets them go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from overlap_callbacks.gate.process_groups import groups_of_rank
from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.valve import Valve, valve_of

# The longest step so far, this many times.
_STEPS = 20


class StreamPatience:
    """Opens the valve of sequential steps.

    They have ``at_least_s``, or 20 times the longest step so far, but at most half of the shortest time after which
    a process group would end the job.
    """

    def __init__(self, at_least_s: float) -> None:
        self._at_least_s = at_least_s
        self._valve: Valve | None = None
        self._step_began_ns = perf_counter_ns()
        self._longest_step_s = 0.0
        self._timeouts_s: list[float] = []

    def step_begins(self) -> None:
        self._step_began_ns = perf_counter_ns()

    def step_ends(self) -> None:
        self._longest_step_s = max(self._longest_step_s, (perf_counter_ns() - self._step_began_ns) / 1e9)

    def open(self, stream: device.Stream | None, on_release: Callable[[Any, float], None]) -> Valve | None:
        """The valve of a stream's device, for a step; None if there can be none. See ``Valve.begin``."""
        self._valve = valve_of(stream)
        if self._valve is not None:
            groups = groups_of_rank() or ()
            if len(groups) != len(self._timeouts_s):
                self._timeouts_s = [_timeout_s(group) for group in groups]
            patience_s = max(self._at_least_s, _STEPS * self._longest_step_s)
            self._valve.begin(min([patience_s, *[timeout_s / 2 for timeout_s in self._timeouts_s]]), on_release)
        return self._valve

    def close(self) -> None:
        if self._valve is not None:
            self._valve.close()


def _timeout_s(group: Any) -> float:
    """How long a group waits for a collective on the accelerator before it ends the job; infinite if not known."""
    try:
        return float(group._get_backend(torch.device(device.kind())).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return math.inf
