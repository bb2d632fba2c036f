"""What the slowdown of the compute kernels is due to: a lower clock, or contention for the chip.

A kernel cannot lose more to the clock than the ratio of the clocks: one that only computes loses just that, one that
waits for memory less. So ``clock_seq / clock_ov - 1`` is the most that the clock explains; what remains beyond it,
multiplicatively, is the least that contention does.

The thresholds below are judgements, not published figures. They are cautious: where two causes are near each other, the
verdict is "undecided", and the evidence stands beside it.
"""

from __future__ import annotations

import math
from typing import Protocol

from overlap_callbacks.analysis.results.power import Cause, SlowdownCause, UnitUtilisation

NO_SLOWDOWN = "no slowdown"
POWER_CAP = "clock throttled by power cap"
TEMPERATURE = "clock throttled by temperature"
HARDWARE = "clock throttled by hardware"
MEMORY_BANDWIDTH = "memory bandwidth"
SM_CONTENTION = "SM contention"
UNDECIDED = "undecided"

# Below, there is nothing to explain: a window's slowdown is known to a percent or two at best.
MIN_SLOWDOWN = 0.02
# The clock is the cause where it explains most of the slowdown, contention where it explains little; between, neither.
CLOCK_SHARE = 0.6
CONTENTION_SHARE = 0.4
# A reason counts where it was in force for a tenth of the overlapped time: a single reading in a block of ten.
MIN_REASON_FRACTION = 0.1
# Kernels reach some nine tenths of the memory's bandwidth at best, and a step has parts that need little of it: a mean
# of six tenths over overlapped steps says that it was used up for much of the time.
DRAM_BUSY = 0.6
# Where the mean is below four tenths, memory is not what kernels wait for.
DRAM_FREE = 0.4
# SMs are counted as busy when a warp is on them: nine tenths and more say that communication had to take some from
# computation.
SM_BUSY = 0.9


class Use(Protocol):
    """What is asked of a mode's figures, be they of one device (``ModePower``) or of several (``JobModePower``)."""

    @property
    def sm_clock_mhz(self) -> float | None: ...

    @property
    def reasons(self) -> dict[str, float] | None: ...

    @property
    def parts(self) -> UnitUtilisation | None: ...

    def cause_fraction(self, cause: Cause) -> float | None: ...


def attribute(slowdown: float | None, overlapped: Use | None, sequential: Use | None) -> SlowdownCause | None:
    """Say what a slowdown is due to; None where the slowdown or the figures of a mode were not measured.

    Args:
        slowdown: of the compute kernels (eq. 1), as a fraction.
        overlapped: clocks, reasons and use of the device's parts in overlapped steps.
        sequential: the same in sequential steps.

    Raises:
        ValueError: ``slowdown`` is -1 or less: no kernel takes less than no time.
    """
    if slowdown is None or overlapped is None or sequential is None:
        return None
    if not slowdown > -1:
        raise ValueError(f"slowdown must be a fraction above -1, got {slowdown!r}")
    from_clock = _from_clock(overlapped.sm_clock_mhz, sequential.sm_clock_mhz)
    if slowdown < MIN_SLOWDOWN:
        words = f"compute kernels take {slowdown:+.1%} in overlapped steps, within {MIN_SLOWDOWN:.0%} of none"
        return SlowdownCause(NO_SLOWDOWN, (words,), slowdown, from_clock)
    evidence = [f"compute kernels take {slowdown:.1%} longer in overlapped steps"]
    if from_clock is None:
        verdict, more = _contention_of(overlapped, sequential)
        evidence.append("the SM clock is not known in both modes, so a lower clock is not ruled out")
        # Without clocks, only what needs none: memory that is used up holds kernels back at any clock.
        verdict = verdict if verdict == MEMORY_BANDWIDTH else UNDECIDED
        return SlowdownCause(verdict, (*evidence, *more), slowdown)
    contention = (1 + slowdown) / (1 + from_clock) - 1
    share = min(1.0, max(0.0, math.log1p(from_clock) / math.log1p(slowdown)))
    evidence.append(
        f"SM clock {overlapped.sm_clock_mhz:.0f} MHz overlapped, {sequential.sm_clock_mhz:.0f} MHz sequential: it "
        f"explains at most {max(0.0, from_clock):.1%} ({share:.0%} of the slowdown)"
    )
    if share >= CLOCK_SHARE:
        verdict, more = _cause_of_clock(overlapped, sequential)
    elif share <= CONTENTION_SHARE:
        verdict, more = _contention_of(overlapped, sequential)
    else:
        verdict, more = UNDECIDED, ["the clock and contention have similar shares"]
    return SlowdownCause(verdict, (*evidence, *more), slowdown, from_clock, contention, share)


def _from_clock(overlapped_mhz: float | None, sequential_mhz: float | None) -> float | None:
    if not overlapped_mhz or not sequential_mhz:
        return None
    return sequential_mhz / overlapped_mhz - 1


_BY_CAUSE = (
    (Cause.HARDWARE, HARDWARE),
    (Cause.TEMPERATURE, TEMPERATURE),
    (Cause.POWER, POWER_CAP),
    (Cause.UNNAMED, UNDECIDED),
)


def _cause_of_clock(overlapped: Use, sequential: Use) -> tuple[str, list[str]]:
    """Why the clock was lower: the cause that was in force for more time than in sequential steps, by the most."""
    if overlapped.reasons is None:
        return UNDECIDED, ["the clock was lower, but the device gave no reasons for its clock in these steps"]
    found: list[tuple[float, float, str]] = []
    evidence = []
    for cause, verdict in _BY_CAUSE:
        fraction = overlapped.cause_fraction(cause) or 0.0
        before = sequential.cause_fraction(cause) or 0.0
        if fraction or before:
            evidence.append(
                f"throttled by {cause.value} for {fraction:.0%} of overlapped and {before:.0%} of sequential time"
            )
        if fraction >= MIN_REASON_FRACTION:
            # A cap that is always in force still lowers the clock further under more load: the increase ranks the
            # causes, it is not required.
            found.append((fraction - before, fraction, verdict))
    if not found:
        return UNDECIDED, [*evidence, "the clock was lower, and the device names no cause for it"]
    return max(found)[2], evidence


def _contention_of(overlapped: Use, sequential: Use) -> tuple[str, list[str]]:
    """What kernels contend for: memory bandwidth or SMs, by the counters of the device's parts."""
    parts, before = overlapped.parts, sequential.parts
    if parts is None or parts.dram is None:
        return UNDECIDED, ["what kernels contend for is not known: the device has no counters of its parts"]
    was = f" ({before.dram:.0%} in sequential steps)" if before is not None and before.dram is not None else ""
    evidence = [f"memory bandwidth used to {parts.dram:.0%}{was}"]
    if parts.sm is not None:
        evidence.append(f"SMs busy for {parts.sm:.0%}")
    if parts.tensor is not None and before is not None and before.tensor is not None:
        evidence.append(f"tensor cores busy for {parts.tensor:.0%}, {before.tensor:.0%} in sequential steps")
    if parts.nvlink_rx_gb_s is not None and parts.nvlink_tx_gb_s is not None:
        evidence.append(f"NVLink {parts.nvlink_rx_gb_s:.0f} GB/s in, {parts.nvlink_tx_gb_s:.0f} GB/s out")
    if parts.dram >= DRAM_BUSY:
        return MEMORY_BANDWIDTH, evidence
    if parts.dram <= DRAM_FREE and parts.sm is not None and parts.sm >= SM_BUSY:
        return SM_CONTENTION, evidence
    return UNDECIDED, evidence
