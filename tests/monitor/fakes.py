"""What runners need of a job, without one: a gate that sees nothing, and a session whose rulings are given."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from overlap_callbacks.gate.switches import SwitchState
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.causes import Causes
from overlap_callbacks.monitor.background.order_check import Decision, Ruling, WindowPlanner
from overlap_callbacks.monitor.background.store import Job
from overlap_callbacks.monitor.background.submissions import RecordedKinds
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.faults import FaultGuard, Notices
from overlap_callbacks.monitor.keeping import Keeping
from overlap_callbacks.monitor.race.check import RaceChecks
from overlap_callbacks.monitor.step_ring import StepRing
from overlap_callbacks.monitor.window import MeasuredStep
from overlap_callbacks.monitor.window_cost import WindowCost

EMPTY_LOG = StepLog((), 0, None)


class FakeGate:
    """Notes the modes of its steps, and returns the log that it was given."""

    def __init__(self) -> None:
        self.modes: list[Mode] = []
        self.log = EMPTY_LOG
        self.serialising = False
        self.last_error: Exception | None = None
        self.stuck: object = None
        self.patience_s = 10.0

    def begin_step(self, *, sequential: bool, **_: Any) -> None:
        self.serialising = sequential
        self.modes.append(Mode.SEQUENTIAL if sequential else Mode.OVERLAPPED)

    def end_step(self) -> StepLog:
        self.stop()
        return self.log

    def stop(self) -> None:
        self.serialising = False


class FakeChecker:
    """Gives the rulings that it was given, one for each check; notes the keys of the checks.

    A window that is granted is placed as rank 0 does it, unless its ruling says where.
    """

    def __init__(self, rulings: Sequence[Ruling]) -> None:
        self.rulings = list(rulings)
        self.keys: list[str] = []
        self.recorded: list[RecordedKinds] = []
        self.plan_window: WindowPlanner | None = None

    def start(
        self, key: str, recorded: RecordedKinds, *_: Any, plan_window: WindowPlanner | None = None, **__: Any
    ) -> None:
        self.keys.append(key)
        self.recorded.append(recorded)
        self.plan_window = plan_window

    def granted(self, ruling: Ruling) -> ExpectedSequence:
        return ExpectedSequence.of(self.recorded[-1].granted(ruling.only))

    def await_ruling(self) -> Ruling:
        ruling = self.rulings.pop(0)
        if ruling.decision is Decision.GRANTED and ruling.placement is None and self.plan_window is not None:
            placement, rhythms, _ = self.plan_window(None, [])
            ruling = msgspec.structs.replace(ruling, placement=placement, rhythms=rhythms)
        return ruling


class FakeReporter:
    """Records what it should report."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int]] = []  # window and block
        self.windows: list[tuple[int, bool]] = []  # number, and whether it is complete
        self.left_out: list[tuple[int, str]] = []  # number, and why
        self.costs: list[WindowCost] = []

    def submit_block(self, window: Any, steps: Sequence[MeasuredStep]) -> None:
        self.blocks.append((window.number, steps[0].plan.block))

    def submit_left_out(self, window: int, first_step: int, reason: str) -> None:
        self.left_out.append((window, reason))

    def submit_window(self, window: Any, key: str, tokens_per_step: int | None) -> None:
        self.windows.append((window.number, window.complete))
        self.costs.append(window.cost)


class Bench:
    """Everything that a runner is made of."""

    def __init__(self, *rulings: Ruling, config: MonitorConfig | None = None) -> None:
        self.gate: Any = FakeGate()
        self.switch = SwitchState()
        self.notices = Notices()
        self.stopped = 0
        self.faults = FaultGuard(
            self.notices, self.gate, strict=False, stop=self._note_stop, fail=self._note_stop, wake=self._note_wake
        )
        self.checker = FakeChecker(rulings)
        self.reporter = FakeReporter()
        session = SimpleNamespace(
            job=Job(0, 2, "gloo"),
            order_checker=self.checker,
            reporter=self.reporter,
            budget=WindowBudget(None),
            meter=None,
            ballot=None,
            deciding=None,
            causes=Causes(WindowBudget(None), chooses=False),
            pinned_checks=itertools.count(1),
        )
        race = RaceChecks(False, self.gate, self.switch, self.notices)
        self.ring = StepRing(self.faults.report)
        self.slot: Any = SimpleNamespace(
            acquire=lambda: session, acquire_for_parts=lambda opens: None, race=race,
            config=config or MonitorConfig(), gate=self.gate, switch=self.switch,
            notices=self.notices, faults=self.faults, keeping=Keeping(self.switch, self.notices),
            next_plan_step=lambda step: sys.maxsize, is_stopped_at=lambda step, course: False,
            follow=lambda step, course: None,
        )  # fmt: skip

    def _note_stop(self) -> None:
        self.stopped += 1

    def _note_wake(self) -> None:
        pass
