"""Divides the compute slowdown (equation 1) among its causes: clock, SMs taken, waves, memory bandwidth, unexplained.

The clock comes first: at a lower clock, a kernel takes longer by the ratio of the clocks, whatever else slows it down.
So with the loss to the clock ``c`` and the losses to other causes ``e`` at an equal clock::

    1 + slowdown = (1 + c) * (1 + e_sms + e_waves + ...)

The share of the clock is ``c``, that of each other cause is ``(1 + c) * e``, and the shares add up to the slowdown.

Only the clock is measured. SMs taken and waves are modelled from the launches of kernels (``waves``). Counters of the
memory's use tell whether its bandwidth is the limit, not how much time that takes: so memory bandwidth gets what
remains, where the counters say that it was exhausted. Else the remainder is unexplained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.power.cause import DRAM_BUSY, MIN_SLOWDOWN, ModeFigures, attribute, clocks_of
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
from overlap_callbacks.analysis.results.power import JobPower
from overlap_callbacks.analysis.results.window import SmLoss

percent = PLAIN.percent


class Explanation(NamedTuple):
    """What the compute slowdown of a window is due to.

    Attributes:
        verdict: the cause that stands out, with its evidence; None without power, or if the slowdown may be chance.
        shares: of all causes.
    """

    verdict: SlowdownCause | None = None
    shares: SlowdownShares | None = None


def explain(
    figures: Mapping[str, Estimate], power: JobPower | None, losses: Sequence[SmLoss], compute_ms: float | None
) -> Explanation:
    """What the compute slowdown of a window is due to, as far as clocks, counters and launches tell.

    Args:
        figures: of the window, by name.
        power: over its devices.
        losses: the model's results, or their mean; empty if no rank has one.
        compute_ms: sequential time of the compute kernels per step, mean over the ranks of ``losses``.
    """
    slowdown = figures.get("compute_slowdown")
    if slowdown is None:
        return Explanation()
    overlapped, sequential = (None if power is None else power.of(mode) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL))
    shares = slowdown_shares(slowdown.value, compute_ms, losses, overlapped, sequential)
    if slowdown.ci_low is not None and slowdown.ci_high is not None and slowdown.ci_low <= 0 <= slowdown.ci_high:
        return Explanation(None, shares)  # it may be chance, and chance has no cause
    verdict = attribute(slowdown.value, overlapped, sequential)
    if verdict is not None and shares is not None:
        evidence = (*verdict.evidence, f"shares {shares_in_words(shares)}", *shares.notes)
        verdict = msgspec.structs.replace(verdict, evidence=evidence)
    return Explanation(verdict, shares)


def slowdown_shares(
    slowdown: float | None,
    compute_ms: float | None,
    losses: Sequence[SmLoss],
    overlapped: ModeFigures | None,
    sequential: ModeFigures | None,
) -> SlowdownShares | None:
    """The share of each cause; None without a slowdown to divide, or if nothing is known of any cause.

    Args:
        slowdown: of the compute kernels (equation 1), as a fraction.
        compute_ms: sequential time of the compute kernels per step, mean over the ranks of ``losses``.
        losses: the model's result of each rank that has one.
        overlapped: clocks and use of the device's parts in overlapped steps.
        sequential: the same in sequential steps.
    """
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
    """The shares of SMs taken and of waves, as means over the ranks, scaled down to what remains of the slowdown."""
    per_rank_ms = len(losses) * compute_ms
    sms, waves = (
        (1 + from_clock) * sum(times_ms) / per_rank_ms
        for times_ms in ([loss.from_sms_ms for loss in losses], [loss.from_waves_ms for loss in losses])
    )
    beside_ms, modelled_ms = sum(loss.concurrent_ms for loss in losses), sum(loss.modelled_ms for loss in losses)
    held = sum(loss.sms_held * loss.modelled_ms for loss in losses) / modelled_ms
    basis = (
        f"modelled from the grids of {modelled_ms / beside_ms:.0%} of the compute beside communication, which holds "
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
