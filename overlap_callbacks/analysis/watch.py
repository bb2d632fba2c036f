"""Rank 0 watches a run: the figures of its windows and the parts of every step. What changed, where, and why. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from overlap_callbacks.analysis.change import WINDOWS_PER_FALSE_ALARM, ChangeDetector
from overlap_callbacks.analysis.figures import scale_of
from overlap_callbacks.analysis.formatting import PLAIN, name_ranks
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.change import STEP, Change
from overlap_callbacks.analysis.results.environment import JobEnvironment
from overlap_callbacks.analysis.results.frontier import StepFrontier
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import RankWindow

# Figures of windows. The time of a step is watched in every step.
WATCHED = tuple([figure_named(name) for name in ("speedup_vs_sequential", "compute_slowdown", "exposed_comm_ms")])
# Of all parts of the steps together, and the parts that are steps of training.
FALSE_ALARMS_PER_DAY = 0.1
_DAY_NS = 86_400e9
COMMUNICATION = "communication"
_STEP, _WAITING, _LATE = "all", "waiting", "late "
_CAUSES = {
    "input": "input", "input_forward_backward": "input or compute", "forward": "compute", "backward": "compute",
    "optimizer": "compute", _WAITING: COMMUNICATION, "other": "other",
}  # fmt: skip
# A stretch with fewer ordinary steps says too little.
_LEAST_STEPS = 16
# Changes of less of the step are not sought.
_LEAST_SHARE = 0.01
# Ranks at which a part is: together they explain so much of it, and each at least so much of the worst one's.
_EXPLAINED, _AS_MUCH = 0.25, 0.5
# A device whose clock is so much below that of others is the cause.
_LOWER_CLOCK = 0.03
# A part whose share of a change is less is none of it; tensors that hold less of a device do not fill it.
_SMALL, _FULL = 0.1, 0.9
_MOST_STRETCHES = 300
_MOST_RANKS = 8
# Windows whose transfers are kept as evidence.
_MOST_WINDOWS = 6


def false_alarms_per_day(num_windows: int, time_s: float) -> float:
    """How many are expected at most, of all figures of windows and parts of steps, given how often windows come."""
    return num_windows / time_s * 86_400 / WINDOWS_PER_FALSE_ALARM + FALSE_ALARMS_PER_DAY


class RunWatch:
    """What changes along a run. Rank 0's reporting thread calls it with what it gets, in order."""

    def __init__(self) -> None:
        self._figures = {figure: ChangeDetector(WINDOWS_PER_FALSE_ALARM * len(WATCHED)) for figure in WATCHED}
        self._windows: dict[str, list[int]] = {}  # first steps of the windows with a figure
        self._parts: dict[str, ChangeDetector] = {}
        self._stretches: deque[StepFrontier] = deque(maxlen=_MOST_STRETCHES)
        self._usual_ns = 0.0
        self._places: Mapping[int, str] = {}
        self._transfers: deque[Transfers] = deque(maxlen=_MOST_WINDOWS)
        self._open: Change | None = None  # told, and without a window's evidence yet
        self.num_quiet = 0  # windows since the last change

    def window(self, report: OverlapReport) -> list[Change]:
        """The changes that show with a window's report."""
        environment = report.environment
        if environment is not None:
            self._places = places_of(environment)
        found = []
        counts = report.valid and report.complete
        for figure, detector in self._figures.items():
            value = getattr(report, figure.name)
            if value is None or not counts or (report.control and figure.of_sequential):
                continue
            scale = scale_of(figure)
            try:
                scaled = scale.to(value.value)
            except ValueError:  # a time of 0
                continue
            steps = self._windows.setdefault(figure.name, [])
            steps.append(report.first_step)
            change = detector.add(scaled)
            if change is not None:
                first = steps[change.first]
                before, after = scale.back(change.before), scale.back(change.after)
                found.append(
                    Change(what=figure.name, first_step=first, found_step=report.first_step, before=before, after=after)
                )
        self.num_quiet = 0 if found else self.num_quiet + counts
        transfers_ms = mean_transfers_ms(report)
        if transfers_ms:
            self._transfers.append(Transfers(report.window, report.first_step, transfers_ms))
        if self._open is not None and report.first_step >= self._open.first_step:
            found.append(with_evidence(self._open, report, self._transfers))
            self._open = None
        return found

    def stretch(self, frontier: StepFrontier) -> list[Change]:
        """The change that shows with a stretch of steps, if one does."""
        if frontier.num_steps < _LEAST_STEPS:
            return []
        parts = _moved_ns(frontier)
        if not self._usual_ns:  # the first stretch is the start of the job
            self._usual_ns = parts[_STEP]
            number = _DAY_NS / max(1.0, self._usual_ns * (frontier.last_step - frontier.first_step + 1))
            names = [name for name in parts if name != _LATE + _WAITING]
            values = max(100.0, number * len(names) / FALSE_ALARMS_PER_DAY)
            self._parts = {name: ChangeDetector(values, _LEAST_SHARE) for name in names}
            return []
        self._stretches.append(frontier)
        found = []
        for name, detector in self._parts.items():
            change = detector.add(parts[name] / self._usual_ns)
            if change is not None:
                found.append((change.found - change.first + 1, name))
        if not found:
            return []
        after, _ = max(found)
        before = list(self._stretches)[:-after]
        since = list(self._stretches)[-after:]
        for detector in self._parts.values():
            detector.keep(after)
        self._stretches = deque(since, maxlen=_MOST_STRETCHES)
        told = _diagnosis(before, since, [name for _, name in found], self._places)
        self._open = told if told.step_ms > 0 else None
        self.num_quiet = 0
        return [told]

    @property
    def awaits_window(self) -> bool:
        """Whether a slowdown was told of which no window has measured more yet."""
        return self._open is not None

    def smallest_steps(self) -> dict[str, float]:
        """By figure and part, the relative step that would be found within 20 windows or stretches, in 95 % of cases.

        Of a signed figure it is a difference.
        """
        figures = {figure.name: detector.smallest_step for figure, detector in self._figures.items()}
        parts = {f"{STEP}{part}": self._parts[part].smallest_step for part in (*_CAUSES, _STEP) if self._parts}
        return {
            name: step if name.startswith(STEP) else math.expm1(step)
            for name, step in (figures | parts).items()
            if step is not None
        }


