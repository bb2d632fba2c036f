"""Opens, drives and closes the scheduled windows."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from overlap_callbacks.analysis.causal import levels_of
from overlap_callbacks.analysis.results.causal import DelayedSet
from overlap_callbacks.analysis.results.race import RaceCheck
from overlap_callbacks.analysis.results.window import Rhythm
from overlap_callbacks.analysis.rhythms import find_rhythms, rhythm_note
from overlap_callbacks.gate.arms import Sequential, checked_arms
from overlap_callbacks.gate.delays import delayable
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from overlap_callbacks.instruments import clocks, device
from overlap_callbacks.monitor.arm_rotation import ArmRotation, BoundArm
from overlap_callbacks.monitor.background.budget import Skip
from overlap_callbacks.monitor.background.causes import OwnCalls, encoded_calls, keys_of
from overlap_callbacks.monitor.background.deciding import ChosenArm
from overlap_callbacks.monitor.background.order_check import Decision, Ruling, WindowPlanner
from overlap_callbacks.monitor.background.submissions import RecordedKinds, WindowConfig
from overlap_callbacks.monitor.course import Course
from overlap_callbacks.monitor.placement import PhaseBalance
from overlap_callbacks.monitor.race.check import RaceChecks
from overlap_callbacks.monitor.schedule import Part, Placement, Plan, Schedule
from overlap_callbacks.monitor.session import Session, SessionSlot
from overlap_callbacks.monitor.step_ring import StepRing
from overlap_callbacks.monitor.step_runner import StepRunner, check_gate_health
from overlap_callbacks.monitor.stretches import Stretches
from overlap_callbacks.monitor.window import MeasuredStep, StepRanges, Window
from overlap_callbacks.monitor.window_cost import StepPace, WindowCost


class Phase(enum.Enum):
    """The runner's state. ``abandon``, which cuts a window short, leads from any phase to ``IDLE``."""

    # No window is open.
    # -> RECORDING at the first step of a window, if there is a job to measure.
    IDLE = enum.auto()

    # The window's first steps run overlapped, and their collectives are recorded.
    # -> WAITING_FOR_RULING at their end: the recorded sequences have gone to the order check.
    # -> IDLE at their end, if they trained nothing: they are unlike the steps to come.
    RECORDING = enum.auto()

    # The order check runs on its thread while ordinary steps run.
    # -> MEASURING before the first step that depends on the ruling, if it is granted.
    # -> IDLE before that step, if it is not.
    # An A/A control asks too: the ruling places its parts, and its figures must not mix with those of other steps.
    WAITING_FOR_RULING = enum.auto()

    # All steps run by their plans.
    # -> IDLE at the end of the window's last step.
    MEASURING = enum.auto()


