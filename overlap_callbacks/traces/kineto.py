"""From the events of a Kineto trace to the same columns of kernels that a live profile gives.

A file with kernels of a device is read for those, their launches and torch's annotations; a file without is read again
for the operators of the host, by the rules of a CPU job.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import (
    Indices,
    KernelTable,
    KernelTableBuilder,
    Kind,
    device_kernels,
    host_kernels,
)
from overlap_callbacks.traces.files import Progress
from overlap_callbacks.traces.metadata import CollectiveInfo, KernelMetadata, annotated, with_groups
from overlap_callbacks.traces.stream import Args, Event, EventStream, ExactEvent

# Kineto's categories, of today and of 2021.
_KERNEL, _COPY, _LAUNCH, _NOTE, _OPERATOR = range(5)
_CATEGORIES = {
    "kernel": _KERNEL, "Kernel": _KERNEL,
    "gpu_memcpy": _COPY, "gpu_memset": _COPY, "Memcpy": _COPY, "Memset": _COPY,
    "cuda_runtime": _LAUNCH, "cuda_driver": _LAUNCH, "hip_runtime": _LAUNCH, "Runtime": _LAUNCH,
    "user_annotation": _NOTE,
    "cpu_op": _OPERATOR, "Operator": _OPERATOR,
}  # fmt: skip

_STEP = re.compile(r"ProfilerStep#(\d{1,18})(?!\d)")
# What a collective may be called that no pattern knows.
_NEAR = re.compile(r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|[nr]ccl|shmem")
# Beyond these a time cannot be of any clock, nor a duration, and their differences would overflow.
_EARLIEST_NS, _LATEST_NS, _LONGEST_NS = -(2**61), 2**62, 2**61
# From here on neighbours of floating point lie too far apart for whole nanoseconds to be told.
_EXACT_US = 2**43
_UINT64 = 2**64 - 1
_NO_ARGS = Args()
# A silence of this length between kernels is no training: a clock that jumped, or files joined.
_JUMP_NS = 10 * 60 * 10**9


@dataclass(frozen=True)
class TraceStep:
    """A ``ProfilerStep#`` range of the host.

    Attributes:
        number: after the ``#``.
        start_ns, end_ns: its bounds.
    """

    number: int
    start_ns: int
    end_ns: int

    @property
    def wall_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass(frozen=True)
class Trace:
    """One trace file.

    Attributes:
        path: the file.
        kernels: its kernels in columns; ``step`` is an index into ``steps``.
        device: number of the device of each row; shape (n,).
        steps: its steps, ascending; none where the file holds none, and is one step as a whole.
        collectives: what is known of each communication kernel, by row of ``kernels``.
        on_host: a trace without kernels of a device, read by the rules of a CPU job.
        rank, world_size: of the job, where the file tells.
        device_names: of the devices that the file lists, by number.
        problems: what is wrong or doubtful, in words.
    """

    path: Path
    kernels: KernelTable
    device: Indices
    steps: tuple[TraceStep, ...]
    collectives: dict[int, CollectiveInfo]
    on_host: bool
    rank: int | None
    world_size: int | None
    device_names: dict[int, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that ran kernels."""
        return tuple(np.unique(self.device).tolist())

    def by_device(self) -> dict[int, Trace]:
        """The same trace with the kernels of each device alone: what runs on another is beside nothing."""
        devices = self.devices
        if len(devices) < 2:
            return {device: self for device in devices}
        order = np.argsort(self.device, kind="stable")
        bounds = np.searchsorted(self.device[order], [*devices, devices[-1] + 1]).tolist()
        rows = {device: order[first:last] for device, first, last in zip(devices, bounds, bounds[1:], strict=False)}
        place = np.empty(len(order), dtype=np.int64)
        for some in rows.values():
            place[some] = np.arange(len(some))
        infos: dict[int, dict[int, CollectiveInfo]] = {device: {} for device in devices}
        for row, info in self.collectives.items():
            infos[int(self.device[row])][int(place[row])] = info
        return {
            device: dataclasses.replace(
                self, kernels=self.kernels[some], device=self.device[some], collectives=infos[device]
            )
            for device, some in rows.items()
        }


