"""What a window costs training on this rank: its steps, the library's own work, and the steps after it.

``overlap_callbacks.analysis.measuring_cost`` computes the cost of a window's own steps. The steps after it are slower
too: reading the profiler's events and reporting run during them. So the training thread notes when steps begin (in host
time) until they are back to normal, and the reporting thread notes when it works.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlap_callbacks.analysis.measuring_cost import LostTime, StepsAfter, Stretch, lost_time
from overlap_callbacks.instruments import clocks

# Steps before a window that give the usual step time, and their minimum number.
STEPS_BEFORE = 64
_FEWEST_BEFORE = 4
# A step longer than this many medians contains something else: an evaluation or a checkpoint.
_MAX_MEDIANS = 20.0
# Consecutive steps after the reporting thread's work that must be as long as those before the window.
NORMAL_STEPS = 3
# Tolerance for a step that is back to normal, relative to the shortest and longest before the window.
_SLACK = 1.25
# Without the library's own work, a step of a window takes at most this many times the longer of the longest step before
# it and the window's third longest. A longer one contains an evaluation, here or on another rank.
_MOST_IN_WINDOW = 2.0
# After this many steps that are not normal, the job has changed its pace, which is not the window's cost.
_MAX_SETTLING_STEPS = 16
# Maximum number of steps observed after a window.
MAX_STEPS_AFTER = 512


@dataclass(frozen=True)
class UsualStep:
    """Duration of the steps before a window, from start to start, in host time."""

    mean_ns: float
    shortest_ns: int
    longest_ns: int

    @classmethod
    def of(cls, begins_ns: Sequence[int], *, of_new_job: bool = False) -> UsualStep | None:
        """From the start times of consecutive steps; None if too few. In a new job only the later half counts."""
        steps = np.diff(np.array(begins_ns, dtype=np.int64))
        if of_new_job and len(steps) < STEPS_BEFORE:
            steps = steps[len(steps) // 2 :]
        if len(steps) < _FEWEST_BEFORE:
            return None
        steps = steps[steps <= _MAX_MEDIANS * np.median(steps)]
        return cls(float(steps.mean()), int(steps.min()), int(steps.max()))

    def is_like(self, step_ns: int) -> bool:
        """Whether a step takes about as long as usual."""
        return self.shortest_ns / _SLACK <= step_ns <= self.longest_ns * _SLACK


class WindowCost:
    """The time that training loses to one window on this rank; see the module.

    The window's first step began at ``opened_ns``, in host time. If the step time outside windows (``usual``) is
    unknown, only the window's own steps count. ``before_ns``: cost of the skipped windows before it that no earlier
    report includes.
    """

    def __init__(self, opened_ns: int, usual: UsualStep | None, before_ns: int = 0) -> None:
        self.opened_ns = opened_ns
        self.usual = usual
        self.over = usual is None  # the steps after the window need no more observation
        self.left_out_ns = 0  # cost of the skipped windows after it
        # duration of each of the window's steps, without the library's work on the training thread
        self._steps_ns: list[int] = []
        self._begun_ns = opened_ns  # start of the window's current step
        self._entered_ns: int | None = None
        self._own_ns = 0  # the library's work on the training thread in that step
        self._all_own_ns = 0  # in all steps of the window
        self._before_ns = before_ns
        self._is_known = False  # the window has closed, and the job goes on
        self._after_ns = 0  # duration of the steps after the window
        self._window_ns = 0.0  # lost until the window closed
        self._lost_ns = 0.0  # lost until the latest step began
        self._reported_ns = 0.0
        self._last_ns: int | None = None
        self._in_first_step = False  # the step in which the window closed is still running
        self._working_since_ns: int | None = None
        self._worked_until_ns = 0
        self._finished = self._is_normal = False
        self._num_after = self._num_settling = self._num_normal = 0
        self._settled = threading.Event()

    # -- on the training thread

    def window_step_began(self, now_ns: int) -> None:
        """A further step of the window begins."""
        self._steps_ns.append(now_ns - self._begun_ns - self._own_ns)
        self._all_own_ns += self._own_ns
        self._begun_ns, self._own_ns = now_ns, 0

    def enter(self, now_ns: int) -> None:
        """The training thread works for the library from now on, until ``leave`` or the end of the window."""
        if self._entered_ns is None:
            self._entered_ns = now_ns

    def leave(self, now_ns: int) -> None:
        """The training thread returns to training."""
        if self._entered_ns is not None:
            self._own_ns += now_ns - self._entered_ns
            self._entered_ns = None

    def window_closed(self, now_ns: int, num_steps: int, *, job_ends: bool = False) -> None:
        """The window has ended and is reported. If the job ends, its last step may be incomplete: no cost is known."""
        if job_ends:
            self.usual = None
            self.end()
            return
        self.leave(now_ns)
        self.window_step_began(now_ns)
        self._is_known = True
        if self.usual is None:
            return
        took_ns = now_ns - self.opened_ns - self._foreign_ns()
        self._window_ns = self._lost_ns = took_ns - num_steps * self.usual.mean_ns
        self._last_ns = self._working_since_ns = now_ns
        self._in_first_step = True

    def closed_unreported(self, now_ns: int) -> int:
        """The window has ended without a report. Returns its cost in ns: the library's work and its steps' delay."""
        self.leave(now_ns)
        self.end()
        lost_ns = float(self._before_ns + self._all_own_ns + self._own_ns)
        if self.usual is not None:
            longer_ns = sum(self._steps_ns) - self._foreign_ns() - len(self._steps_ns) * self.usual.mean_ns
            lost_ns += max(0.0, longer_ns)
        return round(lost_ns)

    def step_began(self, now_ns: int) -> None:
        """A step after the window begins."""
        if self.over or self.usual is None or self._last_ns is None:
            return
        begun_ns, self._last_ns = self._last_ns, now_ns
        step_ns, worked_ns = now_ns - begun_ns, self._worked_ns(begun_ns, now_ns)
        usual = self.usual
        # If a step takes far longer than the library worked in it, the rest is an evaluation or a checkpoint.
        if self._in_first_step:  # the rest of the window's last step, whose usual time is already subtracted
            self._in_first_step = False
            self._lost_ns += min(step_ns, usual.longest_ns + worked_ns)
            self._after_ns += min(step_ns, worked_ns)
            return
        counts_ns = min(step_ns, 2 * usual.longest_ns + worked_ns)
        self._lost_ns += counts_ns - usual.mean_ns
        self._after_ns += counts_ns
        self._num_after += 1
        if worked_ns or self._working_since_ns is not None:
            self._num_normal = self._num_settling = 0
        else:
            self._num_settling += 1
            self._num_normal = self._num_normal + 1 if usual.is_like(step_ns) else 0
        self._is_normal = self._num_normal >= NORMAL_STEPS or self._num_settling >= _MAX_SETTLING_STEPS
        if self._is_normal:
            self._settled.set()
        if (self._is_normal and self._finished) or self._num_after >= MAX_STEPS_AFTER:
            self.end()

    def end(self) -> None:
        """Stop observing: steps are back to normal, or another window opens."""
        self.over = True
        self._settled.set()

    # -- on the reporting thread

    def work_began(self) -> None:
        """The reporting thread resumes work on the window."""
        self._settled.clear()
        self._working_since_ns = clocks.now()

    def work_done(self, *, finished: bool = False) -> None:
        """The reporting thread pauses. ``finished``: its work on this window is complete."""
        self._worked_until_ns, self._working_since_ns = clocks.now(), None
        self._finished = finished

    def await_settled(self, wait_s: float) -> bool:
        """Wait until steps are back to normal or no longer observed; False if that takes longer than ``wait_s``."""
        return self.over or self._settled.wait(wait_s)

    @property
    def is_stalled(self) -> bool:
        """Whether no step has begun for a long time: the job is not training."""
        if self.usual is None or self._last_ns is None:
            return True
        return clocks.now() - self._last_ns > max(1e9, 5 * self.usual.longest_ns)

    def lost(self, stretches: Sequence[Stretch], report_cpu_ms: float) -> LostTime | None:
        """The time that training has lost so far; None if not known. ``cost_after_report_ms`` has the rest.

        For a window that was cut short it comes from the steps before it, without an interval. If steps were not seen
        to return to normal, the loss after the window is at least the reporting thread's CPU time.
        """
        if not self._is_known:
            return None
        self._reported_ns, least_after_ms = self._lost_ns, -math.inf
        if not self._is_normal:
            self._reported_ns, least_after_ms = max(self._lost_ns, self._window_ns + report_cpu_ms * 1e6), report_cpu_ms
        after = StepsAfter(self._num_after, self._after_ns / 1e6)
        found = lost_time(stretches, (self._all_own_ns + self._before_ns) / 1e6, after, least_after_ms)
        if found is not None or self.usual is None:
            return found
        return LostTime((self._reported_ns + self._before_ns) / 1e6, None, None, self.usual.mean_ns / 1e6)

    @property
    def cost_after_report_ms(self) -> float:
        """The time lost since ``lost``, to this window and to later ones that were skipped."""
        late_ns = max(0.0, self._lost_ns - self._reported_ns) if self.usual is not None else 0.0
        return (late_ns + self.left_out_ns) / 1e6

    def _foreign_ns(self) -> float:
        """Time in the window, within or between its steps, that is neither training nor caused by the library."""
        # If the library slows steps down, it slows down several.
        third_ns = sorted(self._steps_ns)[-3] if len(self._steps_ns) >= 3 else 0
        most_ns = _MOST_IN_WINDOW * max(0 if self.usual is None else self.usual.longest_ns, third_ns)
        return sum(step_ns - most_ns for step_ns in self._steps_ns if step_ns > most_ns)

    def _worked_ns(self, begin_ns: int, end_ns: int) -> int:
        """Maximum time that the reporting thread worked between two times."""
        until_ns = end_ns if self._working_since_ns is not None else min(end_ns, self._worked_until_ns)
        return max(0, until_ns - begin_ns)


class StepPace:
    """Start times of steps around windows: some before each, and those after it until steps are back to normal."""

    def __init__(self) -> None:
        self._begins_ns: list[int] = []
        self._last_step = -1
        self._usual: UsualStep | None = None
        self._cost: WindowCost | None = None  # of a closed window whose later steps are still observed
        self._reported: WindowCost | None = None  # of the last window with a report
        self._left_out_ns = 0  # lost to unreported windows before the first report

    def step_began(self, step: int, now_ns: int) -> None:
        """A step outside windows begins, or a window's first one."""
        if step != self._last_step + 1:
            self._begins_ns.clear()
            self._end_cost()
        self._last_step = step
        if self._cost is not None:
            self._cost.step_began(now_ns)
            if not self._cost.over:
                return
            self._cost = None
        self._begins_ns.append(now_ns)
        if len(self._begins_ns) > STEPS_BEFORE + 1:
            del self._begins_ns[0]

    def window_opens(self, now_ns: int) -> WindowCost:
        """A window opens with the latest step."""
        self._end_cost()
        self._usual = UsualStep.of(self._begins_ns, of_new_job=self._usual is None) or self._usual
        self._begins_ns.clear()
        before_ns, self._left_out_ns = self._left_out_ns, 0
        return WindowCost(now_ns, self._usual, before_ns)

    def window_closed(
        self, cost: WindowCost, now_ns: int, step: int, num_steps: int, *, is_reported: bool, job_ends: bool = False
    ) -> None:
        """The window has ended, in or after a step. If it has no report, the next report includes its cost."""
        self._last_step = step
        if is_reported:
            cost.window_closed(now_ns, num_steps, job_ends=job_ends)
            self._reported = cost
        elif self._reported is not None:
            self._reported.left_out_ns += cost.closed_unreported(now_ns)
        else:
            self._left_out_ns = cost.closed_unreported(now_ns)
        self._cost = None if cost.over else cost

    def arm_is(self, *, on: bool) -> None:
        """Whether an arm is kept turned on: by how much its steps differ is not what the window before it has cost."""
        if on:
            self._end_cost()

    def next_step(self, step: int, next_window: int) -> int:
        """The next step to observe, at most ``next_window``."""
        return step + 1 if self._cost is not None else max(step + 1, next_window - STEPS_BEFORE)

    def _end_cost(self) -> None:
        if self._cost is not None:
            self._cost.end()
            self._cost = None