@dataclass(eq=False)
class _OpenWindow:
    """An open window and what its steps need. The runner has its phase."""

    marks: Window
    session: Session
    arm: BoundArm  # if rank 0 decides, from the ruling on
    schedule: Schedule  # the monitor's; from the ruling on with this window's parts placed
    config: WindowConfig  # what this rank is about to measure
    cost: WindowCost
    recorded: list[StepLog] = field(default_factory=list)  # of the recorded steps that trained
    calls: OwnCalls = field(default_factory=dict)  # of the last one, in a causal job
    granted: ExpectedSequence | None = None  # what may be serialised, once rank 0 has granted it
    ruling: str = ""  # name of that ruling

    def request(self, key: str, balance: PhaseBalance, ring: StepRing) -> None:
        """Request a ruling on the recorded steps' collectives; rank 0 plans the window."""
        session, usual = self.session, self.cost.usual
        if self.config.options["causal"]:
            self.calls = delayable(self.recorded[-1].collectives)
        session.order_checker.start(
            key,
            # A rank whose step compiled asks too: the others wait for it, and all must decide the same.
            RecordedKinds.of(self.recorded, session.job.rank)._replace(delayable=encoded_calls(self.calls)),
            self.marks.number,
            plan_window=self._planner(balance, ring) if session.job.rank == 0 else None,
            config=self.config,
            usual_step_s=usual.mean_ns / 1e9 if usual is not None else None,
            quick=session.quick if self.marks.quick else None,
            arm_steps=self.schedule.arm_steps(self._steps_per_block()) if session.deciding is not None else 0,
        )

    def grant(self, ruling: Ruling, arm: BoundArm) -> None:
        """Apply rank 0's ruling: sequential steps are granted, and the window's parts placed."""
        self.arm = arm
        self.granted = self.session.order_checker.granted(ruling)
        self.ruling = ruling.name
        self.marks.rhythms = ruling.rhythms
        turned = not arm.arm.sequential
        self.marks.compare_with(arm.arm)
        if ruling.delayed is not None:
            self.marks.delayed = ruling.delayed
            self.marks.delayed_keys = keys_of(ruling.delayed, self.calls)
            self.schedule = self.schedule.causal(levels_of(self.schedule.delayed_steps, self.marks.number))
        elif ruling.trial:
            self.marks.tried = arm.arm.name
            self.schedule = self.schedule.trial(turned=turned)
        else:
            assert ruling.placement is not None
            self.schedule = self.schedule.placed(ruling.placement, turned=turned)

    def race_check(self, race: RaceChecks, step: int) -> RaceCheck | None:
        """Run the race check after a complete window with sequential steps; ``step`` was its last."""
        marks = self.marks
        if not (marks.complete and self.arm.arm.sequential) or self.schedule.control or marks.tried or marks.delayed:
            return None
        return race.after_window(self.ruling, step, self.granted, self.session.ballot, self.session.job.rank)

    def _planner(self, balance: PhaseBalance, ring: StepRing) -> WindowPlanner:
        """On rank 0, a function that plans the window on the order check's thread once it is granted."""
        steps_per_block, schedule, given = self._steps_per_block(), self.schedule, self.arm.arm.name
        causes, usual = self.session.causes, self.cost.usual

        def plan_window(
            chosen: ChosenArm | None, delayable: list[bytes]
        ) -> tuple[Placement | None, tuple[Rhythm, ...], DelayedSet | None]:
            delayed = None
            if not self.marks.quick and usual is not None:
                delayed = causes.choose(self.marks.number, delayable, usual.mean_ns / 1e6)
            if delayed is not None or (chosen is not None and chosen.trial):
                return None, find_rhythms(*ring.durations()), delayed
            arm = given if chosen is None else chosen.name
            long_steps = self.session.budget.long_blocks.steps(self.marks.number, arm, schedule, steps_per_block)
            placement = balance.place(schedule, self.marks.first_step, arm, steps_per_block, long_steps)
            return placement, find_rhythms(*ring.durations()), None

        return plan_window

    def _steps_per_block(self) -> int:
        """On rank 0, the counted steps of blocks of ``min_block_seconds``, from the step time of the last window."""
        if not self.schedule.min_block_seconds:
            return self.schedule.steps_per_block
        usual = self.cost.usual  # in the first window; without it, use the recorded steps, which take longer
        step_s = self.session.budget.step_s or (
            self.marks.age_s / self.schedule.recorded_steps if usual is None else usual.mean_ns / 1e9
        )
        block_s = self.schedule.min_block_seconds
        steps, wanted = self.schedule.steps_that_take(block_s, step_s), self.schedule.steps_wanted(block_s, step_s)
        if steps < wanted:
            self.marks.note(
                f"blocks of min_block_seconds={block_s:g} would need {wanted} steps; every_n_steps="
                f"{self.schedule.every_n_steps} leaves room for {steps} [OC335]"
            )
        return steps