def read_trace(path: str | Path, progress: Progress | None = None) -> Trace:
    """Read a trace of ``torch.profiler``: ``.json``, gzipped or not, of any version.

    Memory is bounded by the kernels of the file, not by its size.

    Args:
        path: the file.
        progress: called with the bytes of the file read so far, and all that it has; from the start again where the
            file is read once more (for a trace of the CPU, say).

    Raises:
        TraceError: the file cannot be read, is empty, or is no trace.
    """
    reader = _Reader(Path(path), progress)
    reader.read(_DeviceEvents())
    if not len(reader.found.rows):
        reader.read(_HostEvents())
    return reader.trace()


class _Times:
    """Starts and durations as they come, and what they are in whole nanoseconds.

    Numbers of floating point hold a microsecond with its nanoseconds exactly enough only up to 2**43 us; files with
    greater ones are read again, as text.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._start: array[Any] = array("q" if exact else "d")
        self._duration: array[Any] = array("q" if exact else "d")
        self.unread = 0

    def add(self, event: Event) -> bool:
        """Keep an event's times; False, and counted, where it has none."""
        try:
            if not self._exact:
                self._start.append(event.ts)
                try:
                    self._duration.append(event.dur)
                except TypeError:
                    self._start.pop()
                    raise
                return True
        except (TypeError, OverflowError):
            pass
        start, duration = _nanoseconds(event.ts), _nanoseconds(event.dur)
        if start is None or duration is None:
            self.unread += 1
            return False
        self._start.append(start if self._exact else start / 1000)
        self._duration.append(duration if self._exact else duration / 1000)
        return True

    @property
    def inexact(self) -> bool:
        """Whether nanoseconds were lost."""
        start = np.frombuffer(self._start, dtype=np.float64) if not self._exact else np.empty(0)
        return bool(((np.abs(start) >= _EXACT_US) & (start != np.floor(start))).any())

    def bounds(self) -> tuple[Indices, Indices, npt.NDArray[np.bool_], int]:
        """Start and end of each, which of them are no times at all, and how many durations were negative."""
        if self._exact:
            start, duration = (np.array(times, dtype=np.int64) for times in (self._start, self._duration))
            wrong = np.abs(duration) >= _LONGEST_NS
        else:
            microseconds = [np.array(times, dtype=np.float64) for times in (self._start, self._duration)]
            start_us, duration_us = microseconds
            # (NaN fails every comparison.)
            right = (start_us > _EARLIEST_NS / 1000) & (start_us < _LATEST_NS / 1000)
            wrong = ~(right & (np.abs(duration_us) < _LONGEST_NS / 1000))
            start, duration = (_from_microseconds(np.where(wrong, 0.0, times)) for times in microseconds)
        negative = duration < 0
        return start, start + np.where(negative, 0, duration), wrong, int(negative.sum())


def _from_microseconds(times: npt.NDArray[np.float64]) -> Indices:
    whole = np.floor(times)
    return whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)


class _Note(NamedTuple):
    """A range of the host that tells of what it launched: a step, or a collective of torch's (``nccl:...``)."""

    name: str
    thread: int | str
    start_ns: int
    end_ns: int
    args: Args | None


class _Sieve:
    """Takes the events that it wants, a piece of the file at a time."""

    def __init__(self) -> None:
        self.rows = KernelTableBuilder()
        self.notes: list[_Note] = []

    def begin(self, exact: bool) -> None:
        self.times = _Times(exact)

    def take(self, events: list[Event]) -> None:
        raise NotImplementedError

    def note(self, event: Event, name: str) -> None:
        start, duration = _nanoseconds(event.ts), _nanoseconds(event.dur)
        if start is not None and duration is not None:
            self.notes.append(_Note(name, _hashable(event.tid), start, start + max(duration, 0), event.args))

    @property
    def inexact(self) -> bool:
        return self.times.inexact

    @property
    def unread(self) -> int:
        return self.times.unread


