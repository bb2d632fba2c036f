"""What a compute slowdown is due to, in words for the page and the terminal: the cause first, then what it rests on."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PLAIN, Style
from overlap_callbacks.analysis.power import cause
from overlap_callbacks.analysis.results.power import SlowdownCause

_IN_WORDS = {
    cause.NO_SLOWDOWN: "No compute slowdown to explain",
    cause.POWER_CAP: "Compute is slower because a power cap lowers the clock",
    cause.TEMPERATURE: "Compute is slower because heat lowers the clock",
    cause.HARDWARE: "Compute is slower because the hardware's own protection lowers the clock",
    cause.MEMORY_BANDWIDTH: "Compute is slower because it contends with communication for memory bandwidth",
    cause.SM_CONTENTION: "Compute is slower because communication takes SMs from it",
    cause.UNDECIDED: "Cause unclear",
}


def cause_sentence(found: SlowdownCause, style: Style = PLAIN) -> str:
    """The cause, and how much of the slowdown goes with the clock, as in "Cause unclear; 44% goes with the clock"."""
    words = _IN_WORDS.get(found.verdict, found.verdict[:1].upper() + found.verdict[1:])
    if found.verdict == cause.NO_SLOWDOWN:
        return f"{words}."
    if found.clock_share is None:
        return f"{words}; how much goes with the clock is not known."
    return f"{words}; {style.percent(found.clock_share, decimals=0)} goes with the clock."


def evidence_sentence(found: SlowdownCause, *, of_window: int) -> str:
    """What the cause rests on."""
    return f"Verdict of window {of_window}: {found.verdict}. Evidence: {'; '.join(found.evidence) or 'none'}."
