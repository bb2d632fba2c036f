"""Causal windows: rank 0 chooses what each delays, and reads off their steps whether it holds the step up.

Rank 0 knows the collectives of all ranks from the order check, named alike: of a dimension of parallelism all groups
are delayed at once, also those without rank 0, on every rank that issues a collective of that name. Rank 0's own step
times tell what that costs: a job's ranks take equally long for two steps on end, whichever of them waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from overlap_callbacks._log import logger
from overlap_callbacks.analysis.causal import (
    LEVELS,
    causal_summary,
    next_set,
    response_of,
    responses_of,
    row_of,
    slopes_by_name,
)
from overlap_callbacks.analysis.exposure import add_exposures, names_of, of_rank, with_blocking
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.causal import CausalWindow, DelayedCall, DelayedSet
from overlap_callbacks.analysis.results.exposure import ExposureSums
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.sums import distinct, grouped, struct_sum
from overlap_callbacks.gate.delays import CallKey, Delayable
from overlap_callbacks.instruments import clocks
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.measurement import with_times
from overlap_callbacks.monitor.background.profile_figures import undelayed_exposure
from overlap_callbacks.monitor.background.tree import Exchange
from overlap_callbacks.monitor.schedule import Part
from overlap_callbacks.monitor.window import MeasuredWindow
from overlap_callbacks.monitor.window_cost import WindowCost
from overlap_callbacks.sinks.jsonl import earlier_starts

# One window in so many is causal, once there is one of the usual kind: it tells what is exposed.
_EVERY = 2
# Windows lost in a row after which a set is given up.
_MOST_LOST = 3
# Maximum time that the order check waits for the record of earlier starts, which is read on the reporting thread.
_READ_S = 1.0
# In place of the missed steps of a rank that did not say, or has not measured the window to its end.
ALL_STEPS = -1


OwnCalls = Mapping[DelayedCall, tuple[CallKey, Delayable]]  # what ``delayable`` finds in a rank's step


class CausalPart(msgspec.Struct, frozen=True, array_like=True):
    """What some ranks say of a causal window: ``missed`` as ``missed_steps``, ``exposure`` of the members' names."""

    missed: tuple[int, ...] = ()
    exposure: ExposureSums = ExposureSums()


_add_parts = struct_sum(CausalPart, missed=distinct, exposure=add_exposures)


def part_of(window: MeasuredWindow) -> CausalPart:
    """This rank's part of a closed causal window."""
    exposure = undelayed_exposure(window)
    names = tuple([row for row in exposure.names if row.place])
    return CausalPart(tuple(sorted(missed_steps(window))), msgspec.structs.replace(exposure, rows=(), names=names))


def encoded_calls(own: OwnCalls) -> bytes:
    """What can be delayed of this rank's step, for rank 0; empty if nothing can."""
    return zlib.compress(msgspec.msgpack.encode([one for _, one in own.values()]), 1) if own else b""


def keys_of(delayed: DelayedSet, own: OwnCalls) -> dict[CallKey, str]:
    """Of a set, what this rank issues, with the names in ``CausalWindow.names``: the same on all ranks."""
    return {own[member][0]: row_of(member)[1] for member in delayed.members if member in own}


