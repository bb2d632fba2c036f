"""How a device spends its time: the parts of a span, and its critical path.

A gap is time in which no kernel, collective or copy runs; it ends with the row that starts next. If the host launched
that row within the gap, it held the device up until the launch, and for a launch's latency. Otherwise the device did:
an event of another stream, or the hand-over between kernels.

The critical path of a span is the chain of work whose times add up to its length, walked backwards from the last row to
end. What ended last before a row started held it up: its launch, the row before on its stream, or a row of another
stream. Traces do not show events, so another stream's row counts if it ended later than the row before on the own
stream, and that one ended more than ``HAND_OVER_NS`` before. From a launch the path follows the host back to its last
wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind

# A row that starts this soon after the previous one on its stream waited for that one.
HAND_OVER_NS = 2_000
# Shorter gaps are between launches; in longer ones the host did something else.
SHORT_GAP_NS = 1_000_000
# A host library may end a collective's range this long after it has woken its waiters.
_LATE_END_NS = 1_000_000


def waited_for(ran: Intervals, launches_ns: Iterable[Indices]) -> Intervals:
    """The part of each host collective in which the host launches no kernel until it ends; shape (n,).

    A collective during which launches continue runs in the background: the device does not wait for it.

    Args:
        ran: the collectives.
        launches_ns: when kernels were launched, copies left out, some at a time; -1 if unknown.
    """
    never = np.iinfo(np.int64)
    margin_ns = np.minimum(ran.durations_ns // 10, _LATE_END_NS)
    early_ns = ran.end_ns - margin_ns
    # The last launch before ``early_ns``, the first after it, and the last before the end.
    before_ns, after_ns, last_ns = (np.full(len(ran), at) for at in (never.min, never.max, never.min))
    for part_ns in launches_ns:
        times_ns = np.concatenate(([never.min], np.sort(part_ns[part_ns >= 0]), [never.max]))
        place = np.searchsorted(times_ns, early_ns, side="right")
        before_ns, after_ns = np.maximum(before_ns, times_ns[place - 1]), np.minimum(after_ns, times_ns[place])
        last_ns = np.maximum(last_ns, times_ns[np.searchsorted(times_ns, ran.end_ns, side="right") - 1])
    start_ns, end_ns = np.maximum(ran.start_ns, before_ns), np.minimum(ran.end_ns, after_ns)
    # The host resumed shortly before the range ended, after a much longer wait; otherwise it did not wait.
    waited = 10 * (ran.end_ns - end_ns) <= end_ns - start_ns
    return Intervals(
        np.where(waited, start_ns, np.maximum(ran.start_ns, last_ns)), np.where(waited, end_ns, ran.end_ns)
    )


def waits_on_host(kernels: KernelTable, ran: Intervals, of_device: npt.NDArray[np.bool_]) -> Intervals:
    """When the host waited for its own collectives in a live profile, from their issue and usual time.

    If the host waits at once, it launches again when the collective ends, maybe sooner than usual. One with tensors
    ``of_device`` begins once the device has done what was launched before.
    """
    launched_ns = np.full(len(kernels), -1) if kernels.launched_ns is None else kernels.launched_ns
    rows = np.flatnonzero((launched_ns >= 0) & (kernels.kind != Kind.COPY))
    rows = rows[np.argsort(launched_ns[rows], kind="stable")]
    launches_ns, done_ns = launched_ns[rows], np.maximum.accumulate(kernels.intervals.end_ns[rows])
    place = np.searchsorted(launches_ns, ran.start_ns, side="right")
    after_ns, free_ns = np.append(launches_ns, np.iinfo(np.int64).max)[place], np.append(0, done_ns)[place]
    start_ns = np.where(of_device, np.maximum(ran.start_ns, free_ns), ran.start_ns)
    ran = Intervals(start_ns, start_ns + ran.durations_ns)
    at_once = Intervals(start_ns, np.maximum(np.minimum(ran.end_ns, after_ns), start_ns))
    return waited_for(ran, [launches_ns]).with_others(at_once).union()


class TimeUse(msgspec.Struct, frozen=True):
    """How a device spent a span of time, in nanoseconds; the parts add up to it.

    Attributes:
        compute_ns: compute ran, with or without communication.
        exposed_comm_ns: communication was in flight and no compute ran.
        copy_ns: only copies and fills ran.
        host_ns, launch_ns: idle: the next row was not launched yet, or was launched in this gap and had not started.
        other_ns: idle: the next row was launched before the gap, or its launch is unknown.
        exposed_on_host_ns: idle: the host waited for its own communication.
        on_host_ns: host communication was in flight, whatever the device did; not a part of the span.
        num_host_gaps: number of gaps due to the host, whose time is ``host_ns`` and ``launch_ns``.
        short_host_gaps_ns: time of those shorter than ``SHORT_GAP_NS``.
        longest_host_gap_ns: the longest of them.
    """

    span_ns: int = 0
    compute_ns: int = 0
    exposed_comm_ns: int = 0
    copy_ns: int = 0
    host_ns: int = 0
    launch_ns: int = 0
    other_ns: int = 0
    exposed_on_host_ns: int = 0
    on_host_ns: int = 0
    num_host_gaps: int = 0
    short_host_gaps_ns: int = 0
    longest_host_gap_ns: int = 0

    def __add__(self, other: TimeUse) -> TimeUse:
        """Of two spans together."""
        (*mine, my_longest), (*theirs, their_longest) = (msgspec.structs.astuple(part) for part in (self, other))
        return TimeUse(*[*[a + b for a, b in zip(mine, theirs, strict=True)], max(my_longest, their_longest)])

    @property
    def idle_ns(self) -> int:
        """Nothing ran and nothing was in flight."""
        return self.host_ns + self.launch_ns + self.other_ns + self.exposed_on_host_ns


class TimeUses:
    """Finds how one device spent any span of a whole profile; ``launched_ns`` is -1 for unknown launches.

    The host does not hold the device up while it launches into graphs (``captures``), which is other idle time, or
    waits (``waited``) for its own communication (``on_host``).

    Attributes:
        busy: when anything ran.
    """

    def __init__(
        self,
        kernels: KernelTable,
        launched_ns: Indices,
        captures: Intervals | None = None,
        on_host: Intervals | None = None,
        waited: Intervals | None = None,
    ) -> None:
        none = Intervals.empty()
        self._on_host, self._waited = (none if part is None else part.union() for part in (on_host, waited))
        self._excused = (captures or none).with_others(self._waited).union()
        self._compute = kernels.union_of(Kind.COMPUTE)
        self._with_comm = self._compute.with_others(kernels.union_of(Kind.COMMUNICATION)).union()
        self.busy = self._with_comm.with_others(kernels.of(Kind.COPY)).union()
        self._with_waits = self.busy.with_others(self._waited).union() if len(self._waited) else self.busy
        # For each gap, where the row that ends it begins, and where the gap begins.
        self._gap_ends = np.append(self.busy.start_ns, np.iinfo(np.int64).max)
        self._gap_starts = np.concatenate(([np.iinfo(np.int64).min], self.busy.end_ns))
        ran = (kernels.intervals.durations_ns > 0) & (kernels.kind != Kind.OTHER)
        order = np.flatnonzero(ran)
        # Of rows that start together, the first launched counts; without a launch, it was long ago.
        order = order[np.lexsort((launched_ns[order], kernels.intervals.start_ns[order]))]
        self._start_ns, self._launched_ns = kernels.intervals.start_ns[order], launched_ns[order]

    def of_each(self, spans: Sequence[tuple[int, int]]) -> list[TimeUse]:
        """How the device spent each span, of which there may be hundreds; by their starts and ends."""
        starts_ns, ends_ns = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        bounds = Intervals(starts_ns, ends_ns)
        parts = (self._compute, self._with_comm, self.busy, self._with_waits, self._on_host)
        covered_ns = [bounds.covered_ns(part).tolist() for part in parts]
        return [self._use(*span, *parts_ns) for span, *parts_ns in zip(spans, *covered_ns, strict=True)]

    def idle_ns(self, times: Intervals, start_ns: int, end_ns: int) -> Indices:
        """How long nothing ran in each of these times, within a span; shape (n,)."""
        begin_ns = np.minimum(np.maximum(times.start_ns, start_ns), end_ns)
        inside = Intervals(begin_ns, np.maximum(np.minimum(times.end_ns, end_ns), begin_ns))
        return inside.durations_ns - inside.covered_ns(self.busy)

    def _use(
        self,
        start_ns: int,
        end_ns: int,
        compute_ns: int,
        with_comm_ns: int,
        busy_ns: int,
        with_waits_ns: int,
        on_host_ns: int,
    ) -> TimeUse:
        gaps, launched_ns = self._gaps(start_ns, end_ns)
        by_host = launched_ns >= gaps.start_ns
        late = gaps[by_host]
        launched_ns = np.minimum(launched_ns[by_host], late.end_ns)
        length_ns = max(end_ns - start_ns, 0)
        until_launch, after_launch = Intervals(late.start_ns, launched_ns), Intervals(launched_ns, late.end_ns)
        by_host_ns = until_launch.durations_ns - until_launch.covered_ns(self._excused)
        gaps_ns = by_host_ns + after_launch.durations_ns - after_launch.covered_ns(self._waited)
        host_ns, late_ns = int(by_host_ns.sum()), int(gaps_ns.sum())
        return TimeUse(
            span_ns=length_ns,
            compute_ns=compute_ns,
            exposed_comm_ns=with_comm_ns - compute_ns,
            copy_ns=busy_ns - with_comm_ns,
            host_ns=host_ns,
            launch_ns=late_ns - host_ns,
            other_ns=length_ns - with_waits_ns - late_ns,
            exposed_on_host_ns=with_waits_ns - busy_ns,
            on_host_ns=on_host_ns,
            num_host_gaps=len(late),
            short_host_gaps_ns=int(gaps_ns[gaps_ns < SHORT_GAP_NS].sum()),
            longest_host_gap_ns=int(gaps_ns.max(initial=0)),
        )

    def _gaps(self, start_ns: int, end_ns: int) -> tuple[Intervals, Indices]:
        """The gaps of a span that a row ends, and when that row was launched. A gap is cut at the span's edges."""
        first = int(np.searchsorted(self._gap_ends, start_ns, side="right"))
        last = min(int(np.searchsorted(self._gap_starts, end_ns, side="left")), len(self.busy))
        starts, ends = self._gap_starts[first:last], self._gap_ends[first:last]
        gaps = Intervals(np.maximum(starts, start_ns), np.minimum(ends, end_ns))
        rows = np.searchsorted(self._start_ns, ends, side="left")
        return gaps, self._launched_ns[rows]