def _moved_ns(frontier: StepFrontier) -> dict[str, float]:
    """By part, how far a step moves the latest rank on; the whole step; and by part, beyond the mean of the ranks.

    What slows all ranks down, such as other jobs, is not in the last ones.
    """
    moved = {part: frontier.frontier_ns.get(part, 0) / frontier.num_steps for part in _CAUSES}
    late = {_LATE + part: ns - frontier.mean_ns.get(part, 0) / frontier.num_steps for part, ns in moved.items()}
    return moved | {_STEP: math.fsum(moved.values())} | late


def _diagnosis(
    before: Sequence[StepFrontier], since: Sequence[StepFrontier], alarms: Sequence[str], places: Mapping[int, str]
) -> Change:
    """What changed between two series of stretches: the part, and the ranks at which it is.

    Medians of stretches are compared. If the ranks have come apart in some part, that is the part.
    """
    was, now = _median_ns(before), _median_ns(since)
    by = {name: now[name] - was[name] for name in now}
    apart = [name for name in alarms if name.startswith(_LATE)]
    if apart:
        part = max(apart, key=lambda name: abs(by[name])).removeprefix(_LATE)
        by_ns = by[_LATE + part]
    else:
        part = max(_CAUSES, key=lambda name: math.copysign(by[name], by[name] * by[_STEP]))
        by_ns = by[_STEP]
    # Those by which it is longer now, or was before.
    late = {
        rank: math.copysign(1, by_ns) * (_median_late_ns(since, part, rank) - _median_late_ns(before, part, rank))
        for rank in {row.rank for each in (*before, *since) for row in each.held_up if row.part == part}
        if rank >= 0
    }
    ranks: tuple[int, ...] = ()
    if part != _WAITING and late and sum([ns for ns in late.values() if ns > 0]) >= _EXPLAINED * abs(by_ns):
        most = max(late.values())
        ranks = tuple(sorted([rank for rank, ns in late.items() if ns >= _AS_MUCH * most])[:_MOST_RANKS])
        ranks = _whole_host(ranks, places)
    num_ranks = since[-1].num_ranks
    if apart and len(ranks) < num_ranks:  # their distance from the mean, which they raise themselves
        by_ns *= num_ranks / (num_ranks - len(ranks))
    cause = _CAUSES[part]
    hosts = sorted({_host(place) for place in places.values()})
    if cause == COMMUNICATION and len(hosts) <= 2:  # between more, the parts of steps do not say
        ranks = tuple(sorted(places)) if len(places) == 2 else ()
    is_not = [name for name in ("input", "communication") if name not in cause and _is_small(name, by, by_ns)]
    return Change(
        what=f"{STEP}{part}",
        first_step=since[0].first_step,
        found_step=since[-1].last_step,
        before=was[part] / 1e6,
        after=now[part] / 1e6,
        step_ms=by_ns / 1e6,
        cause=cause,
        ranks=ranks,
        places=tuple([places[rank] for rank in ranks if rank in places]),
        is_not=tuple(is_not),
        repeat=_command(cause, hosts),
    )


