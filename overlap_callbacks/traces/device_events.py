"""Collects a device's kernels, the calls that launched them, steps, and torch's ranges of collectives."""

from __future__ import annotations

import functools
import re
from array import array
from itertools import compress
from typing import Any, TypeVar

import msgspec

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.kernels.impossible import CAPTURE_BEGINS, CAPTURE_ENDS, call_of
from overlap_callbacks.analysis.kernels.table import Kind, LaunchShape, size_of_copy
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
    EventCollector,
    Memo,
    Numbers,
    all_hashable,
    launches_kernel,
    short_name,
)
from overlap_callbacks.traces.collectives import UNKNOWN, KernelMetadata, RangeDetail, input_bytes
from overlap_callbacks.traces.events import (
    Args,
    Event,
    EventColumns,
    KernelArgs,
    LaunchArgs,
    OddKernelArgs,
    RangeArgs,
)
from overlap_callbacks.traces.reductions import mark_of
from overlap_callbacks.traces.stream import EventStream

# Calls of these launch nothing, though they have numbers like launches. Up to half of a file's calls.
_LAUNCHES_NOTHING = re.compile(
    r"(?:cuda|cu|hip)(?:Event|Occupancy|Func|Pointer|Get|DeviceGet|DeviceSynchronize|CtxSynchronize|"
    r"Stream(?:Synchronize|WaitEvent|IsCapturing|Get|Query|Create|Destroy))"
)
# Calls in which the host waits for the device.
WAITING_CALLS = frozenset({
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize",
    "hipDeviceSynchronize", "hipStreamSynchronize", "hipEventSynchronize", "hipMemcpy", "hipMemcpyWithStream",
})  # fmt: skip
# Those in which it waits for all earlier launches.
SYNCHRONIZES = frozenset({"cudaDeviceSynchronize", "cuCtxSynchronize", "hipDeviceSynchronize"})
_UINT64 = 2**64 - 1
_NO_ARGS = KernelArgs()
# Limit of cached sizes of collectives, by their text.
_MOST_SIZES = 4096
# Torch's operator around a collective's launches.
_COLLECTIVE_OPERATOR = "record_param_comms"
# The beginning of torch's name of a module's call, before the class and its number.
_MODULE = "nn.Module: "
_CAPTURES = frozenset({CAPTURE_BEGINS, CAPTURE_ENDS})
# Operators per piece of a file to check for recorded shapes.
_ASKED = 1024

# Ranges have few distinct names.
_detail = functools.lru_cache(256)(RangeDetail)

_Value = TypeVar("_Value")


