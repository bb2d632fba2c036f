"""What to try first in a run and why, or why there is no advice, in a line."""

from __future__ import annotations

from overlap_callbacks.report.record import Record


def first_advice(record: Record) -> str:
    """What to try first and why; or why no advice is given. Empty where nothing has been measured.

    Advice rests on windows that count alone. Where there is none, the headline says why and what to do.
    """
    if not record.summary.measured:
        return ""
    if record.summary.control:
        return "No advice: a control run has no sequential steps."
    if not record.valid_windows:
        return "Advice comes with the first window that counts."
    found = record.bottleneck()
    if found is None or not found.advice:
        return "No advice: no profile shows what holds a step back. Set profiled_steps to 4."
    first = found.advice[0]
    return f"To try first: {first.what} {first.why}".rstrip()
