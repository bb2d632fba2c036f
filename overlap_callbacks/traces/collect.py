"""Collects from the events of a trace file what is needed of them: kernels, launches, steps, operators.

A file with kernels of a device is read for those, their launches and torch's annotations (``DeviceEvents``). A file
without is read for the operators and ranges of the host (``HostEvents``).

Files have millions of events. So the events of a piece of a file are sorted by category first, and then each property
is taken of all events of a category at once. Only what is rare is looked at event by event.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.kernels.table import KernelTableBuilder, Kind
from overlap_callbacks.traces.collective_ranges import CollectiveRanges, RangeDetail
from overlap_callbacks.traces.collectives import UNKNOWN
from overlap_callbacks.traces.events import Args, Event, KernelArgs, LaunchArgs, OddKernelArgs, RangeArgs
from overlap_callbacks.traces.host_ranges import MODULE, HostRanges
from overlap_callbacks.traces.launch_args import launch_shape, launched_as
from overlap_callbacks.traces.launches import WAITING_CALLS
from overlap_callbacks.traces.metadata import KernelMetadata, input_bytes
from overlap_callbacks.traces.times import EventTimes, nanoseconds

# Kineto's categories, of today and of 2021. Then, ranges were operators too.
_ROW, _LAUNCH, _NOTE, _OPERATOR, _OLD_RANGE, _PYTHON, _FOREIGN, _BESIDE, _UNKNOWN = range(9)
_KERNELS = frozenset({"kernel", "Kernel"})
_CATEGORIES: dict[str | None, int] = {
    **dict.fromkeys(_KERNELS, _ROW),
    "gpu_memcpy": _ROW, "gpu_memset": _ROW, "Memcpy": _ROW, "Memset": _ROW,
    "cuda_runtime": _LAUNCH, "cuda_driver": _LAUNCH, "hip_runtime": _LAUNCH, "Runtime": _LAUNCH,
    "xpu_runtime": _LAUNCH, "xpu_driver": _LAUNCH, "privateuse1_runtime": _LAUNCH, "privateuse1_driver": _LAUNCH,
    "user_annotation": _NOTE,
    "cpu_op": _OPERATOR, "Operator": _OLD_RANGE, "python_function": _PYTHON,
    # What devices run of which nothing here knows what computes and what communicates.
    "mtia_ccp_events": _FOREIGN, "mtia_insight": _FOREIGN, "hpu_op": _FOREIGN, "collective_comm": _FOREIGN,
    # Other categories of the host, or of nothing that runs by itself. An event of any other that names a device is
    # foreign.
    **dict.fromkeys(
        (
            None, "ac2g", "async_cpu_to_gpu", "async_gpu", "fwdbwd", "Trace", "overhead", "cpu_instant_event",
            "gpu_user_annotation", "cuda_sync", "cuda_profiler_range", "gpu_pm_counter", "external_correlation",
            "mtia_runtime", "glow_runtime",
        ),
        _BESIDE,
    ),
}  # fmt: skip
# Calls of these launch a kernel, by the host libraries of NVIDIA, AMD and Intel.
_LAUNCHES_KERNEL = re.compile(r"LaunchKernel|LaunchCooperativeKernel|KernelLaunch")
# Calls of these launch nothing, though they have numbers like launches. They are up to half of a file's calls.
_LAUNCHES_NOTHING = re.compile(
    r"(?:cuda|cu|hip)(?:Event|Occupancy|Func|Pointer|Get|DeviceGet|DeviceSynchronize|CtxSynchronize|"
    r"Stream(?:Synchronize|WaitEvent|IsCapturing|Get|Query|Create|Destroy))"
)
# Torch's ranges of the collectives of a device. Of these the host sees only that it enqueued them.
ENQUEUED = ("nccl:", "rccl:", "xccl:", "hccl:", "oneccl:")

_UINT64 = 2**64 - 1
_NO_ARGS = KernelArgs()
_MAX_OTHER_RANGES = 4096
# Sizes of collectives that are remembered by the text that tells them.
_MOST_SIZES = 4096
# Torch's operator around what a collective launches.
_COLLECTIVE_OPERATOR = "record_param_comms"

# Most ranges have one of few names.
_detail = functools.lru_cache(256)(RangeDetail)

_Args = TypeVar("_Args", bound=msgspec.Struct)
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class ArgsReader(Protocol):
    """Decodes the arguments of events, see ``stream.EventStream.args_of``."""

    def __call__(
        self, events: Sequence[Event], kind: type[_Args], odd: type[msgspec.Struct] | None = None, /
    ) -> list[_Args | None]: ...


class Note(NamedTuple):
    """A range of the host that is a step."""

    name: str
    thread: int | str
    start_ns: int
    end_ns: int


class _Numbers(dict[_Key, int]):
    """Numbers of keys, in the order in which they appear."""

    def __missing__(self, key: _Key) -> int:
        number = self[key] = len(self)
        return number


class _NumbersBy(dict[_Key, int]):
    """Numbers of keys; ``new`` gives the number of one that is not known yet.

    It must not refer to what holds this: a cycle would keep all that was collected until the garbage is collected.
    """

    def __init__(self, new: Callable[[_Key], int]) -> None:
        self._new = new

    def __missing__(self, key: _Key) -> int:
        number = self[key] = self._new(key)
        return number


class EventCollector:
    """Collects the events of one kind of file, one piece of the file at a time.

    Args:
        steps: finds the names of the ranges that are steps, beside ``ProfilerStep#``; None for those alone.
        exact: whether times come as text.

    Attributes:
        rows: the kernels, or on a CPU the operators.
        times: start and duration of each row.
        notes: ranges of the host that are steps.
        foreign: number of events of devices that are not read, by category.
    """

    def __init__(self, steps: re.Pattern[str] | None = None, *, exact: bool = False) -> None:
        self.rows = KernelTableBuilder()
        self.times = EventTimes(exact)
        self.notes: list[Note] = []
        self.foreign: Counter[str] = Counter()
        self._all_times = [self.times]
        self._sorted: list[list[Event]] = [[] for _ in range(_UNKNOWN + 1)]
        self._sort = {
            category: self._sorted[group].append if group != _BESIDE else None
            for category, group in _CATEGORIES.items()
        }
        names = self.rows.names
        self._name_of: _NumbersBy[str | None] = _NumbersBy(lambda name: names[short_name(name)])
        self._is_step: _NumbersBy[str | None] = _NumbersBy(lambda name: bool(name) and is_step(name or "", steps))

    def collect(self, events: list[Event], args_of: ArgsReader) -> None:
        """Keep what is needed of the events of one piece.

        Args:
            events: the events.
            args_of: decodes the arguments of those that are needed.
        """
        sort, unknown = self._sort.get, self._sorted[_UNKNOWN].append
        for event in events:
            add = sort(event.cat, unknown)
            if add is not None:
                add(event)
        self._collect(args_of)
        for group in self._sorted:
            group.clear()

    def _collect(self, args_of: ArgsReader) -> None:
        """Keep what is needed of the events that were sorted."""
        raise NotImplementedError

    @property
    def inexact(self) -> bool:
        """Whether nanoseconds were lost, so that the file must be read again as text."""
        return any(times.inexact for times in self._all_times)

    def _durations(self, group: int) -> list[Event]:
        """The events of a group that last: others mark a moment or an arrow."""
        return [event for event in self._sorted[group] if event.ph == "X"]

    def _note(self, events: list[Event]) -> None:
        """Keep steps, those whose times can be read."""
        for event in events:
            self.notes.extend(_as_note(event))


class DeviceEvents(EventCollector):
    """The kernels of a device, the calls that launched them, steps, and torch's annotations of collectives.

    Attributes:
        devices: number of each row's device.
        known: what each communication kernel's own metadata tells.
        operators: torch's operators of collectives, where they describe theirs.
        annotations: torch's ranges of collectives.
        launch_correlation: number that each launch shares with its kernel. Calls that launch nothing are left out.
        launch_thread: thread of each launch, as a number of ``threads``.
        threads: numbers of the threads that launched, which are as they are in the file.
        launch_times: when each launch was made.
        num_launches_taken: number of launches that were taken away.
        wait_times: when the host waited for the device.
        ranges: other ranges of the host: modules, and what users and torch have named.
    """

    def __init__(self, steps: re.Pattern[str] | None = None, *, exact: bool = False) -> None:
        super().__init__(steps, exact=exact)
        self.devices = array("i")
        self._num_taken = self.num_launches_taken = 0
        self.known = KernelMetadata()
        self.operators = CollectiveRanges(EventTimes(exact))
        self.annotations = CollectiveRanges(EventTimes(exact))
        self.launch_correlation = array("Q")
        self.launch_thread = array("i")
        self.threads: _Numbers[int | str] = _Numbers()
        self.launch_times = EventTimes(exact)
        self.wait_times = EventTimes(exact)
        self.ranges = HostRanges(EventTimes(exact))
        of_ranges = (self.ranges.times, self.operators.times, self.annotations.times)
        self._all_times += [self.launch_times, self.wait_times, *of_ranges]
        self._lanes: _Numbers[tuple[int, int | str]] = _Numbers()
        self._launches_nothing: _NumbersBy[str | None] = _NumbersBy(
            lambda name: bool(_LAUNCHES_NOTHING.match(name or "")) and not launches_kernel(name)
        )
        self._is_module: _NumbersBy[str | None] = _NumbersBy(lambda name: (name or "").startswith(MODULE))
        self._is_annotation: _NumbersBy[str | None] = _NumbersBy(lambda name: (name or "").startswith(ENQUEUED))
        self._num_bytes: dict[tuple[str, bytes, bytes], int] = {}
        shapes = self.rows.shapes
        self._shapes: _NumbersBy[Any] = _NumbersBy(lambda part: shapes.setdefault(launch_shape(part), len(shapes)))

    @property
    def training_thread(self) -> int:
        """The number of the thread that names the steps among those with ranges; -1 if it has none."""
        return self.ranges.thread_number(next((note.thread for note in self.notes), None))

    def add_launch(self, correlation: int, thread: Any) -> None:
        """Keep a launch whose time was kept."""
        self.launch_correlation.append(correlation & _UINT64)
        self.launch_thread.append(self.threads[hashable(thread)])

    def lane_of(self, device: int, stream: Any) -> int:
        """The number of a stream of a device."""
        return self._lanes[device, hashable(stream)]

    @property
    def num_rows(self) -> int:
        """Number of rows so far, those that were taken away among them."""
        return self._num_taken + len(self.rows)

    @property
    def num_held(self) -> int:
        """Number of rows, launches and ranges that are in memory, and of which there may be millions."""
        of_collectives = len(self.annotations) + len(self.operators)
        return len(self.rows) + len(self.launch_thread) + len(self.wait_times) + of_collectives + len(self.ranges)

    def take_rows(self) -> dict[str, Any]:
        """The columns of the rows but for their times, which are then forgotten; what their numbers stand for stays."""
        self._num_taken += len(self.rows)
        taken = {"device": np.array(self.devices), **self.rows.take()}
        self.devices = array("i")
        return taken

    def take_launches(self) -> tuple[Any, Any]:
        """Number and thread of each launch, shape (n,) each, which are then forgotten."""
        taken = np.array(self.launch_correlation), np.array(self.launch_thread)
        self.num_launches_taken += len(self.launch_thread)
        self.launch_correlation, self.launch_thread = array("Q"), array("i")
        return taken

    def forget_times(self) -> None:
        """Forget the times of rows and launches, which take as much memory as all else that is known of them."""
        self.times, self.launch_times = EventTimes(True), EventTimes(True)
        self.launch_correlation, self.launch_thread = array("Q"), array("i")
        self._all_times.clear()

    @property
    def streams(self) -> tuple[str, ...]:
        """The stream of each lane, as it is in the file."""
        return tuple([safe_text.clean(str(stream)) for _, stream in self._lanes])

    def _collect(self, args_of: ArgsReader) -> None:
        rows, launches, notes, olds = map(self._durations, (_ROW, _LAUNCH, _NOTE, _OLD_RANGE))
        is_module = self._is_module
        modules = [event for event in self._sorted[_PYTHON] if is_module[event.name] and event.ph == "X"]
        if rows:
            self._add_rows(rows, args_of)
        if launches:
            self._add_launches(launches, args_of)
        is_step, is_annotation = self._is_step, self._is_annotation
        ranges = (*notes, *olds, *modules)
        self._note([event for event in ranges if is_step[event.name]])
        annotations = [event for event in ranges if is_annotation[event.name]]
        if annotations:
            self._add_annotations(annotations, args_of)
        operators = [event for event in self._sorted[_OPERATOR] if event.name == _COLLECTIVE_OPERATOR]
        if operators:
            self._add_operators(operators, args_of)
        for event in (*notes, *modules):
            name = event.name
            if name and not (is_annotation[name] or is_step[name]):
                self.ranges.add(short_name(name), hashable(event.tid), event)
        for event in self._durations(_FOREIGN):
            self.foreign[str(event.cat)] += 1

    def _add_operators(self, events: list[Event], args_of: ArgsReader) -> None:
        found = [
            (event, args)
            for event, args in zip(events, args_of(events, Args), strict=True)
            if event.ph == "X" and args is not None and args.collective is not None
        ]
        events, about = _timed(self.operators.times, [event for event, _ in found], [args for _, args in found])
        details = [RangeDetail(_COLLECTIVE_OPERATOR, info=self.known.info(args)) for args in about]
        self.operators.add([event.tid for event in events], details, [UNKNOWN] * len(events))

    def _add_annotations(self, events: list[Event], args_of: ArgsReader) -> None:
        events = self.annotations.times.extend(events)
        found = args_of(events, RangeArgs)
        names = [short_name(event.name) for event in events]
        self.annotations.add(
            [event.tid for event in events], map(_detail, names), map(self._num_bytes_of, names, found)
        )

    def _num_bytes_of(self, name: str, args: RangeArgs | None) -> int:
        """The size of the collective of a range, ``UNKNOWN`` if that cannot be told."""
        if args is None:
            return UNKNOWN
        key = name, bytes(args.input_dims), bytes(args.input_type)
        found = self._num_bytes.get(key)
        if found is None:
            # There may be any number of sizes, but mostly there are few.
            if len(self._num_bytes) >= _MOST_SIZES:
                self._num_bytes.clear()
            found = self._num_bytes[key] = input_bytes(*key)
        return found

    def _add_launches(self, events: list[Event], args_of: ArgsReader) -> None:
        waits = [event for event in events if event.name in WAITING_CALLS]
        if waits:
            self.wait_times.extend(waits)
        launches_nothing = self._launches_nothing
        events = [event for event in events if not launches_nothing[event.name]]
        numbers: list[Any] = [args.correlation if args is not None else None for args in args_of(events, LaunchArgs)]
        if not (set(map(type, numbers)) == {int} and all(numbers)):
            events = [event for event, number in zip(events, numbers, strict=True) if type(number) is int and number]
            numbers = [number for number in numbers if type(number) is int and number]
        events, numbers = _timed(self.launch_times, events, numbers)
        self.launch_correlation.extend(_unsigned(numbers))
        self.launch_thread.extend(map(self.threads.__getitem__, _all_hashable([event.tid for event in events])))

    def _add_rows(self, events: list[Event], args_of: ArgsReader) -> None:
        events = self.times.extend(events)
        if not events:
            return
        found = args_of(events, KernelArgs, OddKernelArgs)
        all_args: list[Any] = [args or _NO_ARGS for args in found]
        devices = [args.device for args in all_args]
        if set(map(type, devices)) != {int} or min(devices) < 0 or max(devices) >= 2**31:
            devices = list(map(_device_of, devices, events))
        numbers = [args.correlation for args in all_args]
        if set(map(type, numbers)) != {int}:
            numbers = [number if type(number) is int else 0 for number in numbers]
        rows, compute, copy = self.rows, int(Kind.COMPUTE), int(Kind.COPY)
        collective = array("q", [rows.collectives[""]]) * len(events)
        described = [i for i, args in enumerate(all_args) if args.collective is not None]
        if described:
            first = len(rows)
            kinds = self.known.extend([first + i for i in described], [all_args[i] for i in described])
            for i, kind in zip(described, kinds, strict=True):
                collective[i] = rows.collectives[kind]
        streams = _all_hashable([event.tid for event in events])
        rows.extend(
            kind=[compute if event.cat in _KERNELS else copy for event in events],
            name=map(self._name_of.__getitem__, [event.name for event in events]),
            correlation=_unsigned(numbers),
            shape=map(self._shapes.__getitem__, map(launched_as, all_args)),
            collective=collective,
            lane=map(self._lanes.__getitem__, zip(devices, streams, strict=True)),
        )
        self.devices.extend(devices)


class HostEvents(EventCollector):
    """The operators of all host threads, and the ranges of communication libraries that run on the host.

    Attributes:
        row_threads: thread of each row, as a number of ``threads``.
        threads: numbers of the threads, which are as they are in the file.
        ranges: ranges of communication libraries.
        range_times: start and duration of each range.
        enqueued: number of collectives of NCCL and its like. Of those the host sees only that it enqueued them.
        launches: number of launches of kernels.
        num_taken: number of operators and ranges that were taken away.
        other_ranges: names of the host's other ranges, some thousands at most.
    """

    def __init__(self, steps: re.Pattern[str] | None = None, *, exact: bool = False) -> None:
        super().__init__(steps, exact=exact)
        self.row_threads = array("i")
        self.threads: _Numbers[int | str] = _Numbers()
        self.ranges = KernelTableBuilder()
        self.range_times = EventTimes(exact)
        self._all_times.append(self.range_times)
        self.enqueued = self.launches = self.num_taken = 0
        self.other_ranges: set[str] = set()
        self._of_kernel: _NumbersBy[str | None] = _NumbersBy(launches_kernel)

    @property
    def num_held(self) -> int:
        """Number of operators and ranges that are in memory."""
        return len(self.rows) + len(self.ranges)

    def take(self) -> tuple[Any, Any, Any]:
        """Name and thread of each operator, and the name of each range, shape (n,) each, which are then forgotten."""
        self.num_taken += self.num_held
        taken = self.rows.take()["name"], np.array(self.row_threads), self.ranges.take()["name"]
        self.row_threads = array("i")
        return taken

    def _collect(self, args_of: ArgsReader) -> None:
        notes, operators = self._durations(_NOTE), [*self._durations(_OPERATOR), *self._durations(_OLD_RANGE)]
        is_step = self._is_step
        steps = [event for event in (*notes, *operators) if is_step[event.name]]
        if steps:
            self._note(steps)
            operators = [event for event in operators if not is_step[event.name]]
        self._add_operators([event for event in operators if event.name is not None])
        for event in notes:
            if event.name is not None and not is_step[event.name]:
                self._add_range(event, event.name)
        self.launches += sum([self._of_kernel[event.name] for event in self._durations(_LAUNCH)])
        # An event of an unknown category that names a device is of one.
        unknown = self._durations(_UNKNOWN)
        for event, args in zip(unknown, args_of(unknown, Args), strict=True):
            if args is not None and type(args.device) is int:
                self.foreign[event.cat or ""] += 1
        for event in self._durations(_FOREIGN):
            self.foreign[event.cat or ""] += 1

    def _add_operators(self, events: list[Event]) -> None:
        events = self.times.extend(events)
        rows, nothing = self.rows, array("q", bytes(8 * len(events)))
        rows.extend(
            kind=[int(Kind.COMPUTE)] * len(events),
            name=map(self._name_of.__getitem__, [event.name for event in events]),
            correlation=array("Q", nothing.tobytes()),
            shape=array("q", [rows.shapes.setdefault("", len(rows.shapes))]) * len(events),
            collective=array("q", [rows.collectives[""]]) * len(events),
            lane=nothing,
        )
        self.row_threads.extend(map(self.threads.__getitem__, _all_hashable([event.tid for event in events])))

    def _add_range(self, event: Event, name: str) -> None:
        if name.startswith(ENQUEUED):
            self.enqueued += 1
        elif name_rules.is_communication(name):
            if self.range_times.add(event):
                self.ranges.label(Kind.COMMUNICATION, short_name(name))
        elif len(self.other_ranges) < _MAX_OTHER_RANGES:
            self.other_ranges.add(short_name(name))


def is_step(name: str, steps: re.Pattern[str] | None = None) -> bool:
    """Whether a range of this name is a step; ``steps`` finds those that are not torch's ``ProfilerStep#``."""
    return name.startswith("ProfilerStep#") if steps is None else steps.search(name) is not None