class DeviceEvents(EventCollector):
    """The kernels of a device, the calls that launched them, steps, and torch's annotations of collectives.

    Attributes:
        metadata: of the communication kernels; the column ``info`` of a row is the number of its ``CollectiveInfo``, -1
            for none.
        shapes: numbers of the launch shapes: a ``LaunchShape``, or the text of one that cannot be read.
        launches: the calls that launch something. One with an impossible time has -1 for it, and still counts as the
            first with its correlation number. Their column ``call`` is what ``call_of`` says of the name.
        waits, syncs: when the host waited for the device, and for all of it.
        captures: calls that begin or end the capture of a graph.
        annotations, operators: torch's ranges of collectives, and its operators that describe collectives.
        details: numbers of what many of these share.
        ranges: other ranges of the host: modules, and ranges named by users or torch.
        marks: forward passes, reductions and steps of the optimizer, by ``mark_of``.
        on_host, on_host_numbers: ranges of host libraries' collectives, and numbers of their names.
        recorded: what else the profiler recorded, by the names of ``trace.RECORDED``.
    """

    def __init__(self, steps: re.Pattern[str] | None = None, *, exact: bool = False, with_ranges: bool = False) -> None:
        super().__init__(
            steps, exact=exact, keep_untimed=True, kind="b", name="i", correlation="Q", shape="i", lane="i", device="i",
            info="q", num_bytes="q", sequence="q",
        )  # fmt: skip
        self.metadata = KernelMetadata()
        self.shapes: Numbers[LaunchShape | str] = Numbers()
        self.launches = self._events(keep_untimed=True, correlation="Q", thread="i", call="b")
        self.waits = self._events()
        self.syncs = self._events()
        self.captures = self._events(begins="b")
        self.annotations = self._events(thread="i", detail="i", num_bytes="q")
        self.operators = self._events(thread="i", detail="i", num_bytes="q")
        self.details: Numbers[RangeDetail] = Numbers()
        self.ranges = self._events(thread="i", name="i")
        self.range_numbers: Numbers[str] = Numbers()
        self.marks = self._events(thread="i", mark="b")
        self._mark_of: Memo[str | None, int] = Memo(mark_of)
        self.on_host = self._events(name="i")
        self.on_host_numbers: Numbers[str] = Numbers()
        self.recorded: set[str] = set()
        self._unasked = _ASKED
        self._with_ranges = with_ranges
        self.lanes: Numbers[tuple[int, int | str]] = Numbers()
        self._launches_nothing: Memo[str | None, bool] = Memo(
            lambda name: bool(_LAUNCHES_NOTHING.match(name or "")) and not launches_kernel(name)
        )
        self._call_of: Memo[str | None, int] = Memo(call_of)
        self._is_module: Memo[str | None, bool] = Memo(lambda name: (name or "").startswith(_MODULE))
        self._is_annotation: Memo[str | None, bool] = Memo(lambda name: (name or "").startswith(ENQUEUED))
        self._is_on_host: Memo[str | None, bool] = Memo(lambda name: bool(re.match(name_rules.ON_HOST, name or "")))
        self._num_bytes: dict[tuple[str, bytes, bytes], int] = {}
        shapes = self.shapes
        self._shapes: Memo[Any, int] = Memo(lambda part: shapes[_launch_shape(part)])

    @property
    def streams(self) -> tuple[str, ...]:
        """The stream of each lane, as named in the file."""
        return tuple([safe_text.clean(str(stream)) for _, stream in self.lanes])

    @property
    def range_names(self) -> tuple[str, ...]:
        """The names of ``ranges``; modules' names begin with their class."""
        return tuple([safe_text.clean(name.removeprefix(_MODULE)) for name in self.range_numbers])

    @property
    def training_thread(self) -> int:
        """The number of the thread with the steps' ranges; -1 for none."""
        return self.threads[self.notes[0].thread] if self.notes else -1

    def _collect(self, stream: EventStream) -> None:
        rows, launches, notes, olds = map(self._durations, (ROW, LAUNCH, NOTE, OLD_RANGE))
        is_module = self._is_module
        modules = [event for event in self._sorted[PYTHON] if is_module[event.name] and event.ph == "X"]
        if rows:
            self._add_rows(rows, stream)
        if launches:
            self._add_launches(launches, stream)
        is_step, is_annotation = self._is_step, self._is_annotation
        ranges = (*notes, *olds, *modules)
        self._note([event for event in ranges if is_step[event.name]], stream)
        mark_of_name = self._mark_of
        marks = [event for event in notes if mark_of_name[event.name] >= 0]
        if marks:
            marks = self.marks.keep(marks)
            self.marks.label(thread=self._threads_of(marks), mark=[mark_of_name[event.name] for event in marks])
        annotations = [event for event in ranges if is_annotation[event.name]]
        if annotations:
            self._add_annotations(annotations, stream)
        operators = [event for event in self._sorted[OPERATOR] if event.name == _COLLECTIVE_OPERATOR]
        if operators:
            self._add_operators(operators, stream)
        is_on_host = self._is_on_host
        on_host = [event for event in (*notes, *olds) if is_on_host[event.name]]
        if on_host:
            on_host = self.on_host.keep(on_host)
            self.on_host.label(name=[self.on_host_numbers[short_name(event.name)] for event in on_host])
        self._note_recorded()
        if self._with_ranges:
            named = [event for event in (*notes, *modules)
                     if event.name and not (is_annotation[event.name] or is_step[event.name])]  # fmt: skip
            named = self.ranges.keep(named)
            names = [self.range_numbers[short_name(event.name)] for event in named]
            self.ranges.label(thread=self._threads_of(named), name=names)
        for event in self._durations(FOREIGN):
            self.foreign[str(event.cat)] += 1

    def _note_recorded(self) -> None:
        if self._sorted[PYTHON]:
            self.recorded.add("Python stacks")
        operators = self._sorted[OPERATOR][: self._unasked] if "shapes" not in self.recorded else []
        self._unasked -= len(operators)
        if any([b'"Input Dims"' in bytes(event.args) for event in operators]):
            self.recorded.add("shapes")

    def _add_operators(self, events: list[Event], stream: EventStream) -> None:
        found = [
            (event, args)
            for event, args in zip(events, stream.args_of(events, Args), strict=True)
            if event.ph == "X" and args is not None and args.collective is not None
        ]
        events, about = _timed(self.operators, [event for event, _ in found], [args for _, args in found])
        details = [self.details[RangeDetail(_COLLECTIVE_OPERATOR, self.metadata.info(args))] for args in about]
        self.operators.label(thread=self._threads_of(events), detail=details, num_bytes=[UNKNOWN] * len(events))

    def _add_annotations(self, events: list[Event], stream: EventStream) -> None:
        events = self.annotations.keep(events)
        names = [short_name(event.name) for event in events]
        num_bytes = map(self._num_bytes_of, names, stream.args_of(events, RangeArgs))
        details = [self.details[_detail(name)] for name in names]
        self.annotations.label(thread=self._threads_of(events), detail=details, num_bytes=num_bytes)

    def _num_bytes_of(self, name: str, args: RangeArgs | None) -> int:
        """The size of a range's collective; ``UNKNOWN`` if unknown."""
        if args is None:
            return UNKNOWN
        key = name, bytes(args.input_dims), bytes(args.input_type)
        found = self._num_bytes.get(key)
        if found is None:
            # Usually few sizes, but there may be any number.
            if len(self._num_bytes) >= _MOST_SIZES:
                self._num_bytes.clear()
            found = self._num_bytes[key] = input_bytes(*key)
        return found

    def _add_launches(self, events: list[Event], stream: EventStream) -> None:
        waits = [event for event in events if event.name in WAITING_CALLS]
        if waits:
            self.waits.keep(waits)
            self.syncs.keep([event for event in waits if event.name in SYNCHRONIZES])
        launches_nothing, call_of_name = self._launches_nothing, self._call_of
        events = [event for event in events if not launches_nothing[event.name]]
        calls = [call_of_name[event.name] for event in events]
        if not _CAPTURES.isdisjoint(calls):
            captures = self.captures.keep([event for event in events if call_of_name[event.name] in _CAPTURES])
            self.captures.label(begins=[call_of_name[event.name] == CAPTURE_BEGINS for event in captures])
        # The arguments are not kept: the next events reuse their memory while it is cached.
        numbers: list[Any] = [
            args.correlation if args is not None else None for args in stream.args_of(events, LaunchArgs)
        ]
        if not (set(map(type, numbers)) == {int} and all(numbers)):
            counts = [type(number) is int and bool(number) for number in numbers]
            events, calls, numbers = (list(compress(column, counts)) for column in (events, calls, numbers))
        self.launching.update(all_hashable([event.pid for event in events]))
        self.launches.keep(events)
        self.launches.label(correlation=unsigned(numbers), thread=self._threads_of(events), call=calls)

    def _add_rows(self, events: list[Event], stream: EventStream) -> None:
        events = self.rows.keep(events)
        if not events:
            return
        found = stream.args_of(events, KernelArgs, OddKernelArgs)
        all_args: list[Any] = [args or _NO_ARGS for args in found]
        devices = [args.device for args in all_args]
        if set(map(type, devices)) != {int} or min({*devices}) < 0 or max({*devices}) >= 2**31:
            devices = [
                device_number(event.pid if type(device) is not int else device)  # old files have it as the process
                for device, event in zip(devices, events, strict=True)
            ]
        numbers = [args.correlation for args in all_args]
        if set(map(type, numbers)) != {int}:
            numbers = [number if type(number) is int else 0 for number in numbers]
        compute, copy = int(Kind.COMPUTE), int(Kind.COPY)
        unknown = array("q", [UNKNOWN]) * len(events)
        info, num_bytes, sequence = array("q", [-1]) * len(events), unknown[:], unknown
        for i in [i for i, args in enumerate(all_args) if args.module is not None]:
            name = events[i].name or ""
            if all_args[i].collective is None and name_rules.is_communication(name):
                all_args[i].collective = name_rules.collective_of(name)  # the replay of a graph has no other metadata
        described = [i for i, args in enumerate(all_args) if args.collective is not None]
        if described:
            metadata = self.metadata.describe([all_args[i] for i in described])
            for i, of_collective in zip(described, metadata, strict=True):
                info[i], num_bytes[i], sequence[i] = of_collective
        processes, ranks = [event.pid for event in events], [args.rank for args in all_args]
        if processes == devices and ranks.count(None) == len(ranks):  # nearly all files
            self.places.update([(device, device, str(None)) for device in {*devices}])
        else:
            self.places.update(zip(all_hashable(processes), devices, all_hashable(ranks), strict=True))
        streams = all_hashable([event.tid for event in events])
        self.rows.label(
            kind=[compute if event.cat in KERNELS else copy for event in events],
            name=map(self._name_of.__getitem__, [event.name for event in events]),
            correlation=unsigned(numbers),
            shape=map(self._shapes.__getitem__, map(_launched_as, all_args)),
            lane=map(self.lanes.__getitem__, zip(devices, streams, strict=True)),
            device=devices,
            info=info,
            num_bytes=num_bytes,
            sequence=sequence,
        )


