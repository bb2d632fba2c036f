"""Checks that step numbers go up by one, and says what follows if they do not. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """A place at which a step does not follow the one before it.

    Attributes:
        key: names the kind of break.
        reason: why an open window cannot go on, in words.
        message: for the user.
        rewind: whether the numbers went back.
        misuse: whether the calls are wrong, so that strict mode raises an error.
    """

    key: str
    reason: str
    message: str
    rewind: bool = False
    misuse: bool = True


def breaks_before(step: int, previous: int, *, nested: bool, in_window: bool) -> list[Break]:
    """What is wrong with a step that begins.

    Args:
        step: its number.
        previous: number of the step that began before it; -1 if there was none.
        nested: whether that step has not ended.
        in_window: whether a window is open, whose steps must follow each other.
    """
    breaks = []
    if nested:
        reason = f"step {step} began before step {previous} ended"
        breaks.append(Break("nested", reason, f"{reason}: call step_end before the next step_begin"))
    if step <= previous:
        message = (
            f"step_begin({step}) came after step {previous}: step numbers must go up; the schedule goes on from {step}"
        )
        breaks.append(Break("back", "the step number went back", message, rewind=True))
    elif in_window and not nested and step != previous + 1:
        reason = f"the step number jumped from {previous} to {step} within a window"
        breaks.append(Break("jump", reason, f"{reason}, which was cut short", misuse=False))
    return breaks
