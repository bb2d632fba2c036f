"""Ends a stretch of steps where all ranks end it, so that its parts can be added up over the ranks."""

from __future__ import annotations

from overlap_callbacks.instruments import clocks
from overlap_callbacks.monitor.background.parts import stretch_steps
from overlap_callbacks.monitor.session import SessionSlot

# The first steps are looked at before the first window; after so many steps, or this time, if it comes later. Of long
# steps fewer are enough, to tell within the first minute.
_LEAST_STEPS, _MOST_STEPS, _LOOK_AFTER_NS = 8, 128, 30 * 10**9
_LEAST_LONG_STEPS, _LOOK_BY_NS = 5, 45 * 10**9


class Stretches:
    """The stretches of steps of a job, by number: each begins at a multiple of its length."""

    def __init__(self, slot: SessionSlot) -> None:
        self._slot = slot
        self._length = stretch_steps(slot.config.schedule)
        self._open, self._rewinds = -1, 0
        self._schedule = slot.config.schedule
        # Of the first step, until the first steps are looked at: its number, and when it began.
        self._first: tuple[int, int] | None = None
        self._looked = False

    @property
    def next_step(self) -> int:
        """The first step of the next stretch, or the next step of all."""
        return (self._open + 1) * self._length if self._looked else 0

    def step_began(self, step: int) -> None:
        """A step begins that is perhaps the first of a stretch."""
        if not self._looked:
            self._look_at_first_steps(step)
        number = step // self._length
        if number != self._open:
            self.end()
            self._open = number

    def _look_at_first_steps(self, step: int) -> None:
        """Have them looked at before the first window, and within the first minute."""
        now_ns = clocks.now()
        if self._first is None:
            self._first = step, now_ns
        first, begun_ns = self._first
        enough = step >= first + _MOST_STEPS or now_ns - begun_ns >= _LOOK_AFTER_NS
        least = _LEAST_LONG_STEPS if now_ns - begun_ns >= _LOOK_BY_NS else _LEAST_STEPS
        if step < first + least or not (enough or step >= self._schedule.next_window_step(first)):
            return
        self._looked = True
        session = self._slot.acquire_for_parts(opens=True)
        if session is not None:
            session.reporter.submit_stretch(-1, "")

    def rewind(self) -> None:
        """The step number went back: numbers of stretches may repeat."""
        self._open = -1
        self._rewinds += 1

    def end(self, *, job_ends: bool = False) -> None:
        """Add up over the ranks what the steps of the open stretch were spent on."""
        session = self._slot.acquire_for_parts(opens=not job_ends) if self._open >= 0 else None
        if session is not None:
            session.reporter.submit_stretch(self._open, f"{self._rewinds}/{self._open}")
