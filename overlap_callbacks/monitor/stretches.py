"""Ends a stretch of steps where all ranks end it, so that its parts can be added up over the ranks."""

from __future__ import annotations

from overlap_callbacks.monitor.background.parts import stretch_steps
from overlap_callbacks.monitor.session import SessionSlot


class Stretches:
    """The stretches of steps of a job, by number: each begins at a multiple of its length."""

    def __init__(self, slot: SessionSlot) -> None:
        self._slot = slot
        self._length = stretch_steps(slot.config.schedule)
        self._open, self._rewinds = -1, 0

    @property
    def next_step(self) -> int:
        """The first step of the next stretch."""
        return (self._open + 1) * self._length

    def step_began(self, step: int) -> None:
        """A step begins that is perhaps the first of a stretch."""
        number = step // self._length
        if number != self._open:
            self.end()
            self._open = number

    def rewind(self) -> None:
        """The step number went back: numbers of stretches may repeat."""
        self._open = -1
        self._rewinds += 1

    def end(self, *, job_ends: bool = False) -> None:
        """Add up over the ranks what the steps of the open stretch were spent on."""
        session = self._slot.acquire_for_parts(opens=not job_ends) if self._open >= 0 else None
        if session is not None:
            session.reporter.submit_stretch(self._open, f"{self._rewinds}/{self._open}")
