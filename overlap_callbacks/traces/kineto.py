"""From the events of a Kineto trace to the same columns of kernels that a live profile gives.

A file with kernels of a device is read for those, their launches and torch's annotations; a file without is read again
for the operators of the host, by the rules of a CPU job.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks import names
from overlap_callbacks.kernels import Indices, Kernels, Kind, Rows, device_kernels, host_kernels
from overlap_callbacks.traces.metadata import CollectiveInfo, annotated, of_kernel
from overlap_callbacks.traces.stream import Args, Event, EventStream

# Kineto's categories, of today and of 2021.
_KERNEL = frozenset({"kernel", "Kernel"})
_COPY = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
_LAUNCH = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime"})
_NOTE = frozenset({"user_annotation", "Operator", "cpu_op"})
_OPERATOR = frozenset({"cpu_op", "Operator"})

_STEP = re.compile(r"ProfilerStep#(\d+)")
# Beyond this a time cannot be of any clock, and sums of it would overflow.
_LATEST_NS = 2**62
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
    kernels: Kernels
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

    def on(self, device: int) -> Trace:
        """The same trace with the kernels of one device: what runs on another is beside nothing."""
        rows = np.flatnonzero(self.device == device)
        if len(rows) == len(self.device):
            return self
        place = {int(row): i for i, row in enumerate(rows)}
        return Trace(
            self.path, self.kernels[rows], self.device[rows], self.steps,
            {place[row]: info for row, info in self.collectives.items() if row in place},
            self.on_host, self.rank, self.world_size, self.device_names, self.problems,
        )  # fmt: skip


def read_trace(path: str | Path) -> Trace:
    """Read a trace of ``torch.profiler``: ``.json``, gzipped or not, of any version.

    Memory is bounded by the kernels of the file, not by its size.

    Raises:
        TraceError: the file cannot be read, is empty, or is no trace.
    """
    reader = _Reader(Path(path))
    reader.read(_DeviceEvents())
    if not isinstance(reader.found, _DeviceEvents) or not len(reader.found.rows):
        reader.read(_HostEvents())
    return reader.trace()


class _Sieve:
    """Takes the events that it wants; ``take`` gets each whole event with its times."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.steps: dict[int, tuple[int, int]] = {}
        self.notes: list[tuple[str, Any, int, int, Args | None]] = []  # nccl:... ranges: name, thread, bounds

    def take(self, event: Event, read_ns: Callable[[Event], tuple[int, int] | None]) -> None:
        raise NotImplementedError

    def note(self, event: Event, bounds: tuple[int, int]) -> None:
        found = _STEP.match(event.name)
        if found:
            number = int(found.group(1))
            if number not in self.steps:
                self.steps[number] = bounds
        elif event.name.startswith("nccl:"):
            self.notes.append((event.name[5:], event.tid, *bounds, event.args))


class _DeviceEvents(_Sieve):
    def __init__(self) -> None:
        super().__init__()
        self.devices = array("q")
        self.known: dict[int, CollectiveInfo] = {}
        self.launch_correlation, self.launch_ns = array("Q"), array("q")
        self.launch_thread: list[Any] = []
        self._shapes: dict[bytes, str] = {}

    def take(self, event: Event, read_ns: Callable[[Event], tuple[int, int] | None]) -> None:
        category = event.cat
        if category in _KERNEL:
            self._kernel(event, Kind.COMPUTE, read_ns)
        elif category in _COPY:
            self._kernel(event, Kind.COPY, read_ns)
        elif category in _LAUNCH:
            correlation = _correlation(event.args)
            if correlation and (bounds := read_ns(event)) is not None:
                self.launch_correlation.append(correlation)
                self.launch_ns.append(bounds[0])
                self.launch_thread.append(event.tid)
        elif (
            category in _NOTE
            and isinstance(event.name, str)
            and event.name.startswith(("ProfilerStep#", "nccl:"))
            and (bounds := read_ns(event)) is not None
        ):
            self.note(event, bounds)

    def _kernel(self, event: Event, kind: Kind, read_ns: Callable[[Event], tuple[int, int] | None]) -> None:
        bounds = read_ns(event)
        if bounds is None:
            return
        args = event.args or Args()
        if args.collective is not None:
            info = of_kernel(args)
            self.known[len(self.rows)] = info
            collective = info.kind
        else:
            collective = ""
        grid = bytes(args.grid) + b" " + bytes(args.block)
        shape = self._shapes.get(grid)
        if shape is None:
            shape = self._shapes[grid] = grid.decode(errors="replace").strip()
        device = args.device if isinstance(args.device, int) else event.pid
        self.devices.append(device if isinstance(device, int) and 0 <= device < 2**31 else 0)
        self.rows.add(*bounds, kind, str(event.name), _correlation(args), shape, collective)