# -- critical paths


_KINDS = np.array([[Kind.COMPUTE], [Kind.COMMUNICATION], [Kind.COPY]])
_LONG_AGO = np.iinfo(np.int64).min


class PathParts(NamedTuple):
    """The parts of a critical path; they add up to its length."""

    compute_ns: int
    comm_ns: int
    copy_ns: int
    launch_ns: int
    host_ns: int
    other_ns: int
    on_host_ns: int  # the host, while it waits for its own communication


class Path(msgspec.Struct, frozen=True):
    """A critical path, made of pieces without gaps between them.

    Attributes:
        parts: time of each part on the path.
        rows, rows_ns: the rows on the path, latest first, and the time of each on it; shape (n,).
        at_most_ns: the most to gain if all compute, all communication, or the host took no time.
    """

    length_ns: int
    parts: PathParts
    rows: Indices
    rows_ns: Indices
    at_most_ns: tuple[int, int, int]


class LastRows(msgspec.Struct, frozen=True):
    """On each stream, the last row to end before a piece of a profile; the first rows of the piece waited for it."""

    intervals: Intervals
    lane: Indices

    @classmethod
    def none(cls) -> LastRows:
        """Before a whole profile."""
        return cls(Intervals.empty(), np.empty(0, dtype=np.int64))


