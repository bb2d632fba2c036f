"""Causal windows: rank 0 chooses what each delays, and reads off their steps whether it holds the step up."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import fmean

import msgspec

from overlap_callbacks.analysis.causal import LEVELS, next_set, responses_of
from overlap_callbacks.analysis.results.causal import CausalWindow, DelayedCall, DelayedSet
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import clocks
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.measurement import with_times
from overlap_callbacks.monitor.schedule import Part
from overlap_callbacks.monitor.window import MeasuredWindow
from overlap_callbacks.monitor.window_cost import WindowCost

# One window in so many is causal, once there is one of the usual kind: it tells what is exposed.
_EVERY = 2
# Windows lost in a row after which a set is given up.
_MOST_LOST = 3


class Causes:
    """What a job knows of its causes.

    The order check's thread calls ``choose``, the reporting thread ``report``.

    Args:
        budget: charged for what the delays cost.
        chooses: whether windows are to be causal, on rank 0; other ranks follow its rulings.
    """

    def __init__(self, budget: WindowBudget, *, chooses: bool) -> None:
        self._budget, self._chooses = budget, chooses
        self._lock = threading.Lock()
        self._windows: list[CausalWindow] = []
        self._lost = Counter[tuple[DelayedCall, ...]]()

    def choose(self, window: int, log: StepLog, step_ms: float) -> DelayedSet | None:
        """What a window is to delay, by a recorded step; None for one of the usual kind."""
        if not self._chooses or window % _EVERY != _EVERY - 1 or step_ms <= 0:
            return None
        with self._lock:
            given_up = {members for members, lost in self._lost.items() if lost >= _MOST_LOST}
            first = [members for members in by_dimension(log) if members not in given_up]
            return next_set(first, responses_of(self._windows), step_ms)

    def report(
        self, window: MeasuredWindow, cost: WindowCost, await_normal_steps: Callable[[WindowCost], None]
    ) -> list[CausalWindow]:
        """Measure a closed causal window and charge it; returned on rank 0, for the record, if it can be used."""
        await_normal_steps(cost)
        assert window.delayed is not None
        found, longer_ms = causal_window_of(window)
        lost = cost.lost((), 0.0)
        cost_ms = max(longer_ms, 0.0 if lost is None else lost.ms)
        self._budget.charge(window.number, cost.opened_ns, cost_ms / 1e3, lambda: cost.cost_after_report_ms)
        with self._lock:
            self._lost[window.delayed.members] += 1
            if found is None or not self._chooses:
                return []
            self._lost[window.delayed.members] = 0
            self._windows.append(msgspec.structs.replace(found, charged_ms=cost_ms))
            return self._windows[-1:]


def by_dimension(log: StepLog) -> list[tuple[DelayedCall, ...]]:
    """The collectives of a step that can be delayed, by dimension of parallelism; the largest first."""
    places = Counter[tuple[str, str]]()
    found: dict[str, list[DelayedCall]] = defaultdict(list)
    num_bytes = Counter[str]()
    for call in log.collectives:
        place = places[call.key]
        places[call.key] += 1
        if call.group.ranks and not (call.coalesced or call.point_to_point or "barrier" in call.operator):
            dimension = call.dimension or call.group.name
            found[dimension].append(DelayedCall(*call.key, place, call.name, call.dimension))
            num_bytes[dimension] += max(call.bytes_in, call.bytes_out)
    return [tuple(found[dimension]) for dimension, _ in num_bytes.most_common()]


def causal_window_of(window: MeasuredWindow) -> tuple[CausalWindow | None, float]:
    """A closed causal window, None if it cannot be used; and how much longer than undelayed its steps took, ms."""
    delayed = window.delayed
    steps = [step for step in window.steps if step.plan.part is Part.DELAYED]
    if delayed is None or not window.complete or not steps:
        return None, 0.0
    clocks.prepare_own_thread(clocks.device_of(steps[-1].end))
    steps = with_times(steps)
    times_ms = tuple([None if step.spoilt else step.ms for step in steps])
    own_ms = [ms for step, ms in zip(steps, times_ms, strict=True) if ms is not None and not step.plan.level]
    longer_ms = sum([ms - fmean(own_ms) for ms in times_ms if ms is not None]) if own_ms else 0.0
    longest = [_measured_ms(delay) for step in steps if step.plan.level == LEVELS - 1 for delay in step.log.delays]
    if not longest:
        return None, max(0.0, longer_ms)
    measured = msgspec.structs.replace(delayed, delay_ms=fmean(longest))
    levels = tuple([step.plan.level for step in steps])
    wanted = len(steps) * len(delayed.members)
    return CausalWindow(
        window=window.number,
        first_step=window.first_step,
        delayed=measured,
        levels=levels,
        step_ms=times_ms,
        missed=wanted - sum([len(step.log.delays) for step in steps]),
    ), max(0.0, longer_ms)


def _measured_ms(delay: float | tuple[clocks.Mark, clocks.Mark]) -> float:
    return clocks.elapsed_ms(*delay) if isinstance(delay, tuple) else delay
