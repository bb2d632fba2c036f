"""Attributes the slowdown of the compute kernels to a cause: a lower clock, or contention for the chip.

A kernel cannot lose more to the clock than the ratio of the clocks. A kernel that only computes loses exactly that; one
that waits for memory loses less. So ``clock_seq / clock_ov - 1`` is the maximum that the clock explains. What remains,
multiplicatively, is the minimum that contention explains.

The thresholds below are judgements, not published figures. They are cautious: if two causes are close to each other,
the verdict is "undecided", and the evidence is given with it.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.kernel_times import SlowdownCause
from overlap_callbacks.analysis.results.power import Cause, UnitUtilisation

percent, quantity = PLAIN.percent, PLAIN.quantity

NO_SLOWDOWN = "no slowdown"
POWER_CAP = "clock throttled by power cap"
TEMPERATURE = "clock throttled by temperature"
HARDWARE = "clock throttled by hardware"
MEMORY_BANDWIDTH = "memory bandwidth"
SM_CONTENTION = "SM contention"
UNDECIDED = "undecided"

# A smaller slowdown needs no explanation: a window's slowdown is known to a percent or two at best.
MIN_SLOWDOWN = 0.02
# Share of the slowdown that the clock must explain to be the cause, and below which contention is. In between, neither.
CLOCK_SHARE = 0.6
CONTENTION_SHARE = 0.4
# A reason counts if it was in force for a tenth of the overlapped time: one reading in a block of ten.
MIN_REASON_FRACTION = 0.1
# Kernels reach about nine tenths of the memory's bandwidth at best, and parts of a step need little of it. A mean of
# six tenths over overlapped steps means that it was exhausted for much of the time.
DRAM_BUSY = 0.6
# If the mean is below four tenths, kernels do not wait for memory.
DRAM_FREE = 0.4
# An SM counts as busy if a warp is on it. At nine tenths and more, communication had to take SMs from computation.
SM_BUSY = 0.9
# With fewer readings of the clock in compute, in either mode, the means over all of the modes' time are compared.
MIN_CLOCK_READINGS = 5


class ModeFigures(Protocol):
    """The figures of a mode that are needed here, of one device (``ModePower``) or of several (``JobModePower``)."""

    @property
    def sm_clock_mhz(self) -> float | None:
        """Mean clock of the SMs."""
        ...

    @property
    def compute_clock_mhz(self) -> float | None:
        """Mean clock of the SMs while they computed."""
        ...

    @property
    def compute_clock_readings(self) -> int:
        """Number of readings that it rests on."""
        ...

    @property
    def reasons(self) -> dict[str, float] | None:
        """Fraction of time for each reason for the clock."""
        ...

    @property
    def parts(self) -> UnitUtilisation | None:
        """How busy the parts of the device were."""
        ...

    def cause_fraction(self, cause: Cause) -> float | None:
        """Fraction of time in which the clock was throttled for a cause."""
        ...


def attribute(
    slowdown: float | None, overlapped: ModeFigures | None, sequential: ModeFigures | None
) -> SlowdownCause | None:
    """The cause of a slowdown; None if the slowdown or the figures of a mode were not measured.

    Args:
        slowdown: of the compute kernels (equation 1), as a fraction.
        overlapped: clocks, reasons and use of the device's parts in overlapped steps.
        sequential: the same in sequential steps.

    Raises:
        ValueError: ``slowdown`` is -1 or less, which would mean that kernels take no time.
    """
    if slowdown is None or overlapped is None or sequential is None:
        return None
    if not slowdown > -1:
        raise ValueError(f"slowdown must be a fraction above -1, got {slowdown!r}")
    clocks = clocks_of(overlapped, sequential)
    from_clock = None if clocks is None else clocks.explains
    if slowdown < MIN_SLOWDOWN:
        small = (
            f"compute kernels take {percent(slowdown, signed=True)} in overlapped steps, within {MIN_SLOWDOWN:.0%} of "
            "none"
        )
        return SlowdownCause(NO_SLOWDOWN, (small,), slowdown, from_clock)
    evidence = [f"compute kernels take {percent(slowdown)} longer in overlapped steps"]
    if clocks is None or from_clock is None:
        verdict, more = _contention_of(overlapped, sequential)
        evidence.append("the SM clock is not known in both modes, so a lower clock is not ruled out")
        # Without clocks, only one cause can be told: exhausted memory bandwidth slows kernels down at any clock.
        verdict = verdict if verdict == MEMORY_BANDWIDTH else UNDECIDED
        return SlowdownCause(verdict, (*evidence, *more), slowdown)
    contention = (1 + slowdown) / (1 + from_clock) - 1
    share = min(1.0, max(0.0, math.log1p(from_clock) / math.log1p(slowdown)))
    evidence.append(
        f"SM clock {quantity(clocks.overlapped_mhz, 'MHz')} overlapped, {quantity(clocks.sequential_mhz, 'MHz')} "
        f"sequential: it explains at most {percent(max(0.0, from_clock))} ({share:.0%} of the slowdown)"
    )
    evidence.append(f"these clocks are means over {clocks.basis}")
    if share >= CLOCK_SHARE:
        verdict, more = _cause_of_clock(overlapped, sequential)
    elif share <= CONTENTION_SHARE:
        verdict, more = _contention_of(overlapped, sequential)
    else:
        verdict, more = UNDECIDED, ["the clock and contention have similar shares"]
    return SlowdownCause(verdict, (*evidence, *more), slowdown, from_clock, contention, share)


class Clocks(NamedTuple):
    """The SM clocks of the modes, and what they rest on.

    Attributes:
        overlapped_mhz, sequential_mhz: above zero.
        basis: what they are means over, in words.
    """

    overlapped_mhz: float
    sequential_mhz: float
    basis: str

    @property
    def explains(self) -> float:
        """The most of a slowdown that the clocks explain, as a fraction; negative if the overlapped one is higher."""
        return self.sequential_mhz / self.overlapped_mhz - 1


def clocks_of(overlapped: ModeFigures, sequential: ModeFigures) -> Clocks | None:
    """The clocks to compare: while computing if enough readings fall there, else the modes' means; None without."""
    counts = overlapped.compute_clock_readings, sequential.compute_clock_readings
    if overlapped.compute_clock_mhz and sequential.compute_clock_mhz and min(counts) >= MIN_CLOCK_READINGS:
        basis = f"readings that fall into compute ({counts[0]} overlapped, {counts[1]} sequential)"
        return Clocks(overlapped.compute_clock_mhz, sequential.compute_clock_mhz, basis)
    if not overlapped.sm_clock_mhz or not sequential.sm_clock_mhz:
        return None
    basis = (
        "all of the steps' time, communication alone included, in which a clock may rise: too few readings fall into "
        "compute"
    )
    return Clocks(overlapped.sm_clock_mhz, sequential.sm_clock_mhz, basis)