class _HostEvents(_Sieve):
    def __init__(self) -> None:
        super().__init__()
        self.threads: list[Any] = []
        self.ranges = Rows()
        self.step_threads: Counter[Any] = Counter()

    def take(self, event: Event, read_ns: Callable[[Event], tuple[int, int] | None]) -> None:
        name = event.name
        if event.cat not in _NOTE or not isinstance(name, str) or (bounds := read_ns(event)) is None:
            return
        if name.startswith("ProfilerStep#"):
            self.step_threads[_hashable(event.tid)] += 1
            self.note(event, bounds)
        elif event.cat in _OPERATOR:
            self.rows.add(*bounds, Kind.COMPUTE, name)
            self.threads.append(_hashable(event.tid))
        elif names.is_communication(name):
            self.ranges.add(*bounds, Kind.COMMUNICATION, name)


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: _Sieve = _DeviceEvents()
        self.stream = EventStream(path)
        self._names: dict[str, str] = {}
        self._negative = self._no_time = 0

    def read(self, sieve: _Sieve) -> None:
        self.found = sieve
        self.stream = EventStream(self.path)
        self._negative = self._no_time = 0
        take, read_ns = sieve.take, self._bounds
        for events in self.stream:
            for event in events:
                if event.ph == "X":
                    take(event, read_ns)

    def _bounds(self, event: Event) -> tuple[int, int] | None:
        """Start and end in nanoseconds; None, and counted, where the event has no time."""
        start, duration = _nanoseconds(event.ts), _nanoseconds(event.dur)
        if start is None or duration is None:
            self._no_time += 1
            return None
        if duration < 0:
            self._negative += 1
            duration = 0
        return start, start + duration

    def trace(self) -> Trace:
        sieve, head = self.found, self.stream.head
        numbers = sorted(sieve.steps, key=lambda number: sieve.steps[number])
        steps = tuple(TraceStep(number, *sieve.steps[number]) for number in numbers)
        problems = [*self.stream.problems, *self._doubts(sieve, steps)]
        bounds = _disjoint([(step.start_ns, step.end_ns) for step in steps])
        collectives: dict[int, CollectiveInfo] = {}
        if isinstance(sieve, _DeviceEvents):
            launched, threads = _launches(sieve)
            collectives = annotated(sieve.rows, sieve.known, launched, threads, sieve.notes)
            for row, info in collectives.items():
                sieve.rows.collectives[row] = info.kind
            sieve.rows.names = [self._clean(name) for name in sieve.rows.names]
            kernels = device_kernels(sieve.rows, launched if len(sieve.launch_ns) else None, bounds)
            device = np.frombuffer(sieve.devices, dtype=np.int64).copy() if len(sieve.rows) else np.empty(0, np.int64)
        else:
            assert isinstance(sieve, _HostEvents)
            kernels = self._of_host(sieve, bounds, problems)
            device = np.zeros(len(kernels), dtype=np.int64)
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

    def _of_host(self, sieve: _HostEvents, bounds: list[tuple[int, int]], problems: list[str]) -> Kernels:
        """The operators of the training thread: the one that has the steps, else the one with the most operators."""
        threads = sieve.step_threads or Counter(sieve.threads)
        training = threads.most_common(1)[0][0] if threads else None
        host = Rows()
        rows = sieve.rows
        for start, end, name, thread in zip(rows.start, rows.end, rows.names, sieve.threads, strict=True):
            if thread == training:
                host.add(start, end, Kind.COMPUTE, self._clean(name))
        if not len(host) and not len(sieve.ranges):
            problems.append("the file holds neither kernels nor operators")
        else:
            problems.append("no kernels of a device: operators of the training thread count as compute")
        return host_kernels(host, sieve.ranges, bounds)

    def _clean(self, name: str) -> str:
        found = self._names.get(name)
        if found is None:
            found = self._names[name] = names.clean(name)
        return found

    def _doubts(self, sieve: _Sieve, steps: tuple[TraceStep, ...]) -> Iterator[str]:
        if self._negative:
            yield f"{self._negative} events have negative durations, and count as of no length"
        if self._no_time:
            yield f"{self._no_time} events have no time that can be read, and are left out"
        start = np.sort(np.array(sieve.rows.start, dtype=np.int64))
        if len(start) > 1 and int(np.diff(start).max()) > _JUMP_NS:
            longest = int(np.diff(start).max()) / 1e9
            yield f"kernels lie {longest:.0f} s apart: the clock may have jumped, or files were joined"
        if any(after.start_ns < before.end_ns for before, after in itertools.pairwise(steps)):
            yield "some steps overlap: each ends where the next begins"


