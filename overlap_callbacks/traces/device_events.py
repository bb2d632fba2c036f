"""Collects the kernels of a device, the calls that launched them, steps, and torch's ranges of collectives."""

from __future__ import annotations

import functools
import re
from array import array
from typing import Any, TypeVar

import msgspec
import numpy as np

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.kernels.launch_shape import LaunchShape
from overlap_callbacks.analysis.kernels.table import Kind
from overlap_callbacks.traces.collect import (
    ENQUEUED,
    FOREIGN,
    KERNELS,
    LAUNCH,
    NOTE,
    OLD_RANGE,
    OPERATOR,
    PYTHON,
    ROW,
    ArgsReader,
    EventCollector,
    Numbers,
    NumbersBy,
    all_hashable,
    hashable,
    launches_kernel,
    short_name,
)
from overlap_callbacks.traces.collective_ranges import CollectiveRanges, RangeDetail
from overlap_callbacks.traces.collectives import UNKNOWN
from overlap_callbacks.traces.events import Args, Event, KernelArgs, LaunchArgs, OddKernelArgs, RangeArgs
from overlap_callbacks.traces.host_ranges import MODULE, HostRanges
from overlap_callbacks.traces.launches import WAITING_CALLS
from overlap_callbacks.traces.metadata import KernelMetadata, input_bytes
from overlap_callbacks.traces.times import EventTimes

# Calls of these launch nothing, though they have numbers like launches. They are up to half of a file's calls.
_LAUNCHES_NOTHING = re.compile(
    r"(?:cuda|cu|hip)(?:Event|Occupancy|Func|Pointer|Get|DeviceGet|DeviceSynchronize|CtxSynchronize|"
    r"Stream(?:Synchronize|WaitEvent|IsCapturing|Get|Query|Create|Destroy))"
)
_UINT64 = 2**64 - 1
_NO_ARGS = KernelArgs()
# Sizes of collectives that are remembered by the text that tells them.
_MOST_SIZES = 4096
# Torch's operator around what a collective launches.
_COLLECTIVE_OPERATOR = "record_param_comms"

# Most ranges have one of few names.
_detail = functools.lru_cache(256)(RangeDetail)

_Value = TypeVar("_Value")


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
        self.threads: Numbers[int | str] = Numbers()
        self.launch_times = EventTimes(exact)
        self.wait_times = EventTimes(exact)
        self.ranges = HostRanges(EventTimes(exact))
        of_ranges = (self.ranges.times, self.operators.times, self.annotations.times)
        self._all_times += [self.launch_times, self.wait_times, *of_ranges]
        self._lanes: Numbers[tuple[int, int | str]] = Numbers()
        self._launches_nothing: NumbersBy[str | None] = NumbersBy(
            lambda name: bool(_LAUNCHES_NOTHING.match(name or "")) and not launches_kernel(name)
        )
        self._is_module: NumbersBy[str | None] = NumbersBy(lambda name: (name or "").startswith(MODULE))
        self._is_annotation: NumbersBy[str | None] = NumbersBy(lambda name: (name or "").startswith(ENQUEUED))
        self._num_bytes: dict[tuple[str, bytes, bytes], int] = {}
        shapes = self.rows.shapes
        self._shapes: NumbersBy[Any] = NumbersBy(lambda part: shapes.setdefault(launch_shape(part), len(shapes)))

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
        rows, launches, notes, olds = map(self._durations, (ROW, LAUNCH, NOTE, OLD_RANGE))
        is_module = self._is_module
        modules = [event for event in self._sorted[PYTHON] if is_module[event.name] and event.ph == "X"]
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
        operators = [event for event in self._sorted[OPERATOR] if event.name == _COLLECTIVE_OPERATOR]
        if operators:
            self._add_operators(operators, args_of)
        for event in (*notes, *modules):
            name = event.name
            if name and not (is_annotation[name] or is_step[name]):
                self.ranges.add(short_name(name), hashable(event.tid), event)
        for event in self._durations(FOREIGN):
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
        self.launch_thread.extend(map(self.threads.__getitem__, all_hashable([event.tid for event in events])))

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
        streams = all_hashable([event.tid for event in events])
        rows.extend(
            kind=[compute if event.cat in KERNELS else copy for event in events],
            name=map(self._name_of.__getitem__, [event.name for event in events]),
            correlation=_unsigned(numbers),
            shape=map(self._shapes.__getitem__, map(launched_as, all_args)),
            collective=collective,
            lane=map(self._lanes.__getitem__, zip(devices, streams, strict=True)),
        )
        self.devices.extend(devices)


def _timed(times: EventTimes, events: list[Event], values: list[_Value]) -> tuple[list[Event], list[_Value]]:
    """Keep the times of events. Returns those whose times can be read, and what belongs to them."""
    kept = times.extend(events)
    if len(kept) == len(events):
        return events, values
    places = {id(event): i for i, event in enumerate(events)}
    return kept, [values[places[id(event)]] for event in kept]


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


# -- arguments of launches


_LAUNCH_METADATA = ("grid", "block", "registers per thread", "shared memory", "blocks per SM")


def launched_as(args: Any) -> tuple[Any, ...]:
    """How a kernel was launched, in the order of ``_LAUNCH_METADATA``; None or no text for what is not known."""
    parts = (args.grid, args.block, args.registers, args.shared_memory, args.blocks_per_sm)
    return tuple(map(bytes, parts)) if type(args) is OddKernelArgs else parts


def launch_shape(launched_as: tuple[Any, ...]) -> LaunchShape | str:
    """The shape of a launch; the text of its grid and block where they make no sense."""
    known: dict[str, Any] = {}
    try:
        for name, value in zip(_LAUNCH_METADATA, launched_as, strict=True):
            if value is not None and value != b"":
                known[name] = msgspec.json.decode(value) if isinstance(value, bytes) else value
        shape = LaunchShape.of(known)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        shape = None
    texts = [part if isinstance(part, bytes) else msgspec.json.encode(part) for part in launched_as[:2] if part]
    return shape or safe_text.clean(b" ".join(texts).decode(errors="replace").strip())
