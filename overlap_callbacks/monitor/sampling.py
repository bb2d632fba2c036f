"""Runs the scheduled windows, and samples single steps between them."""

from __future__ import annotations

from overlap_callbacks.monitor.session import SessionSlot
from overlap_callbacks.monitor.step_ring import StepRing
from overlap_callbacks.monitor.step_runner import check_gate_health
from overlap_callbacks.monitor.window import SampledStep
from overlap_callbacks.monitor.window_runner import WindowRunner

# Sampled steps kept for the next window; if there are more, every second one is dropped. The same on all ranks.
_MAX_KEPT = 64


class SamplingRunner(WindowRunner):
    """Runs windows, and after the first one records the all-to-alls of every n-th step between them.

    Such a step costs a few microseconds per collective, the gate's cost. The other steps cost nothing.
    """

    def __init__(self, every: int, slot: SessionSlot, ring: StepRing) -> None:
        super().__init__(slot, ring)
        self._every = every
        self._kept: list[SampledStep] = []
        self._sampling = False
        self._spoilt = False

    def begin(self, step: int) -> None:
        super().begin(step)
        if self.in_step or self.in_window or not self.num_opened or step % self._every:
            return
        if self._slot.acquire() is None:
            return
        self._gate.begin_step(sequential=False)
        self._sampling, self._spoilt, self.in_step = True, False, True

    def end(self) -> None:
        if not self._sampling:
            super().end()
            return
        self._sampling = self.in_step = False
        log = self._gate.end_step()
        check_gate_health(self._gate)
        if self._spoilt or not log.is_whole:
            return
        self._kept.append(SampledStep(self._step, tuple([c for c in log.collectives if c.splits is not None])))
        if len(self._kept) > _MAX_KEPT:
            del self._kept[::2]

    def skip(self, reason: str) -> None:
        self._spoilt = True
        super().skip(reason)

    def pause(self) -> None:
        super().pause()
        if self._sampling:
            self._spoilt = True
            self._gate.suspend()

    def resume(self) -> None:
        super().resume()
        if self._sampling:
            self._gate.resume()

    def abandon(self, reason: str, *, within_step: bool = False, job_ends: bool = False) -> None:
        self._sampling = False
        super().abandon(reason, within_step=within_step, job_ends=job_ends)

    def discard(self) -> None:
        self._sampling = False
        super().discard()

    def _close(self, complete: bool, report: bool = True, job_ends: bool = False) -> None:
        if self._window is not None and report:
            self._window.marks.sampled = tuple(self._kept)
            self._kept.clear()
        super()._close(complete, report, job_ends)

    def _await_next_window(self) -> None:
        super()._await_next_window()
        if self.num_opened:
            self.next_step = min(self.next_step, (self._step // self._every + 1) * self._every)