def launches_kernel(name: str | None) -> bool:
    """Whether a call of the host's library of a device launches a kernel, by its name."""
    return bool(_LAUNCHES_KERNEL.search(name or ""))


def _as_note(event: Event) -> tuple[Note, ...]:
    """A step; empty if its times cannot be read."""
    start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
    if start is None or duration is None:
        return ()
    return (Note(event.name or "", hashable(event.tid), start, start + max(duration, 0)),)


def _timed(times: EventTimes, events: list[Event], values: list[_Value]) -> tuple[list[Event], list[_Value]]:
    """Keep the times of events. Returns those whose times can be read, and what belongs to them."""
    kept = times.extend(events)
    if len(kept) == len(events):
        return events, values
    places = {id(event): i for i, event in enumerate(events)}
    return kept, [values[places[id(event)]] for event in kept]


def short_name(name: str | None) -> str:
    """The name, cut if it is too long to keep by the million. ``clean_names`` does the rest later, once per name."""
    if name is None:
        return ""
    return name if len(name) <= safe_text.MAX_NAME_LENGTH else safe_text.clean(name)


def hashable(value: Any) -> int | str:
    """A thread or stream as a key: what is neither a number nor text in the file as text."""
    return value if isinstance(value, (int, str)) else str(value)


def _all_hashable(values: list[Any]) -> list[Any]:
    return values if {*map(type, values)} <= {int, str} else list(map(hashable, values))


def _device_of(device: Any, event: Event) -> int:
    """The number of an event's device. Files without such an argument have it as the process."""
    if type(device) is not int:
        device = event.pid if type(event.pid) is int else 0
    return device if 0 <= device < 2**31 else 0


def _unsigned(numbers: list[int]) -> array[int]:
    """Numbers of any size as 64 bits: of those that take more the lowest."""
    try:
        return array("Q", numbers)
    except OverflowError:
        return array("Q", [number & _UINT64 for number in numbers])