class _DeviceEvents(_Sieve):
    def __init__(self) -> None:
        super().__init__()
        self.devices = array("q")
        self.known: dict[int, CollectiveInfo] = {}
        self.launch_correlation = array("Q")
        self.launch_thread: list[Any] = []
        self._metadata = KernelMetadata()
        self._shapes: dict[tuple[bytes, bytes], str] = {}

    def begin(self, exact: bool) -> None:
        super().begin(exact)
        self.launch_times = _Times(exact)

    def take(self, events: list[Event]) -> None:
        category_of = _CATEGORIES.get
        launched, launch = self.launch_times.add, self.launch_correlation.append
        for event in events:
            category = category_of(event.cat)  # type: ignore[arg-type]
            if category is None or event.ph != "X":
                continue
            if category == _OPERATOR:  # the most, and of no use here
                continue
            if category == _LAUNCH:
                args = event.args
                number = args.correlation if args is not None else None
                if type(number) is int and number and launched(event):
                    launch(number & _UINT64)
                    self.launch_thread.append(event.tid)
            elif category == _NOTE:
                name = event.name
                if name is not None and name.startswith(("ProfilerStep#", "nccl:")):
                    self.note(event, name)
            else:
                self._kernel(event, category)

    def _kernel(self, event: Event, category: int) -> None:
        if not self.times.add(event):
            return
        args = event.args or _NO_ARGS
        collective = ""
        if args.collective is not None:
            info = self.known[len(self.rows)] = self._metadata.read(args)
            collective = info.kind
        launched_as = bytes(args.grid), bytes(args.block)
        shape = self._shapes.get(launched_as)
        if shape is None:
            text = name_rules.clean(b" ".join(launched_as).decode(errors="replace").strip())
            shape = self._shapes[launched_as] = text
        device = args.device
        if type(device) is not int:
            device = event.pid if type(event.pid) is int else 0
        self.devices.append(device if 0 <= device < 2**31 else 0)
        number = args.correlation if type(args.correlation) is int else 0
        kind = Kind.COMPUTE if category == _KERNEL else Kind.COPY
        self.rows.label(kind, _short(event.name), number, shape, collective)


class _HostEvents(_Sieve):
    def __init__(self) -> None:
        super().__init__()
        self.threads: list[Any] = []
        self.ranges = KernelTableBuilder()
        self.enqueued = 0  # collectives of NCCL, of which the host sees no more than that it enqueued them

    def begin(self, exact: bool) -> None:
        super().begin(exact)
        self.range_times = _Times(exact)

    def take(self, events: list[Event]) -> None:
        for event in events:
            category, name = _CATEGORIES.get(event.cat), event.name  # type: ignore[arg-type]
            if category not in (_NOTE, _OPERATOR) or event.ph != "X" or name is None:
                continue
            if name.startswith("ProfilerStep#"):
                self.note(event, name)
            elif category == _OPERATOR:
                if self.times.add(event):
                    self.rows.label(Kind.COMPUTE, _short(name))
                    self.threads.append(_hashable(event.tid))
            elif name.startswith("nccl:"):
                self.enqueued += 1
            elif name_rules.is_communication(name) and self.range_times.add(event):
                self.ranges.label(Kind.COMMUNICATION, _short(name))

    @property
    def inexact(self) -> bool:
        return super().inexact or self.range_times.inexact


