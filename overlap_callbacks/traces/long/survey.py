"""Goes once through the placed kernels of a long trace, for what must be known before their pieces are looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, Kind
from overlap_callbacks.traces.doubts import KernelFacts
from overlap_callbacks.traces.long.columns import Folder, Rows, RowsFile
from overlap_callbacks.traces.long.rows import CHANGE, NUMBER, WAIT, filled
from overlap_callbacks.traces.pieces import Span
from overlap_callbacks.traces.suspects import suspects


@dataclass
class DeviceSurvey:
    """What is known of the kernels of one device.

    Attributes:
        compute_ns: times of its rows that compute.
        changes: launches and starts of its rows.
        last_row: the place of the last row of each step among the device's, -1 of a step without rows; shape (steps,).
        num_rows: number of its rows.
        span, ran: as in ``Outline``.
        communicates, copies: whether any row communicates; whether any is a copy that does if no launch is missing.
        launches_known: whether the launch of any row is known.
    """

    compute_ns: RowsFile
    changes: RowsFile
    last_row: Indices
    num_rows: int = 0
    span: Span | None = None
    ran: Span | None = None
    communicates: bool = False
    copies: bool = False
    launches_known: bool = False

    def add(self, rows: Rows) -> None:
        """Add the next rows of the device."""
        start_ns, end_ns, step = rows["start"], rows["end"], rows["step"].astype(np.int64)
        self.span = _joined(self.span, start_ns, end_ns)
        ran = end_ns > start_ns
        self.ran = _joined(self.ran, start_ns[ran], end_ns[ran])
        places = self.num_rows + np.arange(len(rows))
        np.maximum.at(self.last_row, step[step >= 0], places[step >= 0])
        self.num_rows += len(rows)
        self.communicates |= bool((rows["kind"] == Kind.COMMUNICATION).any())
        self.copies |= bool((rows["copied"] >= 0).any())
        self.compute_ns.append(filled(NUMBER, value=(end_ns - start_ns)[rows["kind"] == Kind.COMPUTE]))
        known = np.flatnonzero(rows["launched"] >= 0)
        self.launches_known |= len(known) > 0
        times_ns = np.concatenate((np.minimum(rows["launched"], start_ns)[known], start_ns[known]))
        change, lane = np.repeat((1, -1), len(known)), np.tile(rows["lane"][known], 2)
        self.changes.append(filled(CHANGE, time=times_ns, change=change, lane=lane))


@dataclass
class Survey:
    """What is known of the kernels of all devices.

    Args:
        folder: takes files.
        num_steps: number of the trace's steps.
        num_names: number of names.
        has_launches: whether the trace holds launches.

    Attributes:
        devices: of each device, by its number.
        pairs: the names of kernels that communicate, each with the number of its kind of collective by metadata.
        copy_names: numbers of the names of copies that communicate if no launch is missing.
        waits: when copies blocked the host.
        waits_of_copies: the same of copies that communicate if no launch is missing.
    """

    folder: Folder
    num_steps: int
    num_names: int
    has_launches: bool
    devices: dict[int, DeviceSurvey] = field(default_factory=dict)
    pairs: set[tuple[int, int]] = field(default_factory=set)
    copy_names: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.waits, self.waits_of_copies = self.folder.file(WAIT), self.folder.file(WAIT)
        self._longest_gap_ns = self._num_placed = 0
        self._last_start_ns: int | None = None
        self._steps: set[int] = set()
        self._missing_in_steps = self._missing = False
        self._compute_ns: dict[tuple[int, int], int] = {}

    @property
    def all_launched(self) -> bool:
        """Whether no launch of a kernel that communicates is missing, of those of steps if there are any."""
        return not (self._missing_in_steps if self._steps - {-1} else self._missing)

    def add(self, rows: Rows) -> None:
        """Add the next rows."""
        self._add_times(rows["start"])
        unlaunched = (rows["launched"] < 0) & self.has_launches
        self._num_placed += int((unlaunched & (rows["step"] >= 0)).sum())
        self._steps.update(distinct_values(rows["step"]).tolist())
        communicates = rows["kind"] == Kind.COMMUNICATION
        missing = communicates & unlaunched
        self._missing |= bool(missing.any())
        self._missing_in_steps |= bool((missing & (rows["step"] >= 0)).any())
        self.pairs |= set(zip(*[rows[name][communicates].tolist() for name in ("name", "metadata")], strict=True))
        self.copy_names.update(rows["name"][rows["copied"] >= 0].tolist())
        self._add_compute(rows[rows["kind"] == Kind.COMPUTE])
        blocking = (rows["kind"] == Kind.COPY) & (rows["launched"] >= 0) & (rows["returned"] >= rows["end"])
        for file, mine in ((self.waits, rows["copied"] < 0), (self.waits_of_copies, rows["copied"] >= 0)):
            waits = rows[blocking & mine]
            file.append(filled(WAIT, start=waits["launched"], end=waits["returned"]))
        for device in distinct_values(rows["device"]).tolist():
            found = self.devices.get(device)
            if found is None:
                last_row = np.full(self.num_steps, -1, dtype=np.int64)
                found = DeviceSurvey(self.folder.file(NUMBER), self.folder.file(CHANGE), last_row)
                self.devices[device] = found
            found.add(rows[rows["device"] == device])

    def facts(self, names: tuple[str, ...], likely: Callable[[], Sequence[str]] | None = None) -> KernelFacts:
        """What must be known to tell what is doubtful about the trace.

        Args:
            names: the names of kernels.
            likely: gives what looks like communication; None to look among the kernels.
        """
        keys = np.array([*self._compute_ns], dtype=np.int64).reshape(-1, 2)
        times_ns = np.array([*self._compute_ns.values()], dtype=np.int64)
        return KernelFacts(
            longest_gap_ns=self._longest_gap_ns,
            num_placed=self._num_placed,
            computing=[names[i] for i in distinct_values(keys[:, 0])],
            steps=frozenset(self._steps),
            communicates=any(
                device.communicates or (device.copies and self.all_launched) for device in self.devices.values()
            ),
            suspects=likely or (lambda: suspects(names, keys[:, 0], keys[:, 1], times_ns)),
        )

    def _add_times(self, start_ns: Indices) -> None:
        if len(start_ns):
            before = start_ns[0] if self._last_start_ns is None else self._last_start_ns
            gaps_ns = np.diff(start_ns, prepend=before)
            self._longest_gap_ns = max(self._longest_gap_ns, int(gaps_ns.max()))
            self._last_start_ns = int(start_ns[-1])

    def _add_compute(self, rows: Rows) -> None:
        """Add the times of kernels that compute, by name and stream."""
        key = rows["name"].astype(np.int64) + self.num_names * rows["lane"].astype(np.int64)
        found, place = np.unique(key, return_inverse=True)
        times_ns = np.bincount(place.reshape(-1), weights=rows["end"] - rows["start"], minlength=len(found))
        for number, time_ns in zip(found.tolist(), times_ns.tolist(), strict=True):
            lane, name = divmod(number, self.num_names)
            self._compute_ns[name, lane] = self._compute_ns.get((name, lane), 0) + int(time_ns)


def _joined(span: Span | None, start_ns: Indices, end_ns: Indices) -> Span | None:
    if not len(start_ns):
        return span
    found = Span(int(start_ns.min()), int(end_ns.max()))
    return found if span is None else Span(min(span.start_ns, found.start_ns), max(span.end_ns, found.end_ns))
