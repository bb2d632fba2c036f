"""What a window costs training on this rank: its steps, the library's own work, and the steps after it.

The cost of a window's own steps is in ``overlap_callbacks.analysis.measuring_cost``. The steps after it are slower too:
reading the profiler's events and reporting fall on them. So the training thread notes when steps begin (by the host's
clock) until they are back to normal, and the reporting thread when it works.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.measuring_cost import LostTime, StepsAfter, Stretch, lost_time
from overlap_callbacks.instruments import clocks

# Steps before a window that show how long a step usually takes, and the fewest that can.
STEPS_BEFORE = 64
_FEWEST_BEFORE = 4
# What takes more medians than this is no step: an evaluation or a checkpoint lies between two steps.
_NO_STEP = 20.0
# Steps in a row, after the work of the reporting thread, that must be as long as those before the window.
NORMAL_STEPS = 3
# How much longer or shorter than any step before the window a step may be that is back to normal.
_SLACK = 1.25
# A step of a window, without our own work, takes no longer than this many times the longest one before it and the third
# longest of the window. What does holds an evaluation, or another rank's.
_MOST_IN_WINDOW = 2.0
# After this many steps that are not normal the job has changed its pace, which is not the window's cost.
_MAX_SETTLING_STEPS = 16
# Steps after a window that are looked at in all.
MAX_STEPS_AFTER = 512


# Steps of the ring. A power of two: a step's place in the ring is its number's last bits.
SIZE = 4096
MASK = SIZE - 1


class StepRing:
    """The host's clock at the begin of each of the last 4,096 steps. The training thread writes; others may read.

    It shows what windows cannot: every fiftieth step takes longer, say.
    """

    def __init__(self) -> None:
        self.steps = [-1] * SIZE
        self.begun_ns = [0] * SIZE

    def begin(self, step: int) -> None:
        """Step number ``step`` begins."""
        place = step & MASK
        self.steps[place] = step
        self.begun_ns[place] = clocks.now()

    def spoil(self, step: int) -> None:
        """The step is not like others: it has instruments, a mode of its own, or a pause in it."""
        place = step & MASK
        if self.steps[place] == step:
            self.steps[place] = -1

    def durations(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The ordinary steps that ended, in order: their numbers, and the time from begin to begin, in ms."""
        steps, begun_ns = np.array(self.steps, dtype=np.int64), np.array(self.begun_ns, dtype=np.int64)
        order = np.argsort(steps, kind="stable")
        steps, begun_ns = steps[order], begun_ns[order]
        known = steps >= 0
        steps, begun_ns = steps[known], begun_ns[known]
        step_ms = np.diff(begun_ns) / 1e6
        # The ring may turn while it is read, and a job may start again at an earlier step.
        ended = (np.diff(steps) == 1) & (step_ms > 0)
        return steps[:-1][ended], step_ms[ended]


