"""Opens, drives and closes the scheduled windows."""

from __future__ import annotations

import enum
import time
from dataclasses import replace

from overlap_callbacks.analysis.results.window import Rhythm
from overlap_callbacks.analysis.rhythms import find_rhythms, rhythm_sentence
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.gate.switch import Switch, SwitchState
from overlap_callbacks.instruments import clocks, device
from overlap_callbacks.monitor.arm_rotation import ArmRotation, BoundArm
from overlap_callbacks.monitor.background.agreement import WindowTerms
from overlap_callbacks.monitor.background.budget import Skip
from overlap_callbacks.monitor.background.order_check import Decision, Ruling, WindowPlanner
from overlap_callbacks.monitor.backoff import SilenceBackoff
from overlap_callbacks.monitor.clearance import Clearance
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.faults import FaultGuard
from overlap_callbacks.monitor.notices import Notices
from overlap_callbacks.monitor.placement import PhaseBalance
from overlap_callbacks.monitor.race.in_windows import RaceChecks
from overlap_callbacks.monitor.schedule import Part, Placement, Plan, Schedule
from overlap_callbacks.monitor.session import Session, SessionSlot
from overlap_callbacks.monitor.step_ranges import StepRanges
from overlap_callbacks.monitor.step_ring import StepRing
from overlap_callbacks.monitor.step_runner import StepRunner, check_gate_health
from overlap_callbacks.monitor.window import ClosedWindow, FinishedBlock, MeasuredStep, Window
from overlap_callbacks.monitor.window_cost import StepPace, WindowCost


class Phase(enum.Enum):
    """Where the runner stands. Whatever cuts a window short (``abandon``) leads from any phase to ``IDLE``."""

    # No window is open.
    # -> RECORDING at the first step of a window, if there is a job to measure.
    IDLE = enum.auto()

    # The window's first steps run: overlapped, their collectives are written down.
    # -> WAITING_FOR_RULING at their end: what was recorded went to the order check.
    # -> IDLE at their end, if they trained nothing: they are not like the steps to come.
    RECORDING = enum.auto()

    # The order check runs on its thread, and ordinary steps go on meanwhile.
    # -> MEASURING before the first step that depends on the ruling, if it is granted.
    # -> IDLE before that step, if it is not.
    # An A/A control asks too: the ruling places its parts, and its figures must not mix with those of other steps.
    WAITING_FOR_RULING = enum.auto()

    # All steps run by their plans.
    # -> IDLE at the end of the window's last step.
    MEASURING = enum.auto()


class _OpenWindow:
    """A window under way, with what its steps need. Its phase is the runner's.

    Attributes:
        marks: the window.
        session: in which it was opened.
        arm: what the job as configured is compared with.
        schedule: the monitor's; from the ruling on with this window's parts in their places.
        clearance: to serialise what its first steps recorded.
        recorded: their logs, of those that trained.
        cost: what the window costs training.
    """

    def __init__(self, marks: Window, session: Session, arm: BoundArm, schedule: Schedule, cost: WindowCost) -> None:
        self.marks = marks
        self.arm = arm
        self.cost = cost
        self.session = session
        self.schedule = schedule
        self.clearance = Clearance(session.order_checker, session.job.rank)
        self.recorded: list[StepLog] = []

    def checked(self, closed: ClosedWindow, race: RaceChecks, step: int) -> ClosedWindow:
        """The window once it has closed, with what the race check has found.

        Args:
            closed: the same window. One that was cut short is not checked, nor is one without sequential steps.
            race: the monitor's.
            step: its last.
        """
        if not (closed.complete and self.arm.arm.sequential) or self.schedule.control:
            return closed
        session, granted = self.session, self.clearance
        check = race.after_window(granted.name, step, granted.sequence, session.ballot, session.job.rank)
        return replace(closed, race=check)

    def grant(self, ruling: Ruling, race: RaceChecks) -> None:
        """Go on as rank 0 has allowed.

        Args:
            ruling: which grants sequential steps, and places the window's parts.
            race: the monitor's.
        """
        race.granted(ruling.name, self.session.ballot)
        assert ruling.placement is not None
        self.schedule = self.schedule.placed(ruling.placement, turned=not self.arm.arm.sequential)
        self.marks.rhythms = ruling.rhythms

    def planner(self, balance: PhaseBalance, ring: StepRing) -> WindowPlanner:
        """Rank 0: plans the window on the order check's thread, if it is granted."""
        steps_per_block, schedule, arm = self.steps_per_block(), self.schedule, self.arm.arm.name

        def plan_window() -> tuple[Placement, tuple[Rhythm, ...]]:
            long_steps = self.session.budget.long_blocks.steps(self.marks.number, arm, schedule, steps_per_block)
            placement = balance.place(schedule, self.marks.first_step, arm, steps_per_block, long_steps)
            return placement, find_rhythms(*ring.durations())

        return plan_window

    def steps_per_block(self) -> int:
        """Rank 0: the counted steps that blocks of ``min_block_seconds`` have; before the ruling.

        By the step time of the last window. In the first window by that of the steps before it, and only if there are
        too few of them by that of its recorded steps: these take longer than others.
        """
        if not self.schedule.min_block_seconds:
            return self.schedule.steps_per_block
        usual = self.cost.usual
        step_s = self.session.budget.step_s or (
            self.marks.age_s / self.schedule.recorded_steps if usual is None else usual.mean_ns / 1e9
        )
        block_s = self.schedule.min_block_seconds
        steps, wanted = self.schedule.steps_that_take(block_s, step_s), self.schedule.steps_wanted(block_s, step_s)
        if steps < wanted:
            self.marks.note(
                f"blocks of min_block_seconds={block_s:g} would need {wanted} steps; every_n_steps="
                f"{self.schedule.every_n_steps} leaves room for {steps}"
            )
        return steps


