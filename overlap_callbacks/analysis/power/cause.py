"""What slows the compute kernels down (equation 1): a verdict, and the share of each cause.

A kernel that only computes slows down by the ratio of the clocks, one that waits for memory by less. So the clock
explains at most ``clock_seq / clock_ov - 1``, and contention at least the (multiplicative) rest. The thresholds are
cautious judgements: if two causes are close, the verdict is "undecided".

Shares: with the loss to the clock ``c`` and the losses to other causes ``e`` at an equal clock::

    1 + slowdown = (1 + c) * (1 + e_sms + e_waves + ...)

The share of the clock is ``c``, that of each other cause is ``(1 + c) * e``, and the shares add up to the slowdown.
Only the clock is measured; SMs taken and waves are modelled (``kernels.sm_loss``). The rest is due to memory bandwidth
if the device's counters show that it was exhausted, otherwise unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Union

import msgspec

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.kernel_times import (
    CLOCK,
    MEMORY,
    SMS,
    UNEXPLAINED,
    WAVES,
    SlowdownCause,
    SlowdownShare,
    SlowdownShares,
)
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import Cause, JobModePower, JobPower, ModePower
from overlap_callbacks.analysis.results.window import SmLoss

percent, quantity = PLAIN.percent, PLAIN.quantity

NO_SLOWDOWN = "no slowdown"
POWER_CAP = "clock throttled by power cap"
TEMPERATURE = "clock throttled by temperature"
HARDWARE = "clock throttled by hardware"
MEMORY_BANDWIDTH = "memory bandwidth"
SM_CONTENTION = "SM contention"
UNDECIDED = "undecided"

# A smaller slowdown needs no explanation: a window measures it to a percent or two at best.
MIN_SLOWDOWN = 0.02
# The clock is the cause from the first share of the slowdown on, contention up to the second; in between, neither.
CLOCK_SHARE = 0.6
CONTENTION_SHARE = 0.4
# Minimum share of the overlapped time for which a reason must be in force: one reading in a block of ten.
MIN_REASON_FRACTION = 0.1
# Kernels reach about nine tenths of the memory bandwidth at best, and parts of a step need little of it. So a mean of
# six tenths over overlapped steps means that it was exhausted for much of the time.
DRAM_BUSY = 0.6
# If the mean is below four tenths, kernels do not wait for memory.
DRAM_FREE = 0.4
# An SM counts as busy if a warp is on it. At nine tenths or more, communication had to take SMs from computation.
SM_BUSY = 0.9
# With fewer clock readings during compute, in either mode, means over all of the modes' time are compared.
MIN_CLOCK_READINGS = 5


ModeFigures = Union[ModePower, JobModePower]


class Explanation(NamedTuple):
    """The cause of a window's compute slowdown: the shares of all causes, and the dominant one.

    There is no verdict without power, or if the slowdown is within noise.
    """

    verdict: SlowdownCause | None = None
    shares: SlowdownShares | None = None


def explain(
    figures: Mapping[str, Estimate], power: JobPower | None, losses: Sequence[SmLoss], compute_ms: float | None
) -> Explanation:
    """The cause of a window's compute slowdown, from clocks, counters and launches.

    ``losses`` are the model's, or their mean; ``compute_ms``: sequential compute per step of the same ranks.
    """
    slowdown = figures.get("compute_slowdown")
    if slowdown is None:
        return Explanation()
    overlapped, sequential = (None if power is None else power.of(mode) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL))
    shares = slowdown_shares(slowdown.value, compute_ms, losses, overlapped, sequential)
    if slowdown.ci_low is not None and slowdown.ci_high is not None and slowdown.ci_low <= 0 <= slowdown.ci_high:
        return Explanation(None, shares)  # within noise, which has no cause
    verdict = attribute(slowdown.value, overlapped, sequential)
    if verdict is not None and shares is not None:
        evidence = (*verdict.evidence, f"shares {shares_in_words(shares)}", *shares.notes)
        verdict = msgspec.structs.replace(verdict, evidence=evidence)
    return Explanation(verdict, shares)


def attribute(
    slowdown: float | None, overlapped: ModeFigures | None, sequential: ModeFigures | None
) -> SlowdownCause | None:
    """The cause of a slowdown; None if it or a mode's figures were not measured.

    Raises:
        ValueError: ``slowdown`` is -1 or less, as if kernels took no time.
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
        # Without clocks, only one cause is certain: exhausted memory bandwidth slows kernels down at any clock.
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
    """The SM clocks of the modes, above zero, and what they are means over, in words."""

    overlapped_mhz: float
    sequential_mhz: float
    basis: str

    @property
    def explains(self) -> float:
        """The maximum slowdown that the clocks explain, as a fraction; negative if the overlapped clock is higher."""
        return self.sequential_mhz / self.overlapped_mhz - 1


