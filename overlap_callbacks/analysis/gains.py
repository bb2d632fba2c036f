"""What a change could win, by the facts of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.environment import JobEnvironment, RankEnvironment
from overlap_callbacks.analysis.results.kernel_times import SlowdownShares
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import Setting
from overlap_callbacks.analysis.results.step_parts import StepParts

IN_A_STEP = " in a step of "
EXPOSED = "exposed time"


class Gain(NamedTuple):
    """What a change could win, in words; and the least and the most, of a step of ``step_ms``."""

    words: str
    low_ms: float
    high_ms: float
    step_ms: float
    assumes: str

    def __str__(self) -> str:
        return self.words


class JobFacts(NamedTuple):
    """The facts that advice depends on.

    Attributes:
        detailed: a window with its collectives.
        shares: the compute slowdown divided among its causes, if known.
        configuration: what the adapter read of the job; empty if unknown.
        environment, own: of the job, and of one rank; None if unknown.
        precision: of the matrix products; empty if unknown.
        step_ms: an overlapped step without the profiler; None to give gains as parts of a profiled one.
        exposed: ends of the interval of exposed communication, over its value.
    """

    parts: StepParts
    detailed: OverlapReport
    shares: SlowdownShares | None = None
    configuration: Mapping[str, Setting] = {}
    environment: JobEnvironment | None = None
    own: RankEnvironment | None = None
    precision: str = ""
    step_ms: float | None = None
    exposed: tuple[float, float] = (1.0, 1.0)

    def up_to(self, ms: float, of: str = EXPOSED, *, least_ms: float = 0.0, more_ms: float = 0.0) -> Gain:
        """The possible gain from ``ms`` of a profiled step, or what is certain of it (``least_ms``).

        ``ms`` is no bound of the whole gain: fewer collectives take the host less time too (``more_ms``), and exposed
        time has an interval.
        """
        low, high = self.exposed if of.startswith(EXPOSED[:7]) else (1.0, 1.0)
        total_ms = self.parts.total_ms
        words = f"up to {self.ms(ms)} of {of}{IN_A_STEP}{self.ms(total_ms)}"
        assumes = f"what it saves is {of}" if not least_ms else f"it saves its share of {of}"
        return Gain(
            words,
            self._unprofiled(least_ms * low),
            self._unprofiled(min(ms * high + more_ms, total_ms)),
            self._unprofiled(total_ms),
            f"{assumes}{', or of the host' if more_ms else ''}; nothing else changes",
        )

    def ms(self, ms: float) -> str:
        """A part of a profiled step, as the same part of one without the profiler."""
        return PLAIN.quantity(self._unprofiled(ms), "ms")

    def _unprofiled(self, ms: float) -> float:
        total_ms = self.parts.total_ms
        return ms / total_ms * (self.step_ms or total_ms)

    @property
    def on_cpu(self) -> bool:
        return self.detailed.device == "cpu"

    def variable(self, name: str) -> str:
        return "" if self.own is None else self.own.variables.get(name, "")
