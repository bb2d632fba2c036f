"""What a job has decided about its arms, in words: for the log, W&B, the page and the terminal."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PLAIN, change_decimals, count, listed
from overlap_callbacks.analysis.results.decision import Decision, LeftOut, Why, Winner
from overlap_callbacks.analysis.status_words import time_in_words

_WHY = {
    Why.SLOWER: "slower than the job as configured",
    Why.NO_GAIN: "wins too little to matter",
    Why.BEHIND: "slower than {than}",
    Why.NOT_AHEAD: "not known to be faster than {than}",
    Why.STOPPED: "stopped winning",
    Why.NOT_KEPT: "wins in windows only: the job was no faster while it was on between them",
    Why.UNMEASURED: "not measured: {reason}",
}


def decision_in_words(decision: Decision) -> str:
    """The best arm, how sure that is, and what to put into the job; which arms are left and which not; the cost."""
    best, advised = decision.best, decision.advised
    said = [] if best is None else [_winner_in_words(best, kept=decision.keeps)]
    if advised is not None and (best is None or advised.speedup.value > best.speedup.value):
        said.append(_winner_in_words(advised, kept=False))
    if not said and decision.left:
        shows = [decision.would_show[arm] for arm in decision.left if arm in decision.would_show]
        know = f", where {PLAIN.percent(max(shows))} would show" if len(shows) == len(decision.left) else ""
        said = [f"none is known to be faster than the job as configured{know}; still measured: {listed(decision.left)}"]
    elif not said:
        said = ["none is faster than the job as configured"]
    out = [f"{one.arm} ({why_in_words(one)})" for one in decision.left_out]
    if out:
        said.append(f"no longer measured: {listed(out)}")
    if decision.training_s > 0:
        cost, training = PLAIN.quantity(decision.cost_s, "s"), time_in_words(decision.training_s)
        allowed = f"{PLAIN.percent(decision.budget)} and the dearest window are allowed"
        said.append(f"arms cost at most {cost} in {training} of training so far ({allowed})")
    return "; ".join(said)


def _winner_in_words(winner: Winner, *, kept: bool) -> str:
    what = "is turned on between windows, as the budget allows" if kept else "is recommended"
    if winner.caution:
        what = f"is only recommended ({winner.caution})"
    line = f"; to have it in all steps: {winner.line}" if winner.line else ""
    decimals = change_decimals(winner.speedup)
    value = PLAIN.percent(winner.speedup.value, signed=True, decimals=decimals)
    interval = PLAIN.interval(winner.speedup, "fraction", signed=True, decimals=decimals)
    certain = f" ({interval})" if interval else ""
    return f"{winner.arm} {what}, with a speed-up of {value}{certain} over {count(winner.num_windows, 'window')}{line}"


def why_in_words(one: LeftOut) -> str:
    """Why an arm is no longer measured."""
    return _WHY[one.why].format(than=one.than, reason=one.reason)