class _Reader:
    def __init__(self, path: Path, progress: Progress | None) -> None:
        self.path = path
        self.progress = progress
        self.found: _Sieve = _DeviceEvents()
        self.stream = EventStream(path)

    def read(self, sieve: _Sieve) -> None:
        """Fill a sieve from the file; from its exact text, where numbers do not hold all of it."""
        for event in (Event, ExactEvent):
            self.found = type(sieve)()
            self.found.begin(exact=event is ExactEvent)
            self.stream = EventStream(self.path, event, progress=self.progress)
            for events in self.stream:
                self.found.take(events)
            if not self.found.inexact:
                return

    def trace(self) -> Trace:
        sieve, head = self.found, self.stream.head
        problems = list(self.stream.problems)
        steps = _steps(sieve.notes)
        bounds = _disjoint([(step.start_ns, step.end_ns) for step in steps])
        collectives: dict[int, CollectiveInfo] = {}
        if isinstance(sieve, _DeviceEvents):
            kernels, device, collectives = self._of_device(sieve, bounds, problems)
        else:
            assert isinstance(sieve, _HostEvents)
            kernels = self._of_host(sieve, bounds, problems)
            device = np.zeros(len(kernels), dtype=np.int64)
        problems += _doubts(kernels, steps)
        collectives = with_groups(collectives, head.get("distributedInfo"))
        rank, world_size = _job(head, problems)
        return Trace(
            path=self.path,
            kernels=kernels,
            device=device,
            steps=steps,
            collectives=collectives,
            on_host=isinstance(sieve, _HostEvents),
            rank=rank,
            world_size=world_size,
            device_names=_device_names(head),
            problems=tuple(problems),
        )

    def _of_device(
        self, sieve: _DeviceEvents, bounds: list[tuple[int, int]], problems: list[str]
    ) -> tuple[KernelTable, Indices, dict[int, CollectiveInfo]]:
        rows = sieve.rows
        rows.clean_names()
        usable = _set_times(rows, sieve.times, problems)
        _believe_metadata(rows, sieve.known)
        launched, threads = _launches(sieve)
        ranges = [note for note in sieve.notes if note.name.startswith("nccl:")]
        collectives = annotated(rows, sieve.known, launched, threads, ranges)
        for row, info in collectives.items():
            rows.collective[row] = rows.collectives[info.kind]
        kernels = device_kernels(rows, launched if len(sieve.launch_correlation) else None, bounds)
        device = np.array(sieve.devices, dtype=np.int64)
        if usable.all():
            return kernels, device, collectives
        kept = np.flatnonzero(usable)
        place = {int(row): i for i, row in enumerate(kept)}
        return kernels[kept], device[kept], {place[row]: info for row, info in collectives.items() if row in place}

    def _of_host(self, sieve: _HostEvents, bounds: list[tuple[int, int]], problems: list[str]) -> KernelTable:
        """The operators of the training thread: the one that has the steps, else the one with the most operators."""
        threads = Counter(note.thread for note in sieve.notes) or Counter(sieve.threads)
        training = threads.most_common(1)[0][0] if threads else None
        for rows, times in ((sieve.rows, sieve.times), (sieve.ranges, sieve.range_times)):
            rows.clean_names()
            _set_times(rows, times, problems)  # what has no time has no length, and falls away
        host = KernelTableBuilder()
        host.names = sieve.rows.names
        mine = np.array([thread == training for thread in sieve.threads], dtype=bool)
        for name in ("start", "end", "name", "kind", "correlation", "shape", "collective"):
            column = getattr(sieve.rows, name)
            if len(mine):
                setattr(host, name, array(column.typecode, np.array(column)[mine].tobytes()))
        if not len(host) and not len(sieve.ranges):
            problems.append("the file holds neither kernels nor operators")
        else:
            problems.append("no kernels of a device: operators of the training thread count as compute")
        if sieve.enqueued:
            problems.append("NCCL's collectives run on a device, of which the file holds no kernels: they are left out")
        crossing = _crossing(host.intervals)
        if crossing:
            problems.append(f"{crossing} operators of the training thread overlap without nesting: their self time is "
                            "not sure")  # fmt: skip
        return host_kernels(host, sieve.ranges, bounds)


def _crossing(calls: Intervals) -> int:
    """How many calls of one thread reach beyond the end of one in which they began."""
    order = np.lexsort((-calls.end_ns, calls.start_ns))
    start, end = calls.start_ns[order], calls.end_ns[order]
    latest = np.maximum.accumulate(end)[:-1]
    return int(((start[1:] < latest) & (end[1:] > latest)).sum())


def _believe_metadata(rows: KernelTableBuilder, known: dict[int, CollectiveInfo]) -> None:
    """Take kernels with metadata of a collective, and a name that says nothing, for communication.

    Not all: what a collective launches to copy its tensors has the metadata too, and a name that tells.
    """
    texts = rows.names.texts
    told = {rows.name[row] for row in known}
    nameless = {code for code in told if name_rules.family_of(texts[code]) == name_rules.OTHER}
    for row in known:
        if rows.kind[row] == Kind.COMPUTE and rows.name[row] in nameless:
            rows.kind[row] = Kind.COMMUNICATION


def _set_times(rows: KernelTableBuilder, times: _Times, problems: list[str]) -> npt.NDArray[np.bool_]:
    """Give rows their times; which of the rows have one."""
    start, end, wrong, negative = times.bounds()
    rows.start, rows.end = array("q", start.tobytes()), array("q", end.tobytes())
    if negative:
        problems.append(f"{negative} events have negative durations, and count as of no length")
    if times.unread + int(wrong.sum()):
        problems.append(f"{times.unread + int(wrong.sum())} events have no time that can be read, and are left out")
    return ~wrong


