"""Readings in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlap_callbacks.power.source import Reading, Utilisation

Floats = npt.NDArray[np.float64]
Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Readings:
    """Readings of one source, in the order of time.

    Attributes:
        time_ns: shape (n,), on ``time.perf_counter_ns``.
        since_ns: start of the time of which ``power_w`` speaks.
        power_w, energy_j, sm_clock_mhz, memory_clock_mhz, temperature_c, limit_w: shape (n,), NaN where the reading has
            none.
        reasons: of each reading.
        reasons_since_ns: start of the time of which ``reasons`` speaks.
        utilisation: of each reading.
    """

    time_ns: Times
    since_ns: Times
    power_w: Floats
    energy_j: Floats
    sm_clock_mhz: Floats
    memory_clock_mhz: Floats
    temperature_c: Floats
    limit_w: Floats
    reasons: tuple[frozenset[str] | None, ...]
    reasons_since_ns: Times
    utilisation: tuple[Utilisation | None, ...]

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> Readings:
        """The columns of some readings."""
        time_ns = np.array([r.time_ns for r in readings], dtype=np.int64)
        averaging_ns = np.array([round(r.averaging_s * 1e9) for r in readings], dtype=np.int64)

        def column(name: str) -> Floats:
            return np.array([getattr(r, name) for r in readings], dtype=np.float64)  # None becomes NaN

        return cls(
            time_ns=time_ns,
            since_ns=time_ns - averaging_ns,
            power_w=column("power_w"),
            energy_j=column("energy_j"),
            sm_clock_mhz=column("sm_clock_mhz"),
            memory_clock_mhz=column("memory_clock_mhz"),
            temperature_c=column("temperature_c"),
            limit_w=column("limit_w"),
            reasons=tuple(r.reasons for r in readings),
            reasons_since_ns=np.array(
                [r.time_ns if r.reasons_since_ns is None else r.reasons_since_ns for r in readings], dtype=np.int64
            ),
            utilisation=tuple(r.utilisation for r in readings),
        )

    def __len__(self) -> int:
        return len(self.time_ns)
