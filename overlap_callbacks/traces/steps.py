"""Finds the steps of a trace, and marks those of a file that is cut off."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from overlap_callbacks.traces.collect import Note
from overlap_callbacks.traces.event_columns import MAX_TIME_NS

_STEP = re.compile(r"ProfilerStep#(\d{1,18})(?!\d)")
# Steps that a sentence names; there may be thousands.
_MAX_NAMED = 8


class TraceStep(msgspec.Struct, frozen=True):
    """A range of the host that is one step, as a rule ``ProfilerStep#``.

    Attributes:
        number: the number after the ``#``.
        start_ns, end_ns: its bounds, in nanoseconds on the clock of the file.
        cut: whether the file is cut off, and kernels of this step may be missing.
    """

    number: int
    start_ns: int
    end_ns: int
    cut: bool = False

    @property
    def wall_ms(self) -> float:
        """Length of the step on the host, in milliseconds."""
        return (self.end_ns - self.start_ns) / 1e6


def steps_of(notes: Sequence[Note], pattern: re.Pattern[str] | None = None) -> tuple[TraceStep, ...]:
    """The steps, ascending in time; if several ranges have one number, the first counts.

    Args:
        notes: ranges of the host.
        pattern: finds the names of steps. Its first group, if it has one, is the step's number; else the steps are
            numbered by their order. None for torch's ``ProfilerStep#``.
    """
    steps: dict[int, TraceStep] = {}
    if pattern is None or pattern.groups:
        for note in notes:
            matched = (pattern or _STEP).search(note.name) if pattern else _STEP.match(note.name)
            number = matched.group(1) if matched else None
            if number is not None and number.isdecimal() and len(number) <= 18:
                steps.setdefault(int(number), TraceStep(int(number), note.start_ns, note.end_ns))
    else:
        ranges = sorted((note.start_ns, note.end_ns) for note in notes if pattern.search(note.name))
        for number, (start_ns, end_ns) in enumerate(ranges):
            steps[number] = TraceStep(number, start_ns, end_ns)
    return tuple(sorted(steps.values(), key=lambda step: step.start_ns))


def bounds_of(steps: Sequence[TraceStep]) -> list[tuple[int, int]]:
    """Start and end of each step in nanoseconds; a step that reaches into the next one is cut there."""
    next_starts = [step.start_ns for step in steps[1:]]
    return [
        (step.start_ns, min(step.end_ns, next_start))
        for step, next_start in zip(steps, [*next_starts, MAX_TIME_NS], strict=False)
    ]


def mark_cut(steps: tuple[TraceStep, ...], held: frozenset[int]) -> tuple[tuple[TraceStep, ...], str]:
    """Mark the steps of a file that is cut off: each may lack kernels.

    Kineto writes what the host did thread by thread, and then the device's buffers one after another: neither is in the
    order of time. So where a file ends does not tell which of its steps are whole.

    Args:
        steps: the steps, ascending in time.
        held: indices of the steps that have kernels.

    Returns:
        The steps, and words for them; empty without steps.
    """
    if not steps:
        return steps, ""
    missing = [step.number for i, step in enumerate(steps) if i not in held]
    named = "any step may lack some, and none is in a mean"
    if missing:
        named += f"; {_named(missing)} {'has' if len(missing) == 1 else 'have'} none"
    return tuple([msgspec.structs.replace(step, cut=True) for step in steps]), named


def _named(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"step{'s' if len(numbers) > 1 else ''} {shown}{more}"