@dataclass(frozen=True)
class UsualStep:
    """How long steps take from begin to begin, over the steps before a window, by the host's clock."""

    mean_ns: float
    shortest_ns: int
    longest_ns: int

    @classmethod
    def of(cls, begins_ns: Sequence[int], *, of_new_job: bool = False) -> UsualStep | None:
        """From the times at which steps in a row began; None from too few. Of a new job only the later half counts."""
        steps = np.diff(np.array(begins_ns, dtype=np.int64))
        if of_new_job and len(steps) < STEPS_BEFORE:
            steps = steps[len(steps) // 2 :]
        if len(steps) < _FEWEST_BEFORE:
            return None
        steps = steps[steps <= _NO_STEP * np.median(steps)]
        return cls(float(steps.mean()), int(steps.min()), int(steps.max()))

    def is_like(self, step_ns: int) -> bool:
        """Whether a step is about as long as one of those."""
        return self.shortest_ns / _SLACK <= step_ns <= self.longest_ns * _SLACK


class WindowCost:
    """The time that training loses to one window on this rank; see the module.

    Its first step began at ``opened_ns``, of the host's clock. If it is not known how long a step takes outside windows
    (``usual``), only the window's own steps count. ``before_ns`` is the cost of the windows before it that were left
    out, unless an earlier report has it.
    """

    def __init__(self, opened_ns: int, usual: UsualStep | None, before_ns: int = 0) -> None:
        self.opened_ns = opened_ns
        self.usual = usual
        self.over = usual is None  # the steps after the window need not be looked at any more
        self.left_out_ns = 0  # cost of the windows after it that were left out
        self._steps_ns: list[int] = []  # of the window: how long each took, without our work on the training thread
        self._begun_ns = opened_ns  # the window's step under way
        self._entered_ns: int | None = None
        self._own_ns = 0  # our work on the training thread in that step
        self._all_own_ns = 0  # in all steps of the window
        self._before_ns = before_ns
        self._is_known = False  # the window has closed, and the job goes on
        self._after_ns = 0  # of the steps after the window
        self._window_ns = 0.0  # lost until the window closed
        self._lost_ns = 0.0  # lost until the step that began last
        self._reported_ns = 0.0
        self._last_ns: int | None = None
        self._in_first_step = False  # the step in which the window closed is under way
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
        """The training thread works for us from here on, to ``leave`` or to the end of the window."""
        if self._entered_ns is None:
            self._entered_ns = now_ns

    def leave(self, now_ns: int) -> None:
        """The training thread trains again."""
        if self._entered_ns is not None:
            self._own_ns += now_ns - self._entered_ns
            self._entered_ns = None

    def window_closed(self, now_ns: int, num_steps: int, *, job_ends: bool = False) -> None:
        """The window has ended, and is reported. If the job ends, the last step may have been broken off: no cost."""
        if job_ends:
            self.usual = None
            self.end()
            return
        self.leave(now_ns)
        self.window_step_began(now_ns)
        self._is_known = True
        if self.usual is None:
            return
        took_ns = now_ns - self.opened_ns - self._not_ours_ns()
        self._window_ns = self._lost_ns = took_ns - num_steps * self.usual.mean_ns
        self._last_ns = self._working_since_ns = now_ns
        self._in_first_step = True

    def closed_unreported(self, now_ns: int) -> int:
        """The window has ended without a report: what it cost, in ns; our work, and what its steps took longer."""
        self.leave(now_ns)
        self.end()
        lost_ns = float(self._before_ns + self._all_own_ns + self._own_ns)
        if self.usual is not None:
            longer_ns = sum(self._steps_ns) - self._not_ours_ns() - len(self._steps_ns) * self.usual.mean_ns
            lost_ns += max(0.0, longer_ns)
        return round(lost_ns)

    def step_began(self, now_ns: int) -> None:
        """A step after the window begins."""
        if self.over or self.usual is None or self._last_ns is None:
            return
        begun_ns, self._last_ns = self._last_ns, now_ns
        step_ns, worked_ns = now_ns - begun_ns, self._worked_ns(begun_ns, now_ns)
        usual = self.usual
        # What takes far longer than we worked in it is not ours: an evaluation, a checkpoint.
        if self._in_first_step:  # the rest of the window's last step, whose usual time is taken off already
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
        """Nothing after this counts: steps are back to normal, or another window opens."""
        self.over = True
        self._settled.set()

    # -- on the reporting thread

    def work_began(self) -> None:
        """The reporting thread takes up work on the window again."""
        self._settled.clear()
        self._working_since_ns = clocks.now()

    def work_done(self, *, finished: bool = False) -> None:
        """The reporting thread pauses; ``finished``: nothing more will be done for this window."""
        self._worked_until_ns, self._working_since_ns = clocks.now(), None
        self._finished = finished

    def await_settled(self, wait_s: float) -> bool:
        """Wait until steps are back to normal, or are not looked at any more; False if that takes longer."""
        return self.over or self._settled.wait(wait_s)

    @property
    def stands_still(self) -> bool:
        """Whether no step has begun for a long time: the job does something else than train."""
        if self.usual is None or self._last_ns is None:
            return True
        return clocks.now() - self._last_ns > max(1e9, 5 * self.usual.longest_ns)

    def lost(self, stretches: Sequence[Stretch], report_cpu_ms: float) -> LostTime | None:
        """The time that training has lost so far; None if not known. What it loses later is ``cost_after_report_ms``.

        Of a window that was cut short it comes from the steps before it, without an interval. If steps were not seen to
        be back to normal, at least the CPU time of the reporting thread is lost after the window.
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
        """The time that training has lost since ``lost``, to this window and to later ones that were left out."""
        late_ns = max(0.0, self._lost_ns - self._reported_ns) if self.usual is not None else 0.0
        return (late_ns + self.left_out_ns) / 1e6

    def _not_ours_ns(self) -> float:
        """What else than training lay in the window, between its steps or in them."""
        # What steps take longer because of us, several do.
        third_ns = sorted(self._steps_ns)[-3] if len(self._steps_ns) >= 3 else 0
        most_ns = _MOST_IN_WINDOW * max(0 if self.usual is None else self.usual.longest_ns, third_ns)
        return sum(step_ns - most_ns for step_ns in self._steps_ns if step_ns > most_ns)

    def _worked_ns(self, begin_ns: int, end_ns: int) -> int:
        """How long the reporting thread worked, at most, between two times."""
        until_ns = end_ns if self._working_since_ns is not None else min(end_ns, self._worked_until_ns)
        return max(0, until_ns - begin_ns)


class StepPace:
    """When steps begin around windows: some before each, and those after it until they are back to normal."""

    def __init__(self) -> None:
        self._begins_ns: list[int] = []
        self._last_step = -1
        self._usual: UsualStep | None = None
        self._cost: WindowCost | None = None  # of a window that has closed, and is not over
        self._reported: WindowCost | None = None  # of the last window with a report
        self._left_out_ns = 0  # lost to windows without one before it

    def step_began(self, step: int, now_ns: int) -> None:
        """A step outside windows, or the first of one, begins."""
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
        """A window opens with the step that began last."""
        self._end_cost()
        self._usual = UsualStep.of(self._begins_ns, of_new_job=self._usual is None) or self._usual
        self._begins_ns.clear()
        before_ns, self._left_out_ns = self._left_out_ns, 0
        return WindowCost(now_ns, self._usual, before_ns)

    def window_closed(
        self, cost: WindowCost, now_ns: int, step: int, num_steps: int, *, is_reported: bool, job_ends: bool = False
    ) -> None:
        """The window has ended, in or after a step. If it has no report, the next report has its cost."""
        self._last_step = step
        if is_reported:
            cost.window_closed(now_ns, num_steps, job_ends=job_ends)
            self._reported = cost
        elif self._reported is not None:
            self._reported.left_out_ns += cost.closed_unreported(now_ns)
        else:
            self._left_out_ns = cost.closed_unreported(now_ns)
        self._cost = None if cost.over else cost

    def next_step(self, step: int, next_window: int) -> int:
        """The next step that it must see, at most ``next_window``."""
        return step + 1 if self._cost is not None else max(step + 1, next_window - STEPS_BEFORE)

    def _end_cost(self) -> None:
        if self._cost is not None:
            self._cost.end()
            self._cost = None