def _steps(notes: list[_Note]) -> tuple[TraceStep, ...]:
    """The steps, ascending in time; of several ranges of one number the first counts."""
    steps: dict[int, TraceStep] = {}
    for note in notes:
        found = _STEP.match(note.name)
        if found:
            number = int(found.group(1))
            steps.setdefault(number, TraceStep(number, note.start_ns, note.end_ns))
    return tuple(sorted(steps.values(), key=lambda step: step.start_ns))


def _doubts(kernels: KernelTable, steps: tuple[TraceStep, ...]) -> Iterator[str]:
    start = np.sort(kernels.intervals.start_ns)
    if len(start) > 1 and int(np.diff(start).max()) > _JUMP_NS:
        longest = int(np.diff(start).max()) / 1e9
        yield f"kernels lie {longest:.0f} s apart: the clock may have jumped, or files were joined"
    near = [
        kernels.names[i]
        for i in np.unique(kernels.name[kernels.kind == Kind.COMPUTE])
        if _NEAR.search(kernels.names[i])
    ]
    if near:
        yield f"{len(near)} kernels count as compute though their names sound like communication: {near[0][:80]}"
    if any(after.start_ns < before.end_ns for before, after in itertools.pairwise(steps)):
        yield "some steps overlap: each ends where the next begins"


def _nanoseconds(time: Any) -> int | None:
    """A number of microseconds, or its text as it stands in the file, exactly, in whole nanoseconds."""
    if isinstance(time, bool) or time is None:
        return None
    if isinstance(time, msgspec.Raw):
        time = bytes(time).decode(errors="replace")
    try:
        value = time * 1000 if isinstance(time, int) else round(Decimal(str(time).strip('" ')) * 1000)
    except (ValueError, InvalidOperation, OverflowError):
        return None
    return value if _EARLIEST_NS < value < _LATEST_NS else None


def _short(name: str | None) -> str:
    """A name that is fit to be kept by the million; what else is wrong with it is mended later, once for each."""
    if name is None:
        return ""
    return name if len(name) <= name_rules.LONGEST_NAME else name_rules.clean(name)


def _hashable(value: Any) -> int | str:
    return value if isinstance(value, (int, str)) else str(value)


def _launches(sieve: _DeviceEvents) -> tuple[Indices, Callable[[int], Any]]:
    """When each kernel was launched, -1 where the file does not tell; and on which thread, by row."""
    wanted = np.array(sieve.rows.correlation, dtype=np.uint64)
    found = np.full(len(wanted), -1, dtype=np.int64)
    launch = np.zeros(len(wanted), dtype=np.int64)
    if len(sieve.launch_correlation):
        correlation = np.array(sieve.launch_correlation, dtype=np.uint64)
        times, _, wrong, _ = sieve.launch_times.bounds()
        order = np.argsort(correlation, kind="stable")
        place = np.minimum(np.searchsorted(correlation[order], wanted), len(order) - 1)
        launch = order[place]
        known = (correlation[launch] == wanted) & (wanted != 0) & ~wrong[launch]
        found[known] = times[launch[known]]

    def thread(row: int) -> Any:
        return sieve.launch_thread[launch[row]] if found[row] >= 0 else None

    return found, thread


def _disjoint(bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Steps in ascending order, none of which reaches into the next."""
    nexts = [start for start, _ in bounds[1:]]
    return [(start, min(end, after)) for (start, end), after in zip(bounds, [*nexts, _LATEST_NS], strict=False)]


def _job(head: dict[str, Any], problems: list[str]) -> tuple[int | None, int | None]:
    info = head.get("distributedInfo")
    if info is None:
        return None, None
    rank, world_size = (info.get(key) if isinstance(info, dict) else None for key in ("rank", "world_size"))
    if type(rank) is not int or type(world_size) is not int:  # true is an int too
        problems.append("the file's distributedInfo cannot be read: its rank is not known")
        return None, None
    return rank, world_size


def _device_names(head: dict[str, Any]) -> dict[int, str]:
    devices = head.get("deviceProperties")
    found = {}
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and isinstance(device.get("id"), int):
            found[device["id"]] = name_rules.clean(str(device.get("name", "")))
    return found
