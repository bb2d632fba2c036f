"""Which windows of a run count, and why others do not, in words for the page and the terminal."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import count, ranges
from overlap_callbacks.analysis.measuring_cost import cost_of_run
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.race import RaceCheck, RaceVerdict
from overlap_callbacks.analysis.run_summary import CONTROL, COUNTS, CUT_SHORT, NO_CONTROL, NOT_VALID, RunSummary
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.record_lines import MAX_LINE_BYTES

_KINDS = (
    ("not valid", frozenset({NOT_VALID})),
    ("cut short", frozenset({CUT_SHORT})),
    ("of another kind (control, or not)", frozenset({CONTROL, NO_CONTROL})),
)


def windows_that_count(summary: RunSummary) -> str:
    """E.g. ``1 of 2 windows counts``, ``3 of 3 windows count``."""
    counting, measured = summary.states()[COUNTS], len(summary.windows)
    return f"{counting:,} of {count(measured, 'window')} {'counts' if 1 in (counting, measured) else 'count'}"


def left_out(summary: RunSummary) -> list[tuple[str, str]]:
    """Why windows do not count, and which: e.g. ``("cut short", "2 (windows 1, 4)")``."""
    found = []
    for kind, states in _KINDS:
        numbers = [window.window for window in summary.windows if summary.state_of(window) in states]
        if numbers:
            found.append((kind, f"{len(numbers):,} ({which(numbers)})"))
    return found


def unreadable(record: Record) -> str:
    """How many lines of a record could not be read; for one that has any."""
    told = f"{count(record.broken_lines, 'line')} of the record could not be read"
    if record.long_lines:
        told += f"; {record.long_lines:,} of them longer than {MAX_LINE_BYTES // 2**20} MiB, so no line of ours"
    return told


def which(numbers: list[int]) -> str:
    """E.g. ``window 3``, ``windows 1, 4``."""
    return f"{'window' if len(set(numbers)) == 1 else 'windows'} {ranges(numbers)}"


def cost_of(record: Record) -> Estimate | None:
    """By how much measuring made training longer; None where no window tells."""
    every_n_steps = record.runs[-1].schedule.get("every_n_steps", 0) if record.runs else 0
    return cost_of_run([*record.windows, *record.arms], every_n_steps)


def race_of(record: Record) -> RaceCheck | None:
    """The race check to tell of: one that found a race, else the last one; None where no step was repeated."""
    checks = [window.race for window in record.windows if window.race is not None]
    races = [check for check in checks if check.verdict is RaceVerdict.RACE]
    return races[-1] if races else checks[-1] if checks else None