class Causes:
    """What a job knows of its causes.

    The order check's thread calls ``choose``, the reporting thread the other methods.

    Args:
        budget: charged for what the delays cost.
        chooses: whether windows are to be causal, on rank 0; other ranks follow its rulings.
    """

    def __init__(self, budget: WindowBudget, *, chooses: bool) -> None:
        self._budget, self._chooses = budget, chooses
        self._lock = threading.Lock()
        self._is_open = threading.Event()
        self._windows: list[CausalWindow] = []
        self._lost = Counter[tuple[DelayedCall, ...]]()
        self._exposed_ms: dict[tuple[str, str], float] = {}  # by kind and name, in the last window that tells

    def open(self, record: Path | None, run: RunInfo) -> None:
        """Begin, with what the record has of earlier starts if their job was configured as this one, ``run``."""
        if self._chooses and record is not None:
            with contextlib.suppress(OSError):  # the record's own sink has reported it
                earlier = earlier_starts(record)
                if earlier.run is not None and earlier.run.job == run.job:
                    self._windows += earlier.causal
        self._is_open.set()

    def note(self, report: OverlapReport) -> OverlapReport:
        """Note which collectives a window of the usual kind found exposed; returned with their slopes so far."""
        if report.exposure is None or not report.exposure.names:
            return report
        names = grouped(report.exposure.names, lambda row: (row.collective, row.name))
        with self._lock:
            self._exposed_ms = {key: sum([row.exposed_ms for row in rows]) for key, rows in names.items()}
            slopes = slopes_by_name(self._windows)
        return msgspec.structs.replace(report, exposure=with_blocking(report.exposure, slopes)) if slopes else report

    def choose(self, window: int, of_ranks: Iterable[bytes], step_ms: float) -> DelayedSet | None:
        """What a window is to delay, of what the ranks have encoded; None for a window of the usual kind."""
        if not self._chooses or window % _EVERY != _EVERY - 1 or step_ms <= 0 or not self._is_open.wait(_READ_S):
            return None
        calls = [
            one for data in of_ranks for one in msgspec.msgpack.decode(zlib.decompress(data), type=list[Delayable])
        ]
        with self._lock:
            given_up = {members for members, lost in self._lost.items() if lost >= _MOST_LOST}
            known = [found.delayed.members for found in self._windows]
            first = by_dimension(calls, self._exposed_ms, known)
            return next_set(first, responses_of(self._windows), step_ms, given_up)

    def report(
        self,
        window: MeasuredWindow,
        cost: WindowCost,
        await_normal_steps: Callable[[WindowCost], None],
        gathered: Callable[[CausalPart], CausalPart],
        send_up: Callable[[bytes], None],
    ) -> list[CausalWindow]:
        """Measure a closed causal window and charge it; returned on rank 0, for the record, if it can be used.

        ``gathered`` adds to this rank's part those of the ranks below it.
        """
        assert window.delayed is not None
        began_s = time.thread_time()
        own = part_of(window)
        own_cpu_ms = (time.thread_time() - began_s) * 1e3
        await_normal_steps(cost)
        part = gathered(own)
        send_up(msgspec.msgpack.encode(part))
        found, longer_ms = causal_window_of(window, part)
        if self._chooses and window.complete and ALL_STEPS in part.missed:
            logger.warning(
                "overlap-callbacks: window %d of delays does not count: a rank did not say what it delayed [OC384]",
                window.number,
            )
        lost = cost.lost((), own_cpu_ms)
        cost_ms = max(longer_ms, 0.0 if lost is None else lost.ms)
        self._budget.charge(window.number, cost.opened_ns, cost_ms / 1e3, lambda: cost.cost_after_report_ms)
        with self._lock:
            self._lost[window.delayed.members] += 1
            if found is None or not self._chooses:
                return []
            if response_of([found]) is not None:
                self._lost[window.delayed.members] = 0
            self._windows.append(msgspec.structs.replace(found, charged_ms=cost_ms))
            logger.info("%s", causal_summary(self._windows))
            return self._windows[-1:]


def by_dimension(
    calls: Sequence[Delayable], exposed_ms: dict[tuple[str, str], float], known: Sequence[tuple[DelayedCall, ...]] = ()
) -> list[tuple[DelayedCall, ...]]:
    """The collectives by dimension of parallelism: exposed ones first, then by bytes; in a dimension as they come.

    Those of a dimension that was halved before, into some of ``known``, are in the order of then: its halves are the
    same.
    """
    weights: dict[DelayedCall, tuple[float, int]] = {}
    for call, name, num_bytes in calls:
        weight = exposed_ms.get((collective_of(call.operator), name), 0.0), num_bytes
        weights[call] = max(weight, weights.get(call, weight))
    found = []
    for members in grouped(weights, lambda call: call.group).values():
        ordered = sorted(members, key=lambda call: -weights[call][0])
        found.append(_as_tested(ordered, known))
    return sorted(
        found, key=lambda members: [-sum(of) for of in zip(*[weights[call] for call in members], strict=True)]
    )