_BY_CAUSE = (
    (Cause.HARDWARE, HARDWARE),
    (Cause.TEMPERATURE, TEMPERATURE),
    (Cause.POWER, POWER_CAP),
    (Cause.UNNAMED, UNDECIDED),
)


def _cause_of_clock(overlapped: ModeFigures, sequential: ModeFigures) -> tuple[str, list[str]]:
    """Why the clock was lower: the cause whose share of time grew most from sequential to overlapped steps."""
    if overlapped.reasons is None:
        return UNDECIDED, ["the clock was lower, but the device gave no reasons for its clock in these steps"]
    candidates: list[tuple[float, float, str]] = []
    evidence = []
    for cause, verdict in _BY_CAUSE:
        fraction = overlapped.cause_fraction(cause) or 0.0
        before = sequential.cause_fraction(cause) or 0.0
        if fraction or before:
            evidence.append(
                f"throttled by {cause.value} for {percent(fraction)} of overlapped and {percent(before)} of sequential "
                "time"
            )
        if fraction >= MIN_REASON_FRACTION:
            # The increase only ranks the causes, it is not required: a cap that is always in force still lowers the
            # clock further under more load.
            candidates.append((fraction - before, fraction, verdict))
    if not candidates:
        return UNDECIDED, [*evidence, "the clock was lower, and the device names no cause for it"]
    return max(candidates)[2], evidence


def _contention_of(overlapped: ModeFigures, sequential: ModeFigures) -> tuple[str, list[str]]:
    """What kernels contend for, memory bandwidth or SMs, by the counters of the device's parts."""
    parts, before = overlapped.parts, sequential.parts
    if parts is None or parts.dram is None:
        return UNDECIDED, ["what kernels contend for is not known: the device has no counters of its parts"]
    was = f" ({percent(before.dram)} in sequential steps)" if before is not None and before.dram is not None else ""
    evidence = [f"memory bandwidth used to {percent(parts.dram)}{was}"]
    if parts.sm is not None:
        evidence.append(f"SMs busy for {percent(parts.sm)}")
    if parts.tensor is not None and before is not None and before.tensor is not None:
        evidence.append(f"tensor cores busy for {percent(parts.tensor)}, {percent(before.tensor)} in sequential steps")
    if parts.nvlink_rx_gb_s is not None and parts.nvlink_tx_gb_s is not None:
        evidence.append(
            f"NVLink {quantity(parts.nvlink_rx_gb_s, 'GB/s')} in, {quantity(parts.nvlink_tx_gb_s, 'GB/s')} out"
        )
    if parts.dram >= DRAM_BUSY:
        return MEMORY_BANDWIDTH, evidence
    if parts.dram <= DRAM_FREE and parts.sm is not None and parts.sm >= SM_BUSY:
        return SM_CONTENTION, evidence
    return UNDECIDED, evidence