def _nanoseconds(text: Any) -> int | None:
    """A number of microseconds as it stands in the file, exactly, in whole nanoseconds."""
    digits = bytes(text)
    whole, point, fraction = digits.partition(b".")
    try:
        if not point:
            value = int(whole) * 1000
        elif len(fraction) <= 3:
            value = int(whole + fraction.ljust(3, b"0"))
        else:
            value = round(Decimal(digits.decode()) * 1000)
    except (ValueError, InvalidOperation, OverflowError):
        try:
            value = round(Decimal(digits.decode().strip('" ')) * 1000)
        except (ValueError, InvalidOperation, OverflowError, UnicodeDecodeError):
            return None
    return value if -_LATEST_NS < value < _LATEST_NS else None


def _correlation(args: Args | None) -> int:
    number = args.correlation if args is not None else None
    return number & 0xFFFF_FFFF_FFFF_FFFF if isinstance(number, int) else 0


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else str(value)


def _launches(sieve: _DeviceEvents) -> tuple[Indices, list[Any]]:
    """When and on which thread each kernel was launched; -1 and None where the file does not tell."""
    wanted = np.array(sieve.rows.correlation, dtype=np.uint64)
    found = np.full(len(wanted), -1, dtype=np.int64)
    threads: list[Any] = [None] * len(wanted)
    if not len(sieve.launch_ns):
        return found, threads
    correlation = np.frombuffer(sieve.launch_correlation, dtype=np.uint64)
    times: npt.NDArray[np.int64] = np.frombuffer(sieve.launch_ns, dtype=np.int64)
    order = np.argsort(correlation, kind="stable")
    place = np.minimum(np.searchsorted(correlation[order], wanted), len(order) - 1)
    launch = order[place]
    known = (correlation[launch] == wanted) & (wanted != 0)
    found[known] = times[launch[known]]
    for row in np.flatnonzero(known).tolist():
        threads[row] = sieve.launch_thread[launch[row]]
    return found, threads


def _disjoint(bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Steps in ascending order, none of which reaches into the next."""
    nexts = [start for start, _ in bounds[1:]]
    return [(start, min(end, after)) for (start, end), after in zip(bounds, [*nexts, _LATEST_NS], strict=False)]


def _job(head: dict[str, Any], problems: list[str]) -> tuple[int | None, int | None]:
    info = head.get("distributedInfo")
    if info is None:
        return None, None
    rank, world_size = (info.get(key) if isinstance(info, dict) else None for key in ("rank", "world_size"))
    if not isinstance(rank, int) or not isinstance(world_size, int):
        problems.append("the file's distributedInfo cannot be read: its rank is not known")
        return None, None
    return rank, world_size


def _device_names(head: dict[str, Any]) -> dict[int, str]:
    devices = head.get("deviceProperties")
    found = {}
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and isinstance(device.get("id"), int):
            found[device["id"]] = names.clean(str(device.get("name", "")))
    return found