class WindowRunner(StepRunner):
    """Runs the steps of windows by the schedule's plans; see ``Phase`` for the way of a window.

    Args:
        config: the options of the monitor.
        slot: gives the session.
        gate: of the monitor.
        switch: a framework's own switch, if an adapter has one.
        notices: says what became of windows.
        faults: switches measuring off where it cannot go on.
        ring: when each of the last steps began.

    Attributes:
        arms: what the job as configured is compared with.
        tokens_per_step: that one step of the whole job trains on; None if not known.
        model_chunks: of an interleaved pipeline, on this rank; 1 without.
        num_opened: windows opened so far.
    """

    def __init__(
        self,
        config: MonitorConfig,
        slot: SessionSlot,
        gate: Gate,
        switch: SwitchState,
        notices: Notices,
        faults: FaultGuard,
        ring: StepRing,
    ) -> None:
        super().__init__(gate, switch)
        self.arms = ArmRotation(config.checked_arms, switch.offers, notices, strict=config.strict)
        self.tokens_per_step = config.tokens_per_step
        self.model_chunks = 1
        self.num_opened = 0
        self._schedule = config.schedule
        self._slot = slot
        self._notices = notices
        self._faults = faults
        self._phase = Phase.IDLE
        self._window: _OpenWindow | None = None  # None if and only if the phase is IDLE
        self._step, self._rewinds = -1, 0
        self._backoff = SilenceBackoff(config.max_overhead)
        self._pace = StepPace()
        self._ring = ring
        self._skip = Skip("", 0)
        self._balance = PhaseBalance()  # of rank 0; used on the order check's thread
        self._ranges = StepRanges(config.annotate_steps)

    @property
    def in_window(self) -> bool:
        return self._window is not None

    def rewind(self) -> None:
        """The step number went back: windows may come again under the same number."""
        self._rewinds += 1
        self._backoff.rewind()
        self._skip = Skip("", 0)
        self.next_step = 0

    # -- a step

    def begin(self, step: int) -> None:
        self._step = step
        begun_ns = clocks.now()
        if self._window is None:
            self._pace.step_began(step, begun_ns)
            # A window that was cut short within a step may have left the switch for this place, between two steps.
            self._switch.turn(on=False)
        else:
            self._window.cost.window_step_began(begun_ns)
            self._window.cost.enter(begun_ns)
        plan = self._schedule_in_force.plan(step)
        if plan is not None and plan.offset == 0:
            if plan.window < self._skip.next_window:
                self._leave_closed(plan.window, step)
            elif plan.window >= self._backoff.next_window:
                self._open(plan, begun_ns)
        if self._window is None:
            self._rest()
            return
        self.next_step = 0  # every step of a window
        if self._phase is Phase.WAITING_FOR_RULING and self._schedule.is_decided_at(step):
            self._await_ruling(self._window)
            if self._window is None:
                return
            plan = self._window.schedule.plan(step)
        if plan is not None:
            self.in_step = True
            self._window.marks.begin_step(plan, self._window.clearance.sequence)
        self._window.cost.leave(clocks.now())

    def end(self) -> None:
        assert self._window is not None
        cost = self._window.cost
        cost.enter(clocks.now())
        self.in_step = False
        step = self._window.marks.end_step()
        stuck = check_gate_health(self._gate)
        if stuck is not None:
            self.abandon(stuck)
            self._faults.switch_off("stuck", f"{stuck}; measuring is switched off, training goes on")
            return
        if step.log.unsupported_device:
            self._close(complete=False, report=False)  # what its marks say is not true
            self._faults.switch_off("accelerator", device.refusal(step.log.unsupported_device))
            return
        if step.plan.part is Part.RECORDED:
            self._end_recorded_step(step, self._window)
        elif step.plan.part is Part.TIMED:
            self._end_timed_step(step, self._window)
        if step.plan.last:
            self._switch.turn(on=False)
            self._close(complete=True)
        cost.leave(clocks.now())

    def _end_recorded_step(self, step: MeasuredStep, window: _OpenWindow) -> None:
        if not step.skipped:
            window.recorded.append(step.log)
        if step.plan.offset < self._schedule.recorded_steps - 1:
            return
        if not window.recorded:
            self._leave_out(window, f"its recorded steps were skipped, {step.skipped}")
            return
        usual = window.cost.usual
        window.clearance.request(
            self._key(window.marks),
            window.recorded,
            window=window.marks.number,
            plan_window=window.planner(self._balance, self._ring) if window.session.job.rank == 0 else None,
            terms=_terms(self._schedule, self._switch.native, self.arms.names, window),
            usual_step_s=usual.mean_ns / 1e9 if usual is not None else None,
        )
        self._phase = Phase.WAITING_FOR_RULING

    def _end_timed_step(self, step: MeasuredStep, window: _OpenWindow) -> None:
        following = window.schedule.plan(self._step + 1)
        if following is not None and following.block == step.plan.block and following.part is step.plan.part:
            return
        marks = window.marks
        window.session.reporter.submit_block(
            FinishedBlock(
                window=marks.number,
                first_step=marks.first_step,
                compared_with=marks.compared_with,
                block=step.plan.block,
                arm=step.plan.arm,
                steps=marks.steps_of(step.plan.block),
            )
        )

    def skip(self, reason: str) -> None:
        if self.in_step and self._window is not None:
            self._window.marks.skip_step(reason)

    def pause(self) -> None:
        if self.in_step and self._window is not None:
            self._window.marks.pause()

    def resume(self) -> None:
        if self._window is not None:
            self._window.marks.resume()

    # -- the ruling

    def _await_ruling(self, window: _OpenWindow) -> None:
        """Wait for the ruling, for a bounded time, and go on as it says; a wait in vain is held against later windows.

        Args:
            window: the open one.
        """
        step_s = window.marks.age_s / self._schedule.decided_at
        asked_s = time.monotonic()
        ruling = window.clearance.ruling()
        if ruling.decision is Decision.LATE:
            waited_s = time.monotonic() - asked_s
            self._backoff.not_heard(window.marks.number, waited_s, step_s * self._schedule.every_n_steps)
        elif ruling.decision is not Decision.FAILED:
            self._backoff.all_heard()
        self._act_on(ruling, window)

    def _act_on(self, ruling: Ruling, window: _OpenWindow) -> None:
        """Go on as the ruling says: measure, or close the window."""
        match ruling.decision:
            case Decision.GRANTED:
                self._phase = Phase.MEASURING
                window.grant(ruling, self._slot.race)
                for rhythm in ruling.rhythms if window.session.job.rank == 0 else ():
                    said = f"the job has a rhythm: {rhythm_sentence(rhythm)}"
                    self._notices.info_once(f"rhythm {rhythm.period}", said)
            case Decision.CONFLICT:
                # Every later window would show the same conflict: there is nothing more to measure.
                self.abandon(ruling.reason)
                why = f"sequential mode is refused, and measuring is switched off: {ruling.reason}"
                self._faults.switch_off("conflict", why)
            case Decision.UNLIKE:
                self._close(complete=False, report=False)
                self._faults.switch_off("unlike", f"measuring is switched off: {ruling.reason}")
            case Decision.ASTRAY:
                self._notices.warn_once("astray", f"a window is left out: {ruling.reason}")
                self._close(complete=False, report=False)
            case Decision.SKIPPED:
                self._skip = Skip(ruling.reason, ruling.next_window)
                self._leave_out(window, ruling.reason)
            case Decision.LATE:
                self._notices.warn_once("late", f"a window has no sequential steps: {ruling.reason}")
                self._notices.info(f"windows before number {self._backoff.next_window} are left out")
                self.abandon(ruling.reason)
            case Decision.FAILED:
                self.abandon(ruling.reason)

    # -- windows

    @property
    def _schedule_in_force(self) -> Schedule:
        return self._schedule if self._window is None else self._window.schedule

    def _open(self, plan: Plan, begun_ns: int) -> None:
        session = self._slot.acquire()  # what opening it takes is part of the window's cost
        bound = None if session is None else self.arms.of_window(plan.window)
        if session is None or bound is None:
            return
        self.num_opened += 1
        self._switch.use(bound.switch or self._switch.native)
        marks = Window(
            plan.window, self._step, self._gate, self._switch, session.meter, arm=bound.arm, ranges=self._ranges
        )
        if marks.on_device and not self._schedule.warmup_steps:
            marks.note(
                "warmup_steps=0: the first step after a change of mode counts, although work of the step before it may "
                "still run on other streams"
            )
        cost = self._pace.window_opens(begun_ns)
        cost.enter(begun_ns)
        self._window = _OpenWindow(marks, session, bound, self._schedule, cost)
        self._slot.window = marks  # closed with the slot, should the job end without a word to us
        self._phase = Phase.RECORDING

    def _close(self, complete: bool, report: bool = True, job_ends: bool = False) -> None:
        window = self._window
        self._phase, self.in_step = Phase.IDLE, False
        if window is None:
            self._rest()
            return
        num_steps, cost = self._step - window.marks.first_step + 1, window.cost
        cost.enter(clocks.now())
        terms = _terms(self._schedule, self._switch.native, self.arms.names, window)
        closed = replace(window.marks.close(complete), terms=terms.digest, cost=cost, chunks=self.model_chunks)
        self._window = self._slot.window = None  # if closing it fails, it is still there to be discarded
        if closed.missing_profile:
            self._notices.warn_once("profiler", f"{closed.missing_profile}; the rest is measured")
        closed = window.checked(closed, self._slot.race, self._step) if report else closed
        self._pace.window_closed(cost, clocks.now(), self._step, num_steps, is_reported=report, job_ends=job_ends)
        self._rest()
        if report:
            window.session.reporter.submit_window(closed, self._key(window.marks), self.tokens_per_step)

    def _leave_closed(self, window: int, first_step: int) -> None:
        """Do not even open a window: rank 0 has told all ranks already that it is left out."""
        self._notices.info(f"window left out: {self._skip.reason}")
        session = self._slot.acquire()
        if session is not None:
            session.reporter.submit_left_out(window, first_step, self._skip.reason)

    def _leave_out(self, window: _OpenWindow, reason: str) -> None:
        """Close the window without a report."""
        self._notices.info(f"window left out: {reason}")
        window.session.reporter.submit_left_out(window.marks.number, window.marks.first_step, reason)
        self._close(complete=False, report=False)

    def abandon(self, reason: str, *, within_step: bool = False, job_ends: bool = False) -> None:
        """End the window early; what was measured so far is reported as incomplete.

        Args:
            reason: why, in words.
            within_step: the step goes on, so that a framework's own switch must stay until its end.
            job_ends: nothing more is measured.
        """
        super().abandon(reason, within_step=within_step, job_ends=job_ends)
        if self._window is not None:
            self._notices.info(f"window {self._window.marks.number} was cut short: {reason}")
            self._window.marks.note(f"cut short: {reason}")
            self._close(complete=False, job_ends=job_ends)

    def discard(self) -> None:
        window, self._window = self._window, None
        self._slot.window, self._phase = None, Phase.IDLE
        if window is not None:
            window.marks.discard()

    def _rest(self) -> None:
        """Have nothing to do before the next window, but to look at the steps around windows."""
        self.next_step = self._pace.next_step(self._step, self._schedule.next_window_step(self._step + 1))

    def _key(self, window: Window) -> str:
        """Names a window in the store: once, even where step numbers go back and windows come again.

        Not by its step: a rank whose window begins at another one must be found, and named.
        """
        return f"{self._rewinds}/window{window.number}"


def _terms(schedule: Schedule, native: Switch | None, arms: tuple[str, ...], window: _OpenWindow) -> WindowTerms:
    """What this rank is about to measure."""
    form = "gate" if native is None else native.name
    return WindowTerms(
        step=window.marks.first_step,
        options={**schedule.as_dict(), "sequential": form, "arms": arms},
        control=schedule.control,
        serialises=window.arm.arm.sequential,
    )
