"""A lasting change along a run, and what it is and is not: as in the record."""

from __future__ import annotations

import msgspec

# Before the name of a part of a step.
STEP = "step/"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A lasting change of a figure of windows, or of a part of every step.

    Attributes:
        what: name of the figure, or ``step`` and the part, such as ``step/input``.
        first_step: the first step after it.
        found_step: the step by which it was found.
        before, after: of the figure, in its unit; of a part, milliseconds a step.
        step_ms: by how much longer the step takes since then; 0 for a figure of windows.
        cause: ``input``, ``compute``, ``communication`` or ``other``; empty if not known.
        ranks: those at which it is; empty if it is at all of them, or not known.
        places: host and device of these ranks, in words.
        is_not: what it is not, in words.
        evidence: what windows since then measured, in words.
        repeat: the command that measures it again without the job; empty if there is none.
    """

    what: str
    first_step: int
    found_step: int
    before: float
    after: float
    step_ms: float = 0.0
    cause: str = ""
    ranks: tuple[int, ...] = ()
    places: tuple[str, ...] = ()
    is_not: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    repeat: str = ""

    @property
    def of_steps(self) -> bool:
        """Whether it is of a part of every step, not of a figure of windows."""
        return self.what.startswith(STEP)
