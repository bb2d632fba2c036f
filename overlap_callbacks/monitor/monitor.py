"""OverlapMonitor: the one object that adapters drive.

It asks the schedule for each step's plan, sets the gate's mode, starts and stops the instruments, and hands closed
windows to the reporting thread. States, and what moves between them:

- **idle**: no window is open. ``step_begin`` compares one integer; at a window's first step it opens one.
- **window**: steps run by their plans. The last step's end closes the window and goes back to idle; so does whatever
  spoils it (a step number that jumps, an exception in the user's step, a refused order check), with the part that was
  measured still reported.
- **forced**: the user pinned a mode by hand; no window opens.
- **off**: switched off by the environment, by ``close``, or by an error of our own. For good.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from overlap_callbacks import _validation
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.statistics import MIN_BLOCKS
from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.gate.native import OverlapSwitch
from overlap_callbacks.instruments.power.meter import PowerOptions
from overlap_callbacks.monitor.background.store import Job, Ruling
from overlap_callbacks.monitor.notices import Notices
from overlap_callbacks.monitor.run_info import default_run_folder
from overlap_callbacks.monitor.schedule import Part, Plan, Schedule
from overlap_callbacks.monitor.session import Session
from overlap_callbacks.monitor.window import MeasuredStep, Window
from overlap_callbacks.sinks import JsonlSink, Sink, WandbSink

SWITCH = "OVERLAP_CALLBACKS"
_OFF_WORDS = frozenset({"0", "off", "false", "no", "disabled"})
_NEVER = sys.maxsize

T = TypeVar("T")

# Longest that reports on their way may hold up a job that is ending with an exception, or without close().
EXCEPTION_CLOSE_TIMEOUT_S = 5.0


class MisuseError(ValueError):
    """A call that does not fit the calls before it, or a value that is not allowed."""


class OverlapMonitor:
    """Measures what overlapping computation with communication costs and saves, on a few steps of a live job.

    Call ``step_begin(step)`` and ``step_end(step)`` around each optimizer step (all its micro-batches), or use
    ``with monitor.step():``; ``close()`` at the end. All ranks must do so alike. Losses and weights stay bit-identical.

    In production (the default) an error of the library's own switches it off with one warning, and training goes on;
    with ``strict`` it raises.

    The environment variable ``OVERLAP_CALLBACKS=off`` switches everything off.

    Args:
        schedule: when windows open and what they are made of.
        sinks: where reports go, used on rank 0 only. By default the JSONL record in ``run_dir``, and the W&B run that
            is active when the first window ends, if there is one.
        run_dir: folder of the record; by default a new one under ``overlap_runs``.
        strict: raise instead of switching off.
        max_overhead: largest fraction of training time that measuring may cost; dearer windows are opened less often.
            None for no limit.
        order_timeout_s: longest time in which the ranks' sequences of collectives must come in.
        report_timeout_s: longest time in which their reports must come in.
        power: measure power, energy and clocks in windows, where the device can tell.
        power_interval_s: time between readings of power, at least 0.001; None for 0.1 (NVIDIA, CPU) or 0.02 (AMD).
        power_idle_interval_s: time between readings outside windows; None for none there.
        power_per_node: the first rank of each node reads all of its devices, on one thread; else each reads its own.
        tokens_per_step: tokens that one step of the whole job trains on, for energy per token; None where not known.
        framework: the adapter in use, for the record.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or value.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        sinks: Sequence[Sink] | None = None,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        strict: bool = False,
        max_overhead: float | None = 0.005,
        order_timeout_s: float = 10.0,
        report_timeout_s: float = 30.0,
        power: bool = True,
        power_interval_s: float | None = None,
        power_idle_interval_s: float | None = None,
        power_per_node: bool = False,
        tokens_per_step: int | None = None,
        framework: str = "",
    ) -> None:
        if schedule is not None and not isinstance(schedule, Schedule):
            raise TypeError(f"schedule must be a Schedule, got {schedule!r} (a {type(schedule).__name__})")
        if max_overhead is not None:
            max_overhead = _validation.fraction("max_overhead", max_overhead)
        flags = {"strict": strict, "power": power, "power_per_node": power_per_node}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {flag!r} (a {type(flag).__name__})")
        self.schedule = schedule or Schedule()
        self.run_dir = Path(run_dir) if run_dir is not None else default_run_folder()
        self.strict = strict
        self._sinks = _checked_sinks(sinks) if sinks is not None else [JsonlSink(self.run_dir), WandbSink(start=False)]
        self._max_overhead = max_overhead
        self._order_timeout_s = _validation.seconds("order_timeout_s", order_timeout_s)
        self._report_timeout_s = _validation.seconds("report_timeout_s", report_timeout_s)
        self._framework = framework
        self._power = PowerOptions(power, power_interval_s, power_idle_interval_s, power_per_node)
        if tokens_per_step is not None:
            tokens_per_step = _validation.count("tokens_per_step", tokens_per_step, minimum=1)
        self.tokens_per_step = tokens_per_step  # an adapter that knows it may set it

        self._parts = Session()
        self._job: Job | None = None
        self._group: Callable[[], Any] = lambda: None  # the default process group that we began with
        self._window: Window | None = None
        self._forced_step: Window | None = None
        self._order: CollectiveSequence | None = None  # recorded, and being checked
        self._checked: CollectiveSequence | None = None  # passed the check: may be serialised
        self._ended_blocks: list[tuple[int, Mode]] = []  # timed, and not yet in the record
        self._forced: Mode | None = None
        self._forced_checks = 0
        self._rewinds = 0  # how often the step number went back
        self._num_windows = 0
        self._notices = Notices()
        self._background_error: Exception | None = None

        self._last_step = -1
        self._unnumbered = False  # the open step was begun with something that is no number
        self._open = False  # between step_begin and step_end
        self._busy = False  # the open step has instruments, or a mode of its own
        self._wake = 0  # first step at which step_begin has more to do than compare
        self._off = False
        self._closing = False  # closed within a step, at whose end the rest follows
        self._on_close: list[Callable[[], None]] = []
        self._step_context = _StepContext(self)
        # Runs when the monitor is collected or the interpreter exits, whichever comes first.
        self._finalizer = weakref.finalize(self, self._parts.close, EXCEPTION_CLOSE_TIMEOUT_S)
        if os.environ.get(SWITCH, "").strip().lower() in _OFF_WORDS:
            self._notices.tell(f"switched off by {SWITCH}={os.environ[SWITCH]}")
            self._switch_off()
        else:
            self._tell_of_few_blocks()

    # -- steps

    def step_begin(self, step: int) -> None:
        """Say that optimizer step ``step`` begins.

        Args:
            step: its number, counted up by one from step to step, the same on every rank.
        """
        if type(step) is int and self._last_step < step < self._wake and not self._open:
            self._last_step = step
            self._open = True
            return
        nested, self._open = self._open, True
        self._guarded(lambda: self._begin(step, nested))

    def step_end(self, step: int | None = None) -> None:
        """Say that the step that began last has ended.

        Args:
            step: its number, as a check; may be left out.
        """
        if self._open and not self._busy and (step is None or step == self._last_step):
            self._open = False
            return
        self._guarded(lambda: self._end(step))

    def step(self, step: int | None = None) -> _StepContext:
        """``with monitor.step():`` around a step; numbered on from the last one unless a number is given.

        An exception of the user's passes through unchanged, with the gate back to pass-through.
        """
        self._step_context.number = self._last_step + 1 if step is None else step
        return self._step_context

    def abort_step(self) -> None:
        """Give up the open step, and the window with it: something went wrong in the user's step."""
        self._guarded(lambda: self._abandon("an exception in the user's step") if self._open else None)
        self._open = self._busy = False

    def skip_step(self, reason: str) -> None:
        """Say that the open step trains nothing, as where a loss scaler leaves out an update: it does not count.

        Such a step issues fewer collectives than others, so a window that began with it is left out.

        Args:
            reason: why, in words.
        """
        if self._busy and self._window is not None:
            self._window.skip_step(reason)
        elif self._forced_step is not None:
            self._forced_step.skip_step(reason)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around something within a step that is no part of training (an evaluation, a checkpoint).

        Its collectives are let through unseen, and the step does not count.
        """
        window = self._window if self._busy else None
        self._guarded(lambda: window.suspend() if window is not None else self._parts.gate.suspend())
        try:
            yield
        finally:
            self._guarded(lambda: window.resume() if window is not None else self._resume_forced())

    @property
    def mode(self) -> Mode:
        """The mode in which the open step runs."""
        sequential = self._parts.gate.serialising or self._parts.native.is_sequential
        return Mode.SEQUENTIAL if self._open and sequential else Mode.OVERLAPPED

    @property
    def active(self) -> bool:
        """False once the monitor is switched off, whatever the reason."""
        return not self._off

    @property
    def in_step(self) -> bool:
        """Whether a step is open: begun, and not ended."""
        return self._open

    @property
    def in_window(self) -> bool:
        """Whether a window is open."""
        return self._window is not None

    # -- a mode pinned by hand

    def force(self, mode: Mode | None) -> None:
        """Pin the mode of all steps from the next one on; no window opens meanwhile. None goes back to the schedule.

        All ranks must pin alike, between the same steps. The first step after pinning sequential mode is overlapped: it
        is recorded for the order check, which must pass first. (With ``attach`` the step under way has begun before,
        and is overlapped too.) ``mode`` tells in which mode the open step runs.

        Raises:
            TypeError: not a ``Mode`` or None.
        """
        if mode is not None and not isinstance(mode, Mode):
            raise TypeError(f"mode must be Mode.OVERLAPPED, Mode.SEQUENTIAL or None, got {mode!r}")
        if self._off:
            return
        if self._window is not None:
            self._guarded(lambda: self._abandon("a mode was pinned by hand", within_step=self._open))
        if self._forced_step is not None:  # in a step: it goes on as it is, but is serialised no further
            self._parts.gate.stop()
            self._forced_step, self._busy = None, False
        self._forced = mode
        self._order = self._checked = None
        self._wake = 0

    @contextlib.contextmanager
    def forced(self, mode: Mode) -> Iterator[None]:
        """``with monitor.forced(Mode.SEQUENTIAL):`` around some steps."""
        before = self._forced
        self.force(mode)
        try:
            yield
        finally:
            self.force(before)

    # -- end

    def close(self, timeout_s: float | None = None) -> None:
        """Report what was measured, take the gate out of the dispatcher, close the sinks. Safe to call twice.

        Call it before ``torch.distributed.destroy_process_group()``, on all ranks. Within a step that a framework's own
        switches make sequential, and that can only be turned between steps, they and the adapter's hooks stay until
        that step has ended.

        Args:
            timeout_s: longest time for the reports on their way; by default as long as the ranks have to be heard.
        """
        if self._window is not None:
            self._guarded(lambda: self._abandon("the monitor was closed", within_step=self._open))
        if not (self._off or self._num_windows or self._forced) and self._last_step >= 0:
            self._notices.announce(
                f"nothing was measured: the first window opens at step {self.schedule.first_step}, and the steps seen "
                f"ended at {self._last_step}; a window that begins before the first step seen is left out"
            )
        closing = not self._off
        self._switch_off()
        self._closing = self._open and self._parts.native.must_wait
        if not self._closing:
            self._take_off_hooks()
        if self._finalizer.detach() is not None:
            timeout_s = self._report_timeout_s + 5.0 if timeout_s is None else timeout_s
            self._parts.close(timeout_s, restore=not self._closing)
            if closing and self._num_windows and self._has_record:
                self._notices.announce(f"the record is in {self.run_dir}: overlap show {self.run_dir}")
        self._order = self._checked = None
        self._guarded(self._raise_background_error)  # of the last reports

    @property
    def _has_record(self) -> bool:
        return any(isinstance(sink, JsonlSink) and sink.path.exists() for sink in self._sinks)

    def _tell_of_few_blocks(self) -> None:
        if self.schedule.timed_blocks // 2 < MIN_BLOCKS:
            self._notices.tell("fewer than 4 blocks of each mode: there will be no confidence intervals")
        elif 0 < self.schedule.profiled_steps < MIN_BLOCKS:
            self._notices.tell("profiled_steps below 4: figures of kernels will have no confidence intervals")

    def _take_off_hooks(self) -> None:
        self._closing = False
        while self._on_close:
            self._guarded(self._on_close.pop())

    def name_groups(self, dimensions: Mapping[str, str]) -> None:
        """Say which dimension of parallelism process groups serve, by ``group.group_name``; for the report.

        DeviceMesh and Megatron-core describe their groups, so only others need it.
        """
        self._parts.gate.dimensions.update(dimensions)

    def use_native(self, form: OverlapSwitch) -> None:
        """Run sequential steps by a framework's own switches instead of the gate; for adapters, before the first step.

        The order check is made all the same, and the collectives are recorded, but not serialised.
        """
        if not isinstance(form, OverlapSwitch):
            raise TypeError(f"form must be a OverlapSwitch, got {form!r} (a {type(form).__name__})")
        self._parts.native.form = form

    def post(self, issue: Callable[[], T], works_of: Callable[[T], Sequence[Any]]) -> tuple[T, list[Any]]:
        """Issue a batch of sends and receives, and wait for them in sequential steps; see ``Gate.post``."""
        return self._parts.gate.post(issue, works_of)

    def call_on_close(self, action: Callable[[], None]) -> None:
        """Have ``close()`` call ``action``, once: an adapter takes off its hooks."""
        self._on_close.append(action)

    def __enter__(self) -> OverlapMonitor:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self.abort_step()
        self.close(None if exception[0] is None else EXCEPTION_CLOSE_TIMEOUT_S)

    # -- begin and end of a step, the long way

    def _begin(self, step: Any, nested: bool) -> None:
        self._unnumbered = False
        if self._off and type(step) is int:
            self._last_step = step
            self._busy = False
            self._stop_in_time()
            return
        try:
            number = _validation.count("step", step, minimum=0)
        except (TypeError, ValueError) as error:
            self._unnumbered = True
            self._misused("step", str(error))
            return
        previous, self._last_step = self._last_step, number
        if self._off:
            return
        self._raise_background_error()
        self._check_continuity(number, previous, nested)
        if self._window is None:
            self._parts.native.set(sequential=self._forced is Mode.SEQUENTIAL and self._checked is not None)
        if self._forced is not None:
            self._begin_forced()
            return
        plan = self._schedule_in_force.plan(number)
        if plan is not None and plan.offset == 0:
            self._window = self._open_window(plan, number)
        if plan is None or self._window is None:
            self._sleep_until(self.schedule.next_window_step(number + 1))
            return
        self._wake = 0
        if self._waits_for_verdict(plan):
            if not self._may_serialise():
                return
            before, plan = plan, self._window.schedule.plan(number)  # whose blocks may have become longer
            assert plan is not None
            if self._decides_length(before) and plan.block != 0 and plan.part is Part.TIMED:
                self._ended_blocks.append((0, Mode.OVERLAPPED))  # it ended before this was known
        self._busy = True
        self._window.begin_step(plan, self._checked)

    def _check_continuity(self, number: int, previous: int, nested: bool) -> None:
        if nested:
            reason = f"step {number} began before step {previous} ended"
            self._abandon(reason)
            self._misused("nested", f"{reason}: call step_end before the next step_begin")
        if number <= previous:
            self._abandon("the step number went back")
            self._rewinds += 1
            self._misused(
                "back",
                f"step_begin({number}) came after step {previous}: step numbers must go up; "
                f"the schedule goes on from {number}",
            )
        elif self._window is not None and number != previous + 1:
            reason = f"the step number jumped from {previous} to {number} within a window"
            self._abandon(reason)
            self._notices.warn("jump", f"{reason}, which was cut short")

    def _end(self, step: Any) -> None:
        if not self._open:
            shown = "" if step is None else step
            self._misused("end", f"step_end({shown}) came without a step_begin: call step_begin first")
            return
        if step is not None and step != self._last_step and not self._unnumbered:
            self._misused("number", f"step_end({step}) came after step_begin({self._last_step}): numbers must agree")
        self._open = False
        if not self._busy:
            return
        self._busy = False
        if self._off:
            self._stop_in_time()
            return
        if self._window is None:
            self._end_forced()
            return
        measured = self._window.end_step()
        if self._gate_is_through():
            return
        self._note_step(self._window, measured)
        if measured.plan.last:
            self._parts.native.set(sequential=False)
            self._close_window(complete=True)

    def _note_step(self, window: Window, measured: MeasuredStep) -> None:
        plan = measured.plan
        if plan.part is Part.RECORDED:
            self._order = None
            if measured.skipped:
                self._notices.tell(f"window left out: its first step was skipped, {measured.skipped}")
                self._close_window(complete=False, report=False)
                return
            if measured.log.compiled:
                # Collectives may be missing in what was recorded: neither a check nor a figure can rest on it.
                self._notices.tell("window left out: torch.compile compiled in its first step")
                self._close_window(complete=False, report=False)
                return
            if self._needs_verdict:
                self._start_check(self._key(window), window.number, measured, self._steps_per_block(window))
        elif plan.part is Part.TIMED and self._ends_block(plan):
            self._ended_blocks.append((plan.block, plan.arm))
        # A window that is yet to pass the order check may be left out, and then nothing of it is kept.
        if self._checked is not None or self.schedule.control:
            while self._ended_blocks:
                self._parts.reporter.block(window, *self._ended_blocks.pop(0))

    def _ends_block(self, plan: Plan) -> bool:
        following = self._schedule_in_force.plan(self._last_step + 1)
        if self._decides_length(following):
            return False  # the block may go on
        return following is None or following.block != plan.block or following.part is not plan.part

    # -- windows

    @property
    def _schedule_in_force(self) -> Schedule:
        return self.schedule if self._window is None else self._window.schedule

    def _open_window(self, plan: Plan, number: int) -> Window | None:
        if not self._prepare():
            return None
        self._order = self._checked = None
        self._num_windows += 1
        self._ended_blocks.clear()
        return Window(plan.window, number, self._parts.gate, self._parts.native, self.schedule, self._parts.meter)

    def _prepare(self) -> bool:
        """Whether there is a job to measure; the first time, take up what measuring needs."""
        if self._job is None:
            job = Job.current()
            if job is None:
                self._notices.warn(
                    "job", "torch.distributed has no process group: there is no communication to measure yet"
                )
                return False
            if job.world_size == 1:
                self._notices.warn(
                    "alone", "the job has one rank: there is nothing to overlap, and nothing is measured"
                )
                self._switch_off()
                return False
            if self._parts.gate.taken:
                why = "another OverlapMonitor of this process is measuring, and only one can: close() it first"
                if self.strict:
                    raise RuntimeError(why)
                self._notices.warn("second", f"{why}; this one is switched off, training goes on")
                self._switch_off()
                return False
            self._job, self._group = job, weakref.ref(dist.group.WORLD)
            self._parts.open(
                job,
                schedule=self.schedule,
                sinks=self._sinks,
                framework=self._framework,
                max_overhead=self._max_overhead,
                order_timeout_s=self._order_timeout_s,
                report_timeout_s=self._report_timeout_s,
                power=self._power,
                on_no_power=self._on_no_power,
                on_error=self._on_background_error,
                on_sink_error=self.sink_failed,
            )
        elif self._group() is not dist.group.WORLD:
            self._notices.warn(
                "group", "the process group was replaced, and measuring is switched off: make a new monitor"
            )
            self._switch_off()
            return False
        self._parts.gate.register()
        return True

    def _close_window(self, complete: bool, report: bool = True) -> None:
        window, self._window = self._window, None
        self._busy = False
        self._order = self._checked = None
        self._sleep_until(self.schedule.next_window_step(self._last_step + 1))
        if window is None:
            return
        window.close(complete)
        if window.no_profile:
            self._notices.warn("profiler", f"{window.no_profile}; the rest is measured")
        if report:
            self._parts.reporter.tokens_per_step = self.tokens_per_step
            self._parts.reporter.window(window, self._key(window))

    def _abandon(self, reason: str, within_step: bool = False) -> None:
        """End the window early; what was measured so far is reported as incomplete.

        Args:
            reason: why, in words.
            within_step: the step goes on; switches of a framework's own wait for its end.
        """
        self._parts.gate.stop()
        if not within_step:
            self._parts.stop()
        self._busy = False
        if self._window is not None:
            self._notices.tell(f"window {self._window.number} was cut short: {reason}")
            self._window.note(f"cut short: {reason}")
            self._close_window(complete=False)

    def _key(self, window: Window) -> str:
        """Names a window in the store: once, even where step numbers go back and windows come again."""
        return f"{self._rewinds}/window{window.number}/{window.first_step}"

    # -- the order check

    @property
    def _needs_verdict(self) -> bool:
        """Whether windows wait for rank 0's word: on the order of collectives, or on their length."""
        return not self.schedule.control or self.schedule.min_block_seconds > 0

    def _waits_for_verdict(self, plan: Plan) -> bool:
        """Whether the step cannot begin without rank 0's word; the same on every rank."""
        return plan.mode is Mode.SEQUENTIAL or self._decides_length(plan)

    def _decides_length(self, plan: Plan | None) -> bool:
        """Whether the length of the window's blocks must be known before the step, and was not before."""
        return plan is not None and self.schedule.min_block_seconds > 0 and plan.offset == self.schedule.decided_by

    def _steps_per_block(self, window: Window) -> int:
        """Rank 0: the counted steps that blocks of ``min_block_seconds`` have.

        By the step time of the window before; for the first window, by that of its recorded step, on the host.
        """
        step_s, block_s = self._parts.reporter.step_s or window.age_s, self.schedule.min_block_seconds
        steps, wanted = self.schedule.steps_that_take(block_s, step_s), self.schedule.steps_wanted(block_s, step_s)
        if steps < wanted:
            window.note(
                f"blocks of min_block_seconds={block_s:g} would need {wanted} steps; every_n_steps="
                f"{self.schedule.every_n_steps} leaves room for {steps}"
            )
        return steps

    def _start_check(self, key: str, window: int | None, measured: MeasuredStep, steps_per_block: int = 0) -> None:
        assert self._job is not None
        log = measured.log
        self._order = CollectiveSequence.of(log.collectives, self._job.rank, incomplete=log.dropped > 0)
        self._parts.order.start(key, self._order, window, steps_per_block)

    def _may_serialise(self) -> bool:
        """Whether the check of the recorded sequence has passed; ends the window where it has not."""
        if self._checked is not None:
            return True
        if self._order is None:
            self._abandon("no sequence of collectives was recorded")
            return False
        verdict = self._parts.order.verdict()
        if verdict.serialise:
            self._checked = self._order
            if self._window is not None and verdict.steps_per_block:
                self._window.schedule = self.schedule.stretched(verdict.steps_per_block)
            return True
        if verdict.conflict:
            self._abandon(verdict.reason)
            self._refuse(verdict)
        elif verdict.skip:
            self._notices.tell(f"window left out: {verdict.reason}")
            self._close_window(complete=False, report=False)
        else:
            if verdict.late:
                self._notices.warn("late", f"a window has no sequential steps: {verdict.reason}")
            self._abandon(verdict.reason)
        return False

    def _gate_is_through(self) -> bool:
        """Whether the gate cannot go on: raises its error, or switches off where a serialised collective got stuck."""
        gate = self._parts.gate
        if gate.last_error is not None:
            raise gate.last_error
        if gate.stuck is None:
            return False
        reason = (
            f"{gate.stuck} did not finish within {gate.patience_s:g} s when it was serialised: the ranks' order of "
            f"collectives differs from step to step, or a rank was held up"
        )
        self._abandon(reason)
        self._notices.warn("stuck", f"{reason}; measuring is switched off, training goes on")
        self._switch_off()
        return True

    def _refuse(self, verdict: Ruling) -> None:
        """Every later step would show the same conflict: there is nothing more to measure."""
        self._notices.warn("conflict", f"sequential mode is refused, and measuring is switched off: {verdict.reason}")
        self._switch_off()

    # -- forced modes

    def _begin_forced(self) -> None:
        if self._forced is not Mode.SEQUENTIAL:
            self._sleep_until(_NEVER)
            return
        if not self._prepare():
            return
        if self._checked is None and self._order is not None:
            verdict = self._parts.order.verdict()
            if verdict.serialise:
                self._checked = self._order
            elif verdict.conflict:
                self._refuse(verdict)
                return
            else:
                self._notices.warn("forced", f"the mode stays overlapped: {verdict.reason}")
                self._forced, self._wake = None, 0
                return
        window = Window(-1, self._last_step, self._parts.gate, self._parts.native, self.schedule)
        part = Part.RECORDED if self._checked is None else Part.TIMED
        mode = Mode.OVERLAPPED if self._checked is None else Mode.SEQUENTIAL
        window.begin_step(Plan(-1, 0, part, -1, mode, mode, False, False), self._checked)
        self._forced_step = window
        self._busy = True

    def _end_forced(self) -> None:
        assert self._forced_step is not None
        measured = self._forced_step.end_step()
        self._forced_step = None
        if self._gate_is_through():
            return
        if self._checked is None:
            if measured.skipped or measured.log.compiled:
                return  # the next step is recorded in its place
            self._forced_checks += 1
            self._start_check(f"forced{self._forced_checks}", None, measured)
        elif measured.log.divergence is not None and not (measured.skipped or measured.log.compiled):
            self._notices.tell(f"a step was not sequential throughout: {measured.log.divergence}")
            self._order = self._checked = None  # record and check again

    def _resume_forced(self) -> None:
        if self._busy:
            self._parts.gate.resume()

    # -- trouble

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run a piece of our own work; what it raises must not reach the job, unless the monitor is strict."""
        try:
            action()
        except MisuseError:
            raise  # only raised when strict
        except Exception as error:
            self._fail(error)
            if self.strict:
                raise

    def _fail(self, error: Exception) -> None:
        if not self.strict:
            self._notices.warn(
                "failed", f"an internal error switched measuring off, training goes on: {error!r}", error
            )
        window, self._window = self._window, None
        with contextlib.suppress(Exception):
            if window is not None:
                window.close(complete=False)
        self._switch_off()
        self._parts.gate.close()

    def _switch_off(self) -> None:
        self._off = True
        self._forced = None
        self._wake = _NEVER
        self._parts.gate.stop()
        # Switches of a framework's own are put back between steps only.
        self._busy = self._open and self._parts.native.is_sequential
        if not self._busy:
            self._parts.stop()

    def _stop_in_time(self) -> None:
        """Between steps, after switching off: what could not be put back within a step is put back now."""
        self._parts.stop()
        if self._closing:
            self._take_off_hooks()

    def _misused(self, key: str, message: str) -> None:
        if self.strict:
            raise MisuseError(message)
        self._notices.warn(key, message)

    def _sleep_until(self, step: int) -> None:
        """Do no more than compare until ``step``, unless an error came up on a thread of our own meanwhile."""
        self._wake = step
        if self._background_error is not None:
            self._wake = 0

    def _raise_background_error(self) -> None:
        error, self._background_error = self._background_error, None
        if error is not None:
            raise error

    def _on_background_error(self, error: Exception) -> None:
        # On a thread of our own: stop serialising at once; the training thread does the rest at its next step.
        self._parts.gate.stop()
        self._background_error = error
        self._wake = 0

    def _on_no_power(self, why: str, serious: bool) -> None:
        # On a thread of the meter's own. Most CPUs keep their counters to root: that is no trouble.
        say = self._notices.warn if serious else self._notices.tell_once
        say("power", f"{why}; the rest is measured")

    def sink_failed(self, sink: Sink, error: Exception) -> None:
        """Say that a sink failed and is not used again; raised at the next step if strict."""
        name = type(sink).__name__
        self._notices.warn(f"sink {name}", f"{name} failed and is not used again, the rest goes on: {error}")
        if self.strict:
            self._on_background_error(error)


class _StepContext:
    """``with monitor.step():``; one object, used again for each step."""

    def __init__(self, monitor: OverlapMonitor) -> None:
        self._monitor = weakref.ref(monitor)
        self.number = 0

    def __enter__(self) -> OverlapMonitor:
        monitor = self._monitor()
        assert monitor is not None
        monitor.step_begin(self.number)
        return monitor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        monitor = self._monitor()
        assert monitor is not None
        if kind is None:
            monitor.step_end(self.number)
        else:
            monitor.abort_step()


def _checked_sinks(sinks: Any) -> list[Sink]:
    if isinstance(sinks, Sink):
        return [sinks]
    if not isinstance(sinks, (list, tuple)):
        raise TypeError(f"sinks must be a list of Sink objects, got {sinks!r} (a {type(sinks).__name__})")
    for sink in sinks:
        if not isinstance(sink, Sink):
            raise TypeError(f"sinks must be a list of Sink objects, got {sink!r} (a {type(sink).__name__}) in it")
    return list(sinks)
