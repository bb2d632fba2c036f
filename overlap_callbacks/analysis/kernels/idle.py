"""What a device does with its time: computes, waits for communication, or is idle; and what idle time is due to.

A gap is a time in which no kernel, collective or copy runs. It ends with the row that starts next. If the host launched
that row within the gap, the host held the device up: until the launch, and then for as long as a launch takes. If it
had been launched before, something else did: an event of another stream, or the hand-over from one kernel to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind


class TimeUse(msgspec.Struct, frozen=True):
    """What a device did in a span of time, in nanoseconds. The parts add up to the span.

    Attributes:
        span_ns: length of the span.
        compute_ns: compute ran, beside communication or not.
        exposed_comm_ns: communication was in flight and no compute ran.
        copy_ns: nothing but copies and fills ran.
        host_ns: idle: what runs next had not been launched yet.
        launch_ns: idle: what runs next had been launched in this gap, and had not started yet.
        other_ns: idle: what runs next had been launched before the gap began, or its launch is unknown.
        host_gaps_ns: length of each gap that the host made, i.e. of ``host_ns`` and ``launch_ns``, ascending.
    """

    span_ns: int
    compute_ns: int
    exposed_comm_ns: int
    copy_ns: int
    host_ns: int
    launch_ns: int
    other_ns: int
    host_gaps_ns: Indices

    @classmethod
    def nothing(cls) -> TimeUse:
        """Of no time."""
        return cls(0, 0, 0, 0, 0, 0, 0, np.empty(0, dtype=np.int64))

    def __add__(self, other: TimeUse) -> TimeUse:
        """What the device did in two spans together. The gaps are left out: there may be millions."""
        mine, theirs = (msgspec.structs.astuple(part)[:-1] for part in (self, other))
        sums: list[Any] = [a + b for a, b in zip(mine, theirs, strict=True)]
        return TimeUse(*[*sums, np.empty(0, dtype=np.int64)])

    @property
    def idle_ns(self) -> int:
        """Nothing ran and nothing was in flight."""
        return self.host_ns + self.launch_ns + self.other_ns


class TimeUses:
    """Tells what the device did in any span of a profile.

    Args:
        kernels: the whole profile, of one device.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
    """

    def __init__(self, kernels: KernelTable, launched_ns: Indices) -> None:
        compute, comm, copies = (kernels.of(kind) for kind in (Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY))
        self._compute = compute.union()
        self._with_comm = compute.with_others(comm).union()
        self._busy = compute.with_others(comm, copies).union()
        # Of each gap, where the row begins that ends it, and where it begins itself.
        self._gap_ends = np.append(self._busy.start_ns, np.iinfo(np.int64).max)
        self._gap_starts = np.concatenate(([np.iinfo(np.int64).min], self._busy.end_ns))
        ran = (kernels.intervals.durations_ns > 0) & (kernels.kind != Kind.OTHER)
        order = np.flatnonzero(ran)
        # Of rows that start together, the one launched first counts; one without a launch counts as launched long ago.
        order = order[np.lexsort((launched_ns[order], kernels.intervals.start_ns[order]))]
        self._start_ns, self._launched_ns = kernels.intervals.start_ns[order], launched_ns[order]

    def of(self, start_ns: int, end_ns: int) -> TimeUse:
        """What the device did between two times."""
        return self.of_each([(start_ns, end_ns)])[0]

    def of_each(self, spans: Sequence[tuple[int, int]]) -> list[TimeUse]:
        """What the device did in each of some spans, which may be hundreds: by their starts and ends."""
        starts_ns, ends_ns = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        bounds = Intervals(starts_ns, ends_ns)
        covered_ns = [bounds.covered_ns(part).tolist() for part in (self._compute, self._with_comm, self._busy)]
        return [self._use(*span, *parts_ns) for span, *parts_ns in zip(spans, *covered_ns, strict=True)]

    def _use(self, start_ns: int, end_ns: int, compute_ns: int, with_comm_ns: int, busy_ns: int) -> TimeUse:
        gaps, launched_ns = self._gaps(start_ns, end_ns)
        by_host = launched_ns >= gaps.start_ns
        late = gaps[by_host]
        launched_ns = np.minimum(launched_ns[by_host], late.end_ns)
        length_ns = max(end_ns - start_ns, 0)
        host_ns, late_ns = int((launched_ns - late.start_ns).sum()), late.sum_ns
        return TimeUse(
            span_ns=length_ns,
            compute_ns=compute_ns,
            exposed_comm_ns=with_comm_ns - compute_ns,
            copy_ns=busy_ns - with_comm_ns,
            host_ns=host_ns,
            launch_ns=late_ns - host_ns,
            other_ns=length_ns - busy_ns - late_ns,
            host_gaps_ns=np.sort(late.durations_ns),
        )

    def _gaps(self, start_ns: int, end_ns: int) -> tuple[Intervals, Indices]:
        """The gaps of a span that a row ends, and when that row was launched.

        Where the span begins within a gap, so does its part of the gap. The gap after the last row is ended by none.
        """
        first = int(np.searchsorted(self._gap_ends, start_ns, side="right"))
        last = min(int(np.searchsorted(self._gap_starts, end_ns, side="left")), len(self._busy))
        starts, ends = self._gap_starts[first:last], self._gap_ends[first:last]
        gaps = Intervals(np.maximum(starts, start_ns), np.minimum(ends, end_ns))
        rows = np.searchsorted(self._start_ns, ends, side="left")
        return gaps, self._launched_ns[rows]