def _whole_host(ranks: tuple[int, ...], places: Mapping[int, str]) -> tuple[int, ...]:
    """All ranks of a host if several of them, and no others, are late."""
    hosts = {_host(places[rank]) for rank in ranks if rank in places}
    if len(ranks) < 2 or len(hosts) != 1 or not all(rank in places for rank in ranks):
        return ranks
    own = [rank for rank, place in places.items() if _host(place) in hosts]
    return tuple(sorted(own)[:_MOST_RANKS]) if len(own) < len(places) else ranks


def _is_small(cause: str, by: Mapping[str, float], by_ns: float) -> bool:
    of_cause = math.fsum([by[part] for part, its in _CAUSES.items() if cause in its])
    return math.copysign(of_cause, of_cause * by_ns) < _SMALL * abs(by_ns)


def _median_ns(stretches: Sequence[StepFrontier]) -> dict[str, float]:
    rows = [_moved_ns(stretch) for stretch in stretches]
    return {name: median([row[name] for row in rows]) for name in rows[0]}


def _median_late_ns(stretches: Sequence[StepFrontier], part: str, rank: int) -> float:
    """By how much a rank that is last in a part is later than the mean of the ranks, a step."""
    return median(
        [
            math.fsum([row.ns for row in stretch.held_up if (row.part, row.rank) == (part, rank)]) / stretch.num_steps
            for stretch in stretches
        ]
    )


def places_of(environment: JobEnvironment) -> dict[int, str]:
    """Host and device of the ranks that are known, such as ``node-3, cuda:1``."""
    return {place.rank: f"{place.hostname}, {place.device}" for place in environment.places}


def _host(place: str) -> str:
    return place.rpartition(", ")[0]


class Transfers(NamedTuple):
    """The mean time of a collective's transfer in a window, by dimension of parallelism."""

    window: int
    first_step: int
    mean_ms: Mapping[str, float]