def clocks_of(overlapped: ModeFigures, sequential: ModeFigures) -> Clocks | None:
    """The clocks to compare: during compute if there are enough readings, else the modes' means; None without."""
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
            # The increase only ranks the causes, and is not required: a cap that is always in force still lowers the
            # clock further under more load.
            candidates.append((fraction - before, fraction, verdict))
    if not candidates:
        return UNDECIDED, [*evidence, "the clock was lower, and the device names no cause for it"]
    return max(candidates)[2], evidence


def _contention_of(overlapped: ModeFigures, sequential: ModeFigures) -> tuple[str, list[str]]:
    """What kernels contend for, memory bandwidth or SMs, from the counters of the device's units."""
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


# -- shares


def slowdown_shares(
    slowdown: float | None,
    compute_ms: float | None,
    losses: Sequence[SmLoss],
    overlapped: ModeFigures | None,
    sequential: ModeFigures | None,
) -> SlowdownShares | None:
    """The share of each cause; None without a slowdown to divide, or if no cause is known."""
    if slowdown is None or slowdown < MIN_SLOWDOWN:
        return None
    notes: list[str] = []
    shares = []
    clocks = clocks_of(overlapped, sequential) if overlapped is not None and sequential is not None else None
    from_clock = 0.0
    if clocks is not None:
        from_clock = min(clocks.explains, slowdown)
        if clocks.explains > slowdown:
            notes.append(
                f"the clocks would explain {percent(clocks.explains)}, more than there is: kernels wait for memory in "
                "part, which a clock of the SMs does not slow down"
            )
        shares.append(SlowdownShare(CLOCK, from_clock, f"measured: SM clocks, means over {clocks.basis}"))
    remainder = slowdown - from_clock
    if losses and compute_ms:
        modelled = _modelled(losses, compute_ms, from_clock, remainder, notes)
        shares += modelled
        remainder -= sum(share.fraction for share in modelled)
    if not shares:
        return None
    used = overlapped.parts.dram if overlapped is not None and overlapped.parts is not None else None
    if used is not None and used >= DRAM_BUSY:
        shares.append(
            SlowdownShare(
                MEMORY,
                remainder,
                f"what remains, at most: memory bandwidth was used to {percent(used)}, by its counter",
            )
        )
        remainder = 0.0
    unknown = (
        "memory bandwidth has no counter here" if used is None else f"memory bandwidth was used to {percent(used)}"
    )
    shares.append(SlowdownShare(UNEXPLAINED, remainder, f"what remains; {unknown}"))
    return SlowdownShares(slowdown, tuple(shares), tuple(notes))


def _modelled(
    losses: Sequence[SmLoss], compute_ms: float, from_clock: float, remainder: float, notes: list[str]
) -> list[SlowdownShare]:
    """The shares of SMs taken and of waves, as means over the ranks, scaled down to the rest of the slowdown."""
    per_rank_ms = len(losses) * compute_ms
    sms, waves = (
        (1 + from_clock) * sum(times_ms) / per_rank_ms
        for times_ms in ([loss.from_sms_ms for loss in losses], [loss.from_waves_ms for loss in losses])
    )
    beside_ms, modelled_ms = sum(loss.concurrent_ms for loss in losses), sum(loss.modelled_ms for loss in losses)
    held = sum(loss.sms_held * loss.modelled_ms for loss in losses) / modelled_ms
    basis = (
        f"modelled from the grids of {modelled_ms / beside_ms:.0%} of the compute during communication, which holds "
        f"{held:.0f} of {max(loss.num_sms for loss in losses)} SMs"
    )
    if sms + waves > max(0.0, remainder):
        notes.append(
            f"the model predicts {percent(sms + waves)} from SMs taken and waves, more than the "
            f"{percent(max(0.0, remainder))} that remain: its shares are scaled down to that"
        )
        scale = max(0.0, remainder) / (sms + waves)
        sms, waves = sms * scale, waves * scale
    return [SlowdownShare(SMS, sms, basis), SlowdownShare(WAVES, waves, basis)]


def shares_in_words(found: SlowdownShares) -> str:
    """E.g. ``of the 20.0%: lower clock 5.0%, waves 10.0%, unexplained 5.0%``."""
    shares = ", ".join(f"{share.cause} {percent(share.fraction)}" for share in found.shares)
    return f"of the {percent(found.slowdown)}: {shares}"