class WindowRunner(StepRunner):
    """Runs the steps of windows by the schedule's plans; see ``Phase`` for a window's states."""

    def __init__(self, slot: SessionSlot, ring: StepRing) -> None:
        super().__init__(slot)
        config = slot.config
        self.arms = ArmRotation(checked_arms(config.arms), self._switch.offers, self._notices, strict=config.strict)
        self.tokens_per_step = config.tokens_per_step  # of the whole job; None if not known
        self.model_chunks = 1  # of an interleaved pipeline, on this rank
        self.num_opened = 0  # number of windows opened so far
        self.course = Course(config)
        self._decides = config.decide is not None  # rank 0 chooses the arms of windows that are not back to back
        self._phase = Phase.IDLE
        self._window: _OpenWindow | None = None  # None exactly when the phase is IDLE
        self._step, self._rewinds = -1, 0
        self._pace, self._ring = StepPace(), ring
        self._balance = PhaseBalance()  # used by rank 0, on the order check's thread
        self._ranges = StepRanges(config.annotate_steps)
        self._keeping, self.stretches = slot.keeping, Stretches(slot)

    @property
    def in_window(self) -> bool:
        return self._window is not None

    @property
    def steps_left(self) -> int:
        return 0 if (window := self._window) is None else window.schedule.steps_left(self._step)

    def rewind(self) -> None:
        """The step number went back: window numbers may repeat."""
        self._rewinds += 1
        self.stretches.rewind()
        self.course.start_over()
        self.next_step = 0

    # -- a step

    def begin(self, step: int) -> None:
        self._step = step
        self.stretches.step_began(step)
        if self._slot.is_stopped_at(step, self.course) and (self._window is not None or self._keeping.is_under_way):
            self.abandon("measuring was stopped from outside [OC147]")
        if self._window is None:
            self._slot.follow(step, self.course)
        begun_ns = clocks.now()
        if self._window is None:
            self._pace.step_began(step, begun_ns)
        else:
            self._window.cost.window_step_began(begun_ns)
            self._window.cost.enter(begun_ns)
        plan = (self.course if self._window is None else self._window.schedule).plan(step)
        if plan is not None and plan.offset == 0:
            if plan.window < self.course.skip.next_window:
                self._skip_unopened(plan.window, step)
            elif plan.window >= self.course.backoff.next_window:
                self._open(plan, begun_ns)
        if self._window is None:
            # A window cut short within a step may have left the switch to be turned here, between two steps.
            self._keeping.between_steps(step)
            self._pace.arm_is(on=self._switch.is_turned)
            self._await_next_window()
            return
        self.next_step = 0  # call ``begin`` at every step of a window
        if self._phase is Phase.WAITING_FOR_RULING and self.course.schedule.is_decided_at(step):
            self._await_ruling(self._window)
            if self._window is None:
                return
            plan = self._window.schedule.plan(step)
        if plan is not None:
            self.in_step = True
            self._window.marks.begin_step(plan, self._window.granted)
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
            self._faults.switch_off("stuck", f"measuring is switched off, training goes on: {stuck}")
            return
        if step.log.unsupported_device:
            self._close(complete=False, report=False)  # its marks are wrong
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
        if step.plan.offset < self.course.schedule.recorded_steps - 1:
            return
        if not window.recorded:
            self._close_unreported(window, f"its recorded steps were skipped ({step.skipped}) [OC303]")
            return
        window.request(self._key(window.marks), self._balance, self._ring)
        self._phase = Phase.WAITING_FOR_RULING

    def _end_timed_step(self, step: MeasuredStep, window: _OpenWindow) -> None:
        following = window.schedule.plan(self._step + 1)
        if following is not None and following.block == step.plan.block and following.part is step.plan.part:
            return
        window.session.reporter.submit_block(window.marks, window.marks.steps_of(step.plan.block))

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
        """Wait a bounded time for the ruling and act on it; after a wait in vain, windows are skipped."""
        step_s = window.marks.age_s / self.course.schedule.decided_at
        asked_s = time.monotonic()
        ruling = window.session.order_checker.await_ruling()
        if ruling.decision is Decision.LATE:
            waited_s = time.monotonic() - asked_s
            self.course.backoff.not_heard(window.marks.number, waited_s, step_s * self.course.schedule.every_n_steps)
        elif ruling.decision is not Decision.FAILED:
            self.course.backoff.all_heard()
        self._act_on(ruling, window)
        if self.course.is_quick and not ruling.quick:
            self._end_quick(window.session)

    def _end_quick(self, session: Session) -> None:
        """Go on by the job's own schedule, and give the answer so far.

        A rank that hears no ruling ends it alone; then the others hear nothing from that rank at the next window, and
        end it too.
        """
        self.course.end_quick()
        if self._window is None:
            self._await_next_window()
        session.reporter.submit_answer()

    def _act_on(self, ruling: Ruling, window: _OpenWindow) -> None:
        """Act on the ruling: measure, or close the window."""
        match ruling.decision:
            case Decision.GRANTED:
                self._phase = Phase.MEASURING
                arm = self.arms.named(ruling.arm) if ruling.arm else window.arm
                self._switch.use(arm.switch or self._switch.native)
                window.grant(ruling, arm)
                self._vote_to_keep(ruling, window, window.marks.first_step + window.schedule.num_planned)
                self._slot.race.granted(ruling.name, window.session.ballot)
                for rhythm in ruling.rhythms if window.session.job.rank == 0 else ():
                    self._notices.info_once(f"rhythm {rhythm.period}", rhythm_note(rhythm))
            case Decision.CONFLICT:
                # Every later window would show the same conflict, so stop.
                self.abandon(ruling.reason)
                why = f"sequential mode is refused, and measuring is switched off: {ruling.reason}"
                self._faults.switch_off("conflict", why)
            case Decision.CONFIG_MISMATCH:
                self._close(complete=False, report=False)
                self._faults.switch_off("config_mismatch", f"measuring is switched off: {ruling.reason}")
            case Decision.STEP_MISMATCH:
                self._notices.warn_once("step_mismatch", f"a window is left out: {ruling.reason}")
                self._close(complete=False, report=False)
            case Decision.SKIPPED:
                self.course.skip = Skip(ruling.reason, ruling.next_window)
                why = window.session.budget.postponed(self.course.schedule, self._step)
                self._vote_to_keep(ruling, window, window.marks.first_step + self.course.schedule.soon_decided)
                if why:
                    self._notices.announce_once("postponed", why)
                self._close_unreported(window, ruling.reason, is_said=bool(why))
            case Decision.LATE:
                self._notices.warn_once("late", f"a window has no sequential steps: {ruling.reason}")
                self._notices.info(f"windows before number {self.course.backoff.next_window} are left out [OC217]")
                self.abandon(ruling.reason)
            case Decision.FAILED:
                self.abandon(ruling.reason)

    def _vote_to_keep(self, ruling: Ruling, window: _OpenWindow, from_step: int) -> None:
        # Without a step between this window and the next one, there is nothing to vote on.
        if ruling.keep and from_step < self.course.schedule.next_window_step(window.marks.first_step + 1):
            session = window.session
            arm, stretch = self.arms.named(ruling.keep), None if session.deciding is None else session.deciding.stretch
            self._keeping.limit(stretch, self._slot.config.schedule.every_n_steps)
            self._keeping.vote(session.channel, session.ballot, arm, ruling.name, from_step)

    # -- windows

    def _open(self, plan: Plan, begun_ns: int) -> None:
        session = self._slot.acquire()  # the time to open it is part of the window's cost
        names, decides = self.arms.names, self._decides and not self.course.is_quick
        bound = None if session is None or decides else self.arms.of_window(plan.window)
        if session is not None and decides:
            # The arm comes with rank 0's ruling. All ranks must have the same ones.
            names = self.arms.available()
            bound = BoundArm(Sequential(), None) if names else None
            if session.deciding is not None:
                session.deciding.available, session.deciding.at = names, (self._step, self._keeping.paused_s)
        if session is None or bound is None:
            return
        self.num_opened += 1
        self._keeping.window_opens()
        self._switch.use(bound.switch or self._switch.native)
        marks = Window(
            plan.window, self._step, self._gate, self._switch, session.meter, arm=bound.arm, ranges=self._ranges
        )
        if marks.on_device and not self.course.schedule.warmup_steps:
            marks.note(
                "warmup_steps=0: the first step after a change of mode counts, although work of the step before it may "
                "still run on other streams [OC334]"
            )
        marks.quick = self.course.is_quick
        cost = self._pace.window_opens(begun_ns)
        cost.enter(begun_ns)
        form = "gate" if self._switch.native is None else self._switch.native.name
        options = {**self.course.schedule.as_dict(), "sequential": form, "arms": names}
        config = WindowConfig(
            step=marks.first_step,
            options={**options, "decide": repr(self._slot.config.decide), "causal": self._slot.config.causal},
            control=self.course.schedule.control,
            serialises=bound.arm.sequential,
        )
        self._window = _OpenWindow(marks, session, bound, self.course.schedule, config, cost)
        self._slot.window = marks  # closed with the slot, should the job end without notice
        self._phase = Phase.RECORDING

    def _close(self, complete: bool, report: bool = True, job_ends: bool = False) -> None:
        window = self._window
        self._phase, self.in_step = Phase.IDLE, False
        if window is None:
            self._await_next_window()
            return
        marks, cost = window.marks, window.cost
        cost.enter(clocks.now())
        marks.close(complete)
        marks.cost, marks.chunks, marks.config_digest = cost, self.model_chunks, window.config.digest
        self._window = self._slot.window = None  # until here, a window that fails to close can still be discarded
        if marks.missing_profile:
            self._notices.warn_once("profiler", f"{marks.missing_profile}; the rest is measured")
        if report:
            marks.race = window.race_check(self._slot.race, self._step)
        num_steps = self._step - marks.first_step + 1
        self._pace.window_closed(cost, clocks.now(), self._step, num_steps, is_reported=report, job_ends=job_ends)
        self._await_next_window()
        if report:
            window.session.reporter.submit_window(marks, self._key(marks), self.tokens_per_step)

    def _skip_unopened(self, window: int, first_step: int) -> None:
        """Skip a window without opening it: rank 0 has announced in advance that it is skipped."""
        if (session := self._slot.acquire()) is not None:
            at = first_step, self._keeping.paused_s
            if session.deciding is not None and session.deciding.has_slowed(window, at):
                self._keeping.has_slowed(first_step)
            session.reporter.submit_left_out(window, first_step, self.course.skip.reason)

    def _close_unreported(self, window: _OpenWindow, reason: str, *, is_said: bool = False) -> None:
        """Close the window without a report; with a line, unless the reason was said."""
        if not is_said:
            self._notices.info(f"window left out: {reason}")
        window.session.reporter.submit_left_out(window.marks.number, window.marks.first_step, reason)
        self._close(complete=False, report=False)

    def abandon(self, reason: str, *, within_step: bool = False, job_ends: bool = False) -> None:
        """End the window early; what was measured so far is reported as incomplete. A kept arm goes off."""
        self._keeping.end(reason)
        self.next_step = 0
        super().abandon(reason, within_step=within_step, job_ends=job_ends)
        if self._window is not None:
            self._notices.info(f"window {self._window.marks.number} was cut short: {reason}")
            self._window.marks.note(f"cut short: {reason}")
            self._close(complete=False, job_ends=job_ends)

    def discard(self) -> None:
        self._keeping.end("an internal error")
        window, self._window = self._window, None
        self._slot.window, self._phase = None, Phase.IDLE
        if window is not None:
            window.marks.discard()

    def _await_next_window(self) -> None:
        """Wait for the next window; until then only the steps around windows are observed."""
        next_step = self._pace.next_step(self._step, self.course.next_window_step(self._step + 1))
        next_step = min(next_step, self._keeping.next_step, self._slot.next_plan_step(self._step))
        self.next_step = min(next_step, self.stretches.next_step)

    def _key(self, window: Window) -> str:
        """Name of a window in the store, unique after a rewind. Not by its step, so that differing ranks still meet."""
        return f"{self._rewinds}/{'quick' if window.quick else 'window'}{window.number}"