def _as_tested(members: Sequence[DelayedCall], known: Sequence[tuple[DelayedCall, ...]]) -> tuple[DelayedCall, ...]:
    """In the order in which sets of some of them were tested, the first half first; then the others."""
    within = {frozenset(one): one for one in known if len(one) < len(members) and set(one) <= set(members)}
    largest = [one for of, one in within.items() if not any(of < other for other in within)]
    tested = dict.fromkeys([call for one in largest for call in _as_tested(one, known)])
    return (*tested, *[call for call in members if call not in tested])


def gather_parts(
    exchange: Exchange, key: str, timeout_s: float, stop: Callable[[float], bool], own: CausalPart
) -> CausalPart:
    """The parts of this rank (``own``) and those below it; ``ALL_STEPS`` are missed if one does not say in time."""
    parts = [msgspec.structs.replace(own, exposure=of_rank(own.exposure, exchange.tree.rank))]
    heard = exchange.gather(key, exchange.tree.patience_s(timeout_s), stop)
    for child in exchange.tree.children:
        try:
            parts.append(msgspec.msgpack.decode(heard.get(child, b""), type=CausalPart))
        except msgspec.DecodeError:
            parts.append(CausalPart((ALL_STEPS,)))
    return _add_parts(parts)


def missed_steps(window: MeasuredWindow) -> set[int]:
    """The delayed steps in which this rank could not delay all that it should; ``ALL_STEPS`` if it broke off."""
    steps = [step for step in window.steps if step.plan.part is Part.DELAYED]
    missed = {place for place, step in enumerate(steps) if len(step.log.delays) < len(window.delayed_keys)}
    return missed if window.complete else {ALL_STEPS}


def causal_window_of(window: MeasuredWindow, part: CausalPart) -> tuple[CausalWindow | None, float]:
    """A closed causal window, None if it cannot be used; and how much longer than undelayed its steps took, ms.

    ``part``: of all ranks.
    """
    delayed, wanted, missed = window.delayed, len(window.delayed_keys), set(part.missed)
    steps = [step for step in window.steps if step.plan.part is Part.DELAYED]
    if delayed is None or not window.complete or not steps or ALL_STEPS in missed:
        return None, 0.0
    clocks.prepare_own_thread(clocks.device_of(steps[-1].end))
    steps = with_times(steps)
    profiled = with_times([step for step in window.steps if step.plan.part is Part.PROFILED])
    own_ms = [step.ms for step in steps if step.ms is not None and not (step.spoilt or step.plan.level)]
    all_ms = [step.ms for step in (*steps, *profiled) if step.ms and not step.spoilt]
    longer_ms = sum([ms - fmean(own_ms) for ms in all_ms]) if own_ms else 0.0
    longest = [_measured_ms(delay) for step in steps if step.plan.level == LEVELS - 1 for delay in step.log.delays]
    if wanted and not longest:
        return None, max(0.0, longer_ms)
    return CausalWindow(
        window=window.number,
        first_step=window.first_step,
        delayed=msgspec.structs.replace(delayed, delay_ms=fmean(longest)) if longest else delayed,
        levels=tuple([step.plan.level for step in steps]),
        step_ms=tuple([None if step.spoilt or place in missed else step.ms for place, step in enumerate(steps)]),
        missed=wanted * len(steps) - sum([len(step.log.delays) for step in steps]),
        missed_steps=len(missed.intersection(range(len(steps)))),
        names=names_of(part.exposure),
    ), max(0.0, longer_ms)


def _measured_ms(delay: float | tuple[clocks.Mark, clocks.Mark]) -> float:
    return clocks.elapsed_ms(*delay) if isinstance(delay, tuple) else delay
