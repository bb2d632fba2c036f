"""The machinery behind ``OverlapMonitor``: step numbering, which runner gets each step, and how measuring ends."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np
import torch

from overlap_callbacks import _validation
from overlap_callbacks.analysis.results.env_overrides import TimingPlan
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.request import Status
from overlap_callbacks.analysis.step_vectors import FIRST_STEP, PARTS
from overlap_callbacks.gate.dispatcher import dispatcher
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.interruptions import is_from_handler, is_own
from overlap_callbacks.monitor.background.desk import View
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.faults import FaultGuard, Notices
from overlap_callbacks.monitor.sampling import SamplingRunner
from overlap_callbacks.monitor.session import SessionSlot
from overlap_callbacks.monitor.step_ring import Leave, StepRing
from overlap_callbacks.monitor.step_runner import PinnedRunner, Stopped
from overlap_callbacks.monitor.timing import TimingRunner
from overlap_callbacks.monitor.window_cost import STEPS_BEFORE
from overlap_callbacks.monitor.window_runner import WindowRunner

P = ParamSpec("P")

_is_compiling = torch.compiler.is_dynamo_compiling
_now_ns = time.perf_counter_ns


class StepDriver:
    """Hands each step to the active runner.

    - ``WindowRunner`` runs steps by the schedule (or ``TimingRunner``, if the environment asks for step times alone).
      ``pin(mode)`` leads to ``PinnedRunner``.
    - ``PinnedRunner`` pins a mode. ``pin(None)`` leads back, and so does a mode that is not granted.
    - ``Stopped`` measures nothing. ``stop`` and errors of our own lead there, and nothing leads back.
    """

    def __init__(self, config: MonitorConfig, gate: Gate, timing: TimingPlan | None = None) -> None:
        self.gate = gate
        self.notices = Notices(hosts=config.hosts)
        self.faults = FaultGuard(
            self.notices, gate, strict=config.strict, stop=self.stop, fail=self._fail, wake=self._wake
        )
        self.ring = StepRing(self.faults.report)
        self.slot = SessionSlot(config, gate, self.faults, self.ring)
        this = weakref.ref(self)  # other threads must not keep alive a monitor that its user has dropped
        self.slot.last_step = lambda: sys.maxsize if (driver := this()) is None else driver.last_step
        self.slot.view = lambda: None if (driver := this()) is None else driver.view()
        self.switch = self.slot.switch
        self.last_step = -1  # number of the latest step; -1 before the first
        self.unused = ""  # what is wrong if no step ever begins; empty if that may be
        self.replaced = False  # by another monitor, which says so
        self.open = False  # a step has begun and not ended
        self.on_close: list[Callable[[], None]] = []  # called once at the end: adapters remove their hooks
        self.window_runner: WindowRunner | TimingRunner
        if timing is not None:
            self.window_runner = TimingRunner(timing, self.slot)
            self.on_close.append(self.window_runner.close)
        elif config.sample_experts_every is None:
            self.window_runner = WindowRunner(self.slot, self.ring)
        else:
            self.window_runner = SamplingRunner(config.sample_experts_every, self.slot, self.ring)
        self.runner: WindowRunner | TimingRunner | PinnedRunner | Stopped = self.window_runner
        # Copies of the runner's attributes: the fast path for steps that the runner does not need.
        self.next_step = self.runner.next_step
        self.in_runner_step = self.runner.in_step
        self._unnumbered = False  # the open step was begun with something other than a number
        self._closing = False  # closed within a step; the hooks come off at its end

    @property
    def active(self) -> bool:
        """Whether measuring is still possible."""
        return not isinstance(self.runner, Stopped)

    @property
    def pinned_mode(self) -> Mode | None:
        """The mode pinned by the user; None if none is."""
        return self.runner.mode if isinstance(self.runner, PinnedRunner) else None

    def view(self) -> View | None:
        """Where the job is, from any thread; None if only step times are measured."""
        runner, step, window = self.window_runner, self.last_step, self.slot.window
        if isinstance(runner, TimingRunner):
            return None
        course, vectors = runner.course, self.ring.vectors()
        last = vectors.where(vectors.ordinary & (vectors.step_ns > 0)).where(slice(-STEPS_BEFORE, None))
        parts_ms = last.parts_ns.mean(axis=0) / 1e6 if len(last) else np.zeros(len(PARTS))
        is_known = len(vectors.steps) > 0 and int(vectors.steps[-1]) == step - 1
        begun_ns = int(vectors.begun_ns[-1] + vectors.step_ns[-1]) if is_known else None
        status = Status(
            state="off" if not self.active else "pinned" if self.pinned_mode is not None else course.state,
            step=step,
            running_s=None if begun_ns is None else (time.perf_counter_ns() - begun_ns) / 1e9,
            step_ms=float(np.median(last.step_ns)) / 1e6 if len(last) else None,
            parts_ms={name: float(mean) for name, mean in zip(PARTS, parts_ms, strict=True) if mean > 0},
            every_n_steps=course.own.every_n_steps,
            num_windows=runner.num_opened,
            window=None if window is None else window.number,
            steps_left=runner.steps_left,
            next_window=None if course.is_stopped or not self.active else course.opens_at(step + 1),
        )
        return status, course

    def guarded(self, action: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run the library's own work; see ``FaultGuard.run``. If a signal handler raises, the window is abandoned."""
        try:
            self.faults.run(action, *args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception) or is_from_handler(error):
                self._abandon_window()
            raise
        finally:
            self.in_runner_step = self.runner.in_step
            self.next_step = self.runner.next_step
            if dispatcher.interrupts or (self.faults.pending and self.active):
                self.next_step = 0  # an error came in meanwhile; its wake-up must not be lost

    def raise_interrupt(self) -> None:
        """Re-raise an exception of the user's signal handler that interrupted a collective of the step that has ended.

        The window is abandoned: an interrupted collective was not serialised.
        """
        error = dispatcher.interrupts.take()
        if error is None:
            return
        if is_own(error):
            self.guarded(_raise, error)
            return
        self._abandon_window()
        raise error

    def _abandon_window(self) -> None:
        try:
            self.runner.abandon("a signal handler raised an exception [OC312]", within_step=self.open)
        except Exception:
            self._fail()  # the exception interrupted the library's own work

    # -- steps. What follows is called through ``guarded``.

    def begin(self, step: Any, nested: bool) -> None:
        """Begin a step. ``step``: the user's number for it, of any type. ``nested``: the previous one is still open."""
        self._unnumbered = False
        if isinstance(self.runner, Stopped) and type(step) is int:
            self.last_step = step
            self.runner.begin(step)
            self._remove_hooks_if_closing()
            return
        try:
            number = _validation.count("step", step, minimum=0)
        except (TypeError, ValueError) as error:
            self._unnumbered = True
            self.faults.misuse("step", str(error))
            return
        previous, self.last_step = self.last_step, number
        if not self.active:
            return
        self.ring.begin(number)
        if self.faults.refusal is not None and self.runner.in_window:
            self.runner.abandon("the ranks agreed at attach that none measures [OC315]")
        self.faults.raise_reported()
        self._check_continuity(number, previous, nested)
        self.runner.begin(number)
        if self.runner.in_step:
            self.ring.spoil(number)
        if self.runner.finished:
            self._return_to_windows()

    def pause(self) -> None:
        """Begin something that is not part of training, within the latest step or after it."""
        self.ring.spoil(self.last_step)
        self.ring.pause()
        self.runner.pause()
        self.slot.keeping.pause(within_step=self.open)

    def resume(self, runner: WindowRunner | TimingRunner | PinnedRunner | Stopped) -> None:
        """End the pause that began with this runner."""
        self.ring.resume()
        runner.resume()
        self.slot.keeping.resume()

    def _check_continuity(self, number: int, previous: int, nested: bool) -> None:
        """Abandon an open window, with a message, if the step does not follow the previous one (-1: there was none)."""
        if nested:
            reason = (
                f"step {number} began before step {previous} ended: call step_end before the next step_begin [OC121]"
            )
            self.runner.abandon(reason)
            self.faults.misuse("nested", reason)
        if number <= previous:
            reason = (
                f"the step number went back: step_begin({number}) came after step {previous}; the schedule goes on "
                f"from {number} [OC122]"
            )
            self.runner.abandon(reason)
            self.window_runner.rewind()
            self.faults.misuse("back", reason)
        elif self.runner.in_window and number != previous + 1:
            reason = f"the step number jumped from {previous} to {number}, which ends the window [OC123]"
            self.runner.abandon(reason)
            self.notices.warn_once("jump", reason)

    def end(self, step: Any) -> None:
        """End the open step; ``step`` is the number given by the user, if any."""
        if not self.open:
            shown = "" if step is None else step
            self.faults.misuse("end", f"step_end({shown}) came without a step_begin: call step_begin first [OC124]")
            return
        if step is not None and step != self.last_step and not self._unnumbered:
            self.faults.misuse(
                "number", f"step_end({step}) came after step_begin({self.last_step}): numbers must agree [OC125]"
            )
        self.open = False
        if self.runner.in_step:
            if self.faults.has_error:  # from when it came in, the step's collectives were not serialised
                self.runner.abandon("an error of the library came in during a step [OC316]")
            else:
                self.runner.end()
            self._remove_hooks_if_closing()

    def abort(self) -> None:
        """Abandon the open step, because of an exception in it."""
        if self.open:
            self.guarded(self.runner.abandon, "an exception in the user's step [OC311]")
        self.open = self.in_runner_step = False

    def pin(self, mode: Mode | None) -> None:
        """Run all steps from the next one on in ``mode``; None goes back to the schedule."""
        if isinstance(self.runner, PinnedRunner) and mode is not None and not self.runner.finished:
            self.runner.pin(mode)
            return
        if mode is None and self.runner is self.window_runner:
            return
        is_keeping = self.slot.keeping.is_under_way
        if self.runner is not self.window_runner or self.runner.in_window or is_keeping:
            self.runner.abandon("a mode was pinned by hand [OC313]", within_step=self.open)
        if mode is None:
            self._return_to_windows()
        else:
            self.runner = PinnedRunner(mode, self.slot)

    def _return_to_windows(self) -> None:
        self.runner = self.window_runner
        self.window_runner.next_step = 0  # its step numbers are out of date

    # -- the end

    def say_if_nothing_was_measured(self) -> None:
        """Say so before the monitor is closed, and why."""
        if not self.active or self.replaced:
            return
        if self.unused and self.last_step < 0:
            self.notices.warn_on_first(f"nothing was measured: {self.unused} [OC101]")
        elif self.slot.is_of_one_rank:
            return  # which was said at the start
        elif not self.window_runner.num_opened and self.pinned_mode is None and self.last_step >= 0:
            first = self.slot.config.schedule.first_step
            self.notices.announce(
                f"nothing was measured: the first window starts at step {first}, but the steps seen end at "
                f"{self.last_step}; a window that starts before the first step seen is left out [OC102]"
            )

    def close(self) -> bool:
        """Stop, and report what the open window has measured so far.

        Returns whether a framework's own switches have been restored. If they can only be turned between steps, and the
        open step is sequential because of them, they and the adapter's hooks follow at its end.
        """
        communicated = self.gate.any_seen() or self.slot.keeping.has_communicated
        waits = self.open and self.switch.must_wait(communicated=communicated)
        self.slot.keeping.close()
        if self.runner.in_window:
            self.guarded(self.runner.abandon, "the monitor was closed [OC314]", within_step=self.open, job_ends=True)
        if self.runner is self.window_runner and isinstance(self.runner, WindowRunner):
            self.guarded(self.runner.stretches.end, job_ends=True)
        self.stop()
        self._closing = waits
        if not self._closing:
            self._remove_hooks()
        return not self._closing

    def _remove_hooks_if_closing(self) -> None:
        if self._closing:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        self._closing = False
        while self.on_close:
            self.guarded(self.on_close.pop())

    # -- also called by the fault guard

    def stop(self) -> None:
        """Switch measuring off permanently."""
        self.ring.close()
        self.runner = Stopped(self.slot, within_step=self.open)
        self.in_runner_step = self.runner.in_step
        self.next_step = self.runner.next_step

    def _fail(self) -> None:
        """Switch measuring off after an internal error: no open state can be trusted."""
        with contextlib.suppress(Exception):
            self.runner.discard()
        self.stop()
        with contextlib.suppress(Exception):
            self.gate.close()

    def _wake(self) -> None:
        """Make the next step check for errors of the library's threads. Callable from any thread."""
        self.next_step = 0


class StepHook:
    """Ends a step and begins the next one in one call, which outside windows costs little more than its mark.

    ``otherwise``: does so in all other cases, with what begins or ends a window; the first step too.
    """

    __slots__ = ("__weakref__", "_driver", "_otherwise", "leave")
    leave: Leave

    def __init__(self, driver: StepDriver, otherwise: Callable[[], None]) -> None:
        self._driver = driver
        self._otherwise = torch.compiler.disable(otherwise)  # a compiled step would trace into it, and break there
        driver.ring.lend(self)

    def __deepcopy__(self, _: Any) -> StepHook:
        return self  # as of a function

    def step_ended(self, *_: Any) -> None:
        if not _is_compiling():
            driver, leave = self._driver, self.leave
            step = driver.last_step + 1
            is_quick = step < driver.next_step and driver.open and not driver.in_runner_step
            if is_quick and not leave((FIRST_STEP + step, _now_ns())):
                driver.last_step = step
                return
        self._otherwise()


def _raise(error: BaseException) -> None:
    raise error