def _timed(columns: EventColumns, events: list[Event], values: list[_Value]) -> tuple[list[Event], list[_Value]]:
    """Add events by their times. Returns those with valid times, and their values."""
    kept = columns.keep(events)
    if len(kept) == len(events):
        return events, values
    places = {id(event): i for i, event in enumerate(events)}
    return kept, [values[places[id(event)]] for event in kept]


def device_number(device: Any) -> int:
    """The number of a device; 0 if invalid."""
    return device if type(device) is int and 0 <= device < 2**31 else 0


def unsigned(numbers: list[int]) -> array[int]:
    """The lowest 64 bits of numbers of any size."""
    try:
        return array("Q", numbers)
    except OverflowError:
        return array("Q", [number & _UINT64 for number in numbers])


# -- arguments of launches


_LAUNCH_METADATA = ("grid", "block", "registers per thread", "shared memory", "blocks per SM")


def _launched_as(args: Any) -> tuple[Any, ...]:
    """How a kernel was launched, in the order of ``_LAUNCH_METADATA``; None or empty where unknown.

    Of a copy, its bytes alone.
    """
    if type(args.bytes) is int:
        return (args.bytes,)
    parts = (args.grid, args.block, args.registers, args.shared_memory, args.blocks_per_sm)
    return tuple(map(bytes, parts)) if type(args) is OddKernelArgs else parts


def _launch_shape(launched_as: tuple[Any, ...]) -> LaunchShape | str:
    """The shape of a launch; the text of its grid and block where they make no sense; of a copy, its size."""
    if len(launched_as) == 1:
        return size_of_copy(launched_as[0])
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