def with_evidence(change: Change, report: OverlapReport, transfers: Sequence[Transfers]) -> Change:
    """A change with what a window since then shows. ``transfers``: of windows before and since."""
    is_not, evidence = list(change.is_not), []
    clocks = {sample.rank: clock for sample in report.samples if (clock := _clock_mhz(sample)) is not None}
    own = [clocks[rank] for rank in change.ranks if rank in clocks]
    others = [clock for rank, clock in clocks.items() if rank not in change.ranks]
    if change.cause == "compute" and own and others:
        lower = 1 - min(own) / (math.fsum(others) / len(others))
        if lower > _LOWER_CLOCK:
            evidence.append(f"window {report.window}: its clock is {PLAIN.percent(lower)} below that of other ranks")
        else:
            is_not.append("its clock")
    if change.cause == "communication":
        dimension, is_one_of_several = _slower_dimension(change, transfers)
        of = f" ({dimension})" if is_one_of_several else ""
        evidence += [
            f"window {each.window}: {PLAIN.quantity(each.mean_ms[dimension], 'ms')} a transfer{of}"
            for each in transfers
            if dimension in each.mean_ms
        ]
    known = [peak for peak in report.memory if peak.peak_bytes is not None]
    size = 0 if report.environment is None else report.environment.lowest_rank.memory_bytes
    if known and size and max([peak.peak_bytes or 0 for peak in known]) < _FULL * size:
        is_not.append("memory")
    if report.e2e_overlapped_ms is not None:
        step = PLAIN.quantity(report.e2e_overlapped_ms.value, "ms")
        evidence.append(f"window {report.window}: a step of {step}")
    return msgspec.structs.replace(change, is_not=tuple(is_not), evidence=tuple(evidence))


def mean_transfers_ms(report: OverlapReport) -> dict[str, float]:
    """``Transfers.mean_ms`` of a window; empty if they are not timed."""
    rows = () if report.arrivals is None else report.arrivals.dimensions
    return {row.dimension: row.transfer_ms for row in rows if row.is_valid and row.transfer_ms > 0}


def _slower_dimension(change: Change, transfers: Sequence[Transfers]) -> tuple[str, bool]:
    """The dimension whose transfers take longer by the largest share since a change, and whether there are others."""
    times: dict[str, tuple[list[float], list[float]]] = {}
    for each in transfers:
        for dimension, ms in each.mean_ms.items():
            times.setdefault(dimension, ([], []))[each.first_step >= change.first_step].append(ms)
    growth = {of: fmean(since) / fmean(before) for of, (before, since) in times.items() if before and since}
    return max(growth or times, key=lambda of: growth.get(of, 0.0), default=""), len(times) > 1


def _clock_mhz(sample: RankWindow) -> float | None:
    """Mean clock of a rank's device in overlapped steps."""
    clocks = [mode.sm_clock_mhz for device in sample.power for mode in device.modes if mode.mode is Mode.OVERLAPPED]
    known = [clock for clock in clocks if clock is not None]
    return math.fsum(known) / len(known) if known else None


def change_in_words(change: Change) -> str:
    """E.g. ``the step takes 5.0 ms longer since step 1,280: compute at rank 3 (node-1, cuda:3), not input``."""
    if not change.of_steps:
        figure = figure_named(change.what)
        before, after = PLAIN.figure(figure, change.before), PLAIN.figure(figure, change.after)
        return f"{figure.label} is {after} since step {change.first_step:,}, before {before}"
    by = f"{PLAIN.quantity(abs(change.step_ms), 'ms')} {'longer' if change.step_ms > 0 else 'shorter'}"
    at = f" at {name_ranks(change.ranks)}" if change.ranks else "" if change.cause == COMMUNICATION else " at all ranks"
    places = f" ({'; '.join(change.places)})" if change.places else ""
    text = f"the step takes {by} since step {change.first_step:,}: {change.cause}{at}{places}"
    if change.is_not:
        text += f", not {' or '.join(change.is_not)}"
    for more in (*change.evidence, *([f"measure it again: `{change.repeat}`"] if change.repeat else [])):
        text += f"; {more}"
    return text


def change_sentence(change: Change) -> str:
    words = change_in_words(change)
    return f"Changed: {words}."


def _command(cause: str, hosts: Sequence[str]) -> str:
    if cause == COMMUNICATION and len(hosts) > 1:
        return (
            f"torchrun --nnodes {len(hosts)} --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {hosts[0]}:29400 "
            "-m overlap_callbacks bench collectives"
        )
    return "overlap bench collectives" if cause == COMMUNICATION else ""