class CriticalPaths:
    """Finds the critical path of any span of a profile.

    Args:
        kernels: the whole profile, of one device, or a piece of it.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
        waits: when the host waited for the device, ascending by their ends.
        before: the last rows before a piece; no span begins before they end.
        waited: when the host waited for its own communication.
    """

    def __init__(
        self,
        kernels: KernelTable,
        launched_ns: Indices,
        waits: Intervals,
        before: LastRows,
        waited: Intervals | None = None,
    ) -> None:
        self._waited = Intervals.empty() if waited is None else waited.union()
        rows = np.flatnonzero((kernels.intervals.durations_ns > 0) & (kernels.kind != Kind.OTHER))
        start, end = kernels.intervals.start_ns[rows], kernels.intervals.end_ns[rows]
        kind, lane, launched_ns = kernels.kind[rows], kernels.lane[rows], launched_ns[rows]
        unknown = np.full(len(before.lane), -1, dtype=np.int64)
        start, end = np.append(before.intervals.start_ns, start), np.append(before.intervals.end_ns, end)
        kind, lane = np.append(np.full(len(unknown), Kind.OTHER, dtype=kind.dtype), kind), np.append(before.lane, lane)
        rows, launched_ns = np.append(unknown, rows), np.append(unknown, launched_ns)
        # Of rows that end together, the one that started first comes last in this order, and is found.
        order = np.lexsort((rows, -start, end))
        self._rows, self._start_ns, self._end_ns = rows[order], start[order], end[order]
        self._kind, self._lane = kind[order], lane[order]
        self._launched_ns = np.minimum(launched_ns[order], self._start_ns)
        self._before = self._predecessors(self._lane)
        # What held each row up, and when that ended: its launch, or a row on the device.
        before_launch = self._waited_for(waits)
        ended_ns = np.where(self._before >= 0, self._end_ns[self._before], _LONG_AGO)
        self._by_launch = (self._launched_ns >= 0) & (self._launched_ns >= ended_ns)
        launch_ended_ns = np.where(before_launch >= 0, self._end_ns[before_launch], _LONG_AGO)
        self._cause = np.where(self._by_launch, before_launch, self._before)
        self._cause_ended_ns = np.where(self._by_launch, launch_ended_ns, ended_ns)
        # The earliest start of each row and those that end later.
        self._earliest_ns = np.minimum.accumulate(self._start_ns[::-1])[::-1]

    def _predecessors(self, lane: Indices) -> Indices:
        """What each row waited for, as a place in the order of ends; -1 for none; shape (rows,)."""
        before = np.searchsorted(self._end_ns, self._start_ns, side="right") - 1
        for number in distinct_values(lane):
            own = np.flatnonzero(lane == number)
            place = np.searchsorted(self._end_ns[own], self._start_ns[own], side="right") - 1
            found = own[np.maximum(place, 0)]
            gap_ns = self._start_ns[own] - self._end_ns[found]
            # The row before on the own stream counts if it ended just before, or if none ended later.
            ended_last = self._end_ns[found] >= self._end_ns[np.maximum(before[own], 0)]
            counts = (place >= 0) & ((gap_ns <= HAND_OVER_NS) | ended_last)
            before[own[counts]] = found[counts]
        return before

    def _waited_for(self, waits: Intervals) -> Indices:
        """What the host last waited for before it launched each row, as a place in the order of ends; -1 if none."""
        last = np.searchsorted(self._end_ns, waits.end_ns, side="right") - 1
        real = (last >= 0) & (self._end_ns[np.maximum(last, 0)] > waits.start_ns) if len(self._end_ns) else last > 0
        wait = np.searchsorted(waits.end_ns[real], self._launched_ns, side="right") - 1
        return np.append(last[real], -1)[wait]

    def of(self, start_ns: int, end_ns: int) -> Path | None:
        """The path from ``end_ns``, the end of a row, back to ``start_ns``; None if no row ended between."""
        place = int(np.searchsorted(self._end_ns, end_ns, side="right")) - 1
        if place < 0 or int(self._end_ns[place]) <= start_ns:
            return None
        # Rows before this one end before the span begins.
        first = int(np.searchsorted(self._end_ns, start_ns, side="right"))
        parts, rows, rows_ns = self._walk(place, first, start_ns)
        end_ns = int(self._end_ns[place])
        return Path(end_ns - start_ns, parts, rows, rows_ns, self._at_most(first, start_ns, end_ns, parts))

    def _walk(self, place: int, first: int, start_ns: int) -> tuple[PathParts, Indices, Indices]:
        """A path: the time of each part, its rows, and their times on it."""
        part = slice(first, place + 1)
        # The path continues to what held a row up, if that is within the span.
        goes_on = (self._start_ns[part] > start_ns) & (self._cause_ended_ns[part] > start_ns)
        causes = np.where(goes_on, self._cause[part] - first, -1).tolist()
        places, place = [], place - first
        while place >= 0:
            places.append(place)
            place = causes[place]
        path = np.array(places) + first
        starts_ns, launched_ns, ended_ns = (
            np.maximum(times[path], start_ns) for times in (self._start_ns, self._launched_ns, self._cause_ended_ns)
        )
        # Each row counts until the row that it held up began to wait; the last one until its own end.
        until_ns = np.concatenate((self._end_ns[path[:1]], ended_ns[:-1]))
        rows_ns = until_ns - starts_ns
        went_on = starts_ns > start_ns
        # A row that nothing on the device held up may have been launched before the span: then its launch does not
        # count.
        by_launch = self._by_launch[path] & ((self._before[path] >= 0) | (self._launched_ns[path] >= start_ns))
        launched, other = by_launch & went_on, ~by_launch & went_on
        of_kinds = (self._kind[path] == _KINDS) @ rows_ns
        launch_ns, host_ns = launched @ (starts_ns - launched_ns), launched @ (launched_ns - ended_ns)
        on_host_ns = int(Intervals(ended_ns, launched_ns)[launched].covered_ns(self._waited).sum())
        other_ns = other @ (starts_ns - ended_ns)
        compute_ns, comm_ns, copy_ns = of_kinds.tolist()
        host_ns = int(host_ns) - on_host_ns
        parts = PathParts(compute_ns, comm_ns, copy_ns, int(launch_ns), host_ns, int(other_ns), on_host_ns)
        return parts, self._rows[path], rows_ns

    def _at_most(self, first: int, start_ns: int, end_ns: int, parts: PathParts) -> tuple[int, int, int]:
        """The most to gain: each part's time on the path, bounded as the rest has to run on its streams."""
        last = int(np.searchsorted(self._earliest_ns, end_ns, side="left"))
        inside = Intervals(
            np.maximum(self._start_ns[first:last], start_ns),
            np.maximum(np.minimum(self._end_ns[first:last], end_ns), start_ns),
        )
        kind, lane = self._kind[first:last], self._lane[first:last]

        def longest_ns(*kinds: Kind) -> int:
            wanted = np.isin(kind, kinds)
            busy, of_lane = inside[wanted].union_by(lane[wanted])
            return int(np.bincount(of_lane, busy.durations_ns).max(initial=0))

        length_ns = end_ns - start_ns
        busiest_ns = longest_ns(Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY)
        return (
            min(parts.compute_ns, length_ns - longest_ns(Kind.COMMUNICATION, Kind.COPY)),
            min(parts.comm_ns, length_ns - longest_ns(Kind.COMPUTE, Kind.COPY)),
            min(parts.launch_ns + parts.host_ns, length_ns - busiest_ns),
        )


def on_critical_path_ns(kernels: KernelTable, steps: Sequence[int]) -> Indices | None:
    """The time of each row on the critical path of its step, by the profile's index; shape (n,).

    None of a host's profile, or of one without launches. When the host waited for the device is not known.
    """
    if kernels.launched_ns is None or not (kernels.launched_ns >= 0).any():
        return None
    paths = CriticalPaths(kernels, kernels.launched_ns, Intervals.empty(), LastRows.none())
    found = np.zeros(len(kernels), dtype=np.int64)
    for step in steps:
        ran = kernels.intervals[np.flatnonzero((kernels.step == step) & (kernels.intervals.durations_ns > 0))]
        path = paths.of(int(ran.start_ns.min()), int(ran.end_ns.max())) if len(ran.start_ns) else None
        if path is not None:
            found[path.rows] += path.rows_ns
    return found
