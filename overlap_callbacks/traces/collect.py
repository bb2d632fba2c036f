"""Collects from the events of a trace file what is needed of them: kernels, launches, steps, operators.

A file with kernels of a device is read for those, their launches and torch's annotations (``DeviceEvents``). A file
without is read for the operators and ranges of the host (``HostEvents``).
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.kernels.launch_shape import LaunchShape
from overlap_callbacks.analysis.kernels.table import Indices, KernelTableBuilder, Kind
from overlap_callbacks.traces.host_ranges import MODULE, HostRanges
from overlap_callbacks.traces.launches import WAITING_CALLS
from overlap_callbacks.traces.metadata import CollectiveInfo, KernelMetadata
from overlap_callbacks.traces.stream import Args, Event

# Kineto's categories, of today and of 2021. Then, ranges were operators too.
_KERNEL, _COPY, _LAUNCH, _NOTE, _OPERATOR, _OLD_RANGE, _FOREIGN, _PYTHON = range(8)
_CATEGORIES = {
    "kernel": _KERNEL, "Kernel": _KERNEL,
    "gpu_memcpy": _COPY, "gpu_memset": _COPY, "Memcpy": _COPY, "Memset": _COPY,
    "cuda_runtime": _LAUNCH, "cuda_driver": _LAUNCH, "hip_runtime": _LAUNCH, "Runtime": _LAUNCH,
    "xpu_runtime": _LAUNCH, "xpu_driver": _LAUNCH, "privateuse1_runtime": _LAUNCH, "privateuse1_driver": _LAUNCH,
    "user_annotation": _NOTE,
    "cpu_op": _OPERATOR, "Operator": _OLD_RANGE, "python_function": _PYTHON,
    # What devices run of which nothing here knows what computes and what communicates.
    "mtia_ccp_events": _FOREIGN, "mtia_insight": _FOREIGN, "hpu_op": _FOREIGN, "collective_comm": _FOREIGN,
}  # fmt: skip
# Other categories of the host, or of nothing that runs by itself. An event of any other that names a device is foreign.
_KNOWN_BESIDE = frozenset(
    {
        "ac2g", "async_cpu_to_gpu", "async_gpu", "fwdbwd", "Trace", "overhead", "cpu_instant_event",
        "gpu_user_annotation", "cuda_sync", "cuda_profiler_range", "gpu_pm_counter", "external_correlation",
        "mtia_runtime", "glow_runtime",
    }
)  # fmt: skip
# Calls of these launch a kernel, by the host libraries of NVIDIA, AMD and Intel.
_LAUNCHES_KERNEL = re.compile(r"LaunchKernel|LaunchCooperativeKernel|KernelLaunch")
# Torch's ranges of the collectives of a device. Of these the host sees only that it enqueued them.
ENQUEUED = ("nccl:", "rccl:", "xccl:", "hccl:", "oneccl:")

# Times outside these bounds are of no clock, nor are durations beyond the maximum; their differences would overflow.
MIN_TIME_NS, MAX_TIME_NS, MAX_DURATION_NS = -(2**61), 2**62, 2**61
# From here on, neighbouring floating-point numbers of microseconds are too far apart to tell nanoseconds.
_MAX_EXACT_US = 2**43
_UINT64 = 2**64 - 1
_NO_ARGS = Args()
_MAX_OTHER_RANGES = 4096
# Torch's operator around what a collective launches.
_COLLECTIVE_OPERATOR = "record_param_comms"


class EventTimes:
    """Starts and durations as they are in the file, converted to whole nanoseconds at the end.

    A floating-point number holds microseconds precisely enough for nanoseconds only up to 2**43 us. Files with greater
    times are read again, and their numbers are taken as text.

    Args:
        exact: the numbers are taken as text.

    Attributes:
        unread: number of events whose times cannot be read.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._start: array[Any] = array("q" if exact else "d")
        self._duration: array[Any] = array("q" if exact else "d")
        self.unread = 0

    def add(self, event: Event) -> bool:
        """Keep an event's times. If it has none that can be read, count it and return False."""
        try:
            if not self._exact:
                self._start.append(event.ts)
                try:
                    self._duration.append(event.dur)
                except (TypeError, OverflowError):
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

    def add_ns(self, start_ns: Any, end_ns: Any) -> bool:
        """Keep a start and an end, for times that are exact. If they are no times, count them and return False."""
        for time in (start_ns, end_ns):
            if type(time) is not int or not MIN_TIME_NS < time < MAX_TIME_NS:
                self.unread += 1
                return False
        self._start.append(start_ns)
        self._duration.append(end_ns - start_ns)
        return True

    def __len__(self) -> int:
        return len(self._start)

    @property
    def inexact(self) -> bool:
        """Whether nanoseconds were lost, so that the file must be read again as text."""
        start = np.frombuffer(self._start, dtype=np.float64) if not self._exact else np.empty(0)
        return bool(((np.abs(start) >= _MAX_EXACT_US) & (start != np.floor(start))).any())

    @property
    def num_untimed(self) -> int:
        """Number of events whose times cannot be read, or are none that a clock shows."""
        return self.unread + int(self.bounds()[2].sum())

    def bounds(self) -> tuple[Indices, Indices, npt.NDArray[np.bool_], int]:
        """All times in whole nanoseconds.

        Returns:
            Start and end of each event, shape (n,) each; which events have impossible times, shape (n,); and how many
            durations were negative.
        """
        if self._exact:
            start, duration = (np.array(times, dtype=np.int64) for times in (self._start, self._duration))
            impossible = np.abs(duration) >= MAX_DURATION_NS
        else:
            microseconds = [np.array(times, dtype=np.float64) for times in (self._start, self._duration)]
            start_us, duration_us = microseconds
            # (NaN fails every comparison.)
            possible = (start_us > MIN_TIME_NS / 1000) & (start_us < MAX_TIME_NS / 1000)
            impossible = ~(possible & (np.abs(duration_us) < MAX_DURATION_NS / 1000))
            start, duration = (_from_microseconds(np.where(impossible, 0.0, times)) for times in microseconds)
        negative = duration < 0
        return start, start + np.where(negative, 0, duration), impossible, int(negative.sum())


def _from_microseconds(times: npt.NDArray[np.float64]) -> Indices:
    whole = np.floor(times)
    return whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)


class Note(NamedTuple):
    """A range of the host that describes what was launched in it: a step, or a collective (``nccl:...``)."""

    name: str
    thread: int | str
    start_ns: int
    end_ns: int
    args: Args | None


class EventCollector:
    """Collects the events of one kind of file, one piece of the file at a time.

    Args:
        steps: finds the names of the ranges that are steps, beside ``ProfilerStep#``; None for those alone.

    Attributes:
        rows: the kernels, or on a CPU the operators.
        times: start and duration of each row.
        notes: ranges of the host that describe what was launched in them.
        foreign: number of events of devices that are not read, by category.
    """

    def __init__(self, steps: re.Pattern[str] | None = None) -> None:
        self.rows = KernelTableBuilder()
        self.notes: list[Note] = []
        self.foreign: Counter[str] = Counter()
        self._steps = steps

    def begin(self, exact: bool) -> None:
        """Prepare for a file's events; ``exact`` if their times come as text."""
        self.times = EventTimes(exact)

    def collect(self, events: list[Event]) -> None:
        """Keep what is needed of the events of one piece."""
        raise NotImplementedError

    def is_step(self, name: str) -> bool:
        """Whether a range of this name is a step."""
        return name.startswith("ProfilerStep#") if self._steps is None else self._steps.search(name) is not None

    def note(self, event: Event, name: str) -> None:
        """Keep a range of the host, if its times can be read."""
        self.notes.extend(_as_note(event, name))

    @property
    def inexact(self) -> bool:
        """Whether nanoseconds were lost, so that the file must be read again as text."""
        return self.times.inexact


class DeviceEvents(EventCollector):
    """The kernels of a device, the calls that launched them, steps, and torch's annotations of collectives.

    Attributes:
        devices: number of each row's device.
        known: what each communication kernel's own metadata tells, by row.
        operators: torch's operators of collectives, where they describe theirs. Those of one kind on one group share
            their arguments, so that many take little memory; sizes and numbers in them are those of the first.
        launch_correlation: number that each launch shares with its kernel.
        launch_thread: thread of each launch, as it is in the file.
        launch_of_kernel: whether each launch launched a kernel, and no copy or anything else.
        launch_times: when each launch was made.
        wait_times: when the host waited for the device.
        ranges: other ranges of the host: modules, and what users and torch have named.
    """

    def __init__(self, steps: re.Pattern[str] | None = None) -> None:
        super().__init__(steps)
        self.devices = array("q")
        self.known: dict[int, CollectiveInfo] = {}
        self.operators: list[Note] = []
        self._shared_args: dict[tuple[Any, ...], Args] = {}
        self._lanes: dict[tuple[int, int | str], int] = {}
        self.launch_correlation = array("Q")
        self.launch_thread: list[Any] = []
        self.launch_of_kernel = array("b")
        self._of_kernel: dict[str | None, bool] = {}
        self._metadata = KernelMetadata()
        self._shapes: dict[tuple[bytes, ...], LaunchShape | str] = {}

    def begin(self, exact: bool) -> None:
        super().begin(exact)
        self.launch_times = EventTimes(exact)
        self.wait_times = EventTimes(exact)
        self.ranges = HostRanges(EventTimes(exact))

    def collect(self, events: list[Event]) -> None:
        category_of = _CATEGORIES.get
        add_time, add_correlation = self.launch_times.add, self.launch_correlation.append
        for event in events:
            category = category_of(event.cat)  # type: ignore[arg-type]
            if category is None or event.ph != "X":
                continue
            if category == _OPERATOR:  # most events are operators, and few are needed here
                if event.name == _COLLECTIVE_OPERATOR:
                    self._operator(event)
                continue
            if category == _PYTHON and not (event.name or "").startswith(MODULE):  # nor most functions of Python
                continue
            if category == _LAUNCH:
                args = event.args
                number = args.correlation if args is not None else None
                if type(number) is int and number and add_time(event):
                    add_correlation(number & _UINT64)
                    self.launch_thread.append(event.tid)
                    of_kernel = self._of_kernel.get(event.name)
                    if of_kernel is None:
                        of_kernel = self._of_kernel[event.name] = bool(_LAUNCHES_KERNEL.search(event.name or ""))
                    self.launch_of_kernel.append(of_kernel)
                if event.name in WAITING_CALLS:
                    self.wait_times.add(event)
            elif category in (_NOTE, _OLD_RANGE, _PYTHON):
                self._range(event, category)
            elif category == _FOREIGN:
                self.foreign[str(event.cat)] += 1
            else:
                self._kernel(event, category)

    @property
    def streams(self) -> tuple[str, ...]:
        """The stream of each lane, as it is in the file."""
        return tuple([safe_text.clean(str(stream)) for _, stream in self._lanes])

    def _range(self, event: Event, category: int) -> None:
        name = event.name or ""
        if name.startswith(ENQUEUED) or (name and self.is_step(name)):
            self.note(event, name)
        elif name and category != _OLD_RANGE:
            self.ranges.add(short_name(name), _hashable(event.tid), event)

    def _operator(self, event: Event) -> None:
        for note in _as_note(event, _COLLECTIVE_OPERATOR):
            args = note.args
            if args is not None and args.collective is not None:
                shared = self._shared_args.setdefault(self._metadata.key(args), args)
                self.operators.append(note._replace(args=shared))

    def _kernel(self, event: Event, category: int) -> None:
        if not self.times.add(event):
            return
        args = event.args or _NO_ARGS
        collective = ""
        if args.collective is not None:
            info = self.known[len(self.rows)] = self._metadata.read(args)
            collective = info.kind
        launched_as = (
            bytes(args.grid), bytes(args.block),
            bytes(args.registers), bytes(args.shared_memory), bytes(args.blocks_per_sm),
        )  # fmt: skip
        shape = self._shapes.get(launched_as)
        if shape is None:
            shape = self._shapes[launched_as] = _launch_shape(*launched_as)
        device = args.device
        if type(device) is not int:
            device = event.pid if type(event.pid) is int else 0
        device = device if 0 <= device < 2**31 else 0
        self.devices.append(device)
        lane = self._lanes.setdefault((device, _hashable(event.tid)), len(self._lanes))  # a stream, of one device
        number = args.correlation if type(args.correlation) is int else 0
        kind = Kind.COMPUTE if category == _KERNEL else Kind.COPY
        self.rows.label(kind, short_name(event.name), number, shape, collective, lane)


_LAUNCH_METADATA = ("grid", "block", "registers per thread", "shared memory", "blocks per SM")


def _launch_shape(*parts: bytes) -> LaunchShape | str:
    """The shape of a launch; the text of its grid and block where they make no sense.

    Args:
        parts: grid, block, registers per thread, shared memory and blocks per SM, as they are in the file.
    """
    texts = dict(zip(_LAUNCH_METADATA, parts, strict=True))
    try:
        shape = LaunchShape.of({key: msgspec.json.decode(text) for key, text in texts.items() if text})
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        shape = None
    return shape or safe_text.clean(b" ".join(parts[:2]).decode(errors="replace").strip())


class HostEvents(EventCollector):
    """The operators of all host threads, and the ranges of communication libraries that run on the host.

    Attributes:
        threads: thread of each row.
        ranges: ranges of communication libraries.
        range_times: start and duration of each range.
        enqueued: number of collectives of NCCL and its like. Of those the host sees only that it enqueued them.
        launches: number of launches of kernels.
        other_ranges: names of the host's other ranges, some thousands at most.
    """

    def __init__(self, steps: re.Pattern[str] | None = None) -> None:
        super().__init__(steps)
        self.threads: list[Any] = []
        self.ranges = KernelTableBuilder()
        self.enqueued = 0
        self.launches = 0
        self.other_ranges: set[str] = set()

    def begin(self, exact: bool) -> None:
        super().begin(exact)
        self.range_times = EventTimes(exact)

    def collect(self, events: list[Event]) -> None:
        category_of = _CATEGORIES.get
        for event in events:
            category, name = category_of(event.cat), event.name  # type: ignore[arg-type]
            if event.ph != "X":
                continue
            if category not in (_NOTE, _OPERATOR, _OLD_RANGE) or name is None:
                self._beside(event, category)
            elif self.is_step(name):
                self.note(event, name)
            elif category != _NOTE:
                if self.times.add(event):
                    self.rows.label(Kind.COMPUTE, short_name(name))
                    self.threads.append(_hashable(event.tid))
            elif name.startswith(ENQUEUED):
                self.enqueued += 1
            elif name_rules.is_communication(name):
                if self.range_times.add(event):
                    self.ranges.label(Kind.COMMUNICATION, short_name(name))
            elif len(self.other_ranges) < _MAX_OTHER_RANGES:
                self.other_ranges.add(short_name(name))

    def _beside(self, event: Event, category: int | None) -> None:
        """Count what shows that the job ran on a device."""
        if category == _LAUNCH:
            self.launches += bool(_LAUNCHES_KERNEL.search(event.name or ""))
        elif category == _FOREIGN or (
            category is None
            and event.cat is not None
            and event.cat not in _KNOWN_BESIDE
            and event.args is not None
            and type(event.args.device) is int
        ):
            self.foreign[event.cat or ""] += 1

    @property
    def inexact(self) -> bool:
        return super().inexact or self.range_times.inexact


def _as_note(event: Event, name: str) -> tuple[Note, ...]:
    """A range of the host; empty if its times cannot be read."""
    start, duration = _nanoseconds(event.ts), _nanoseconds(event.dur)
    if start is None or duration is None:
        return ()
    return (Note(name, _hashable(event.tid), start, start + max(duration, 0), event.args),)


def _nanoseconds(time: Any) -> int | None:
    """Microseconds, as a number or as text, exactly converted to whole nanoseconds; None if that is impossible."""
    if isinstance(time, bool) or time is None:
        return None
    if isinstance(time, msgspec.Raw):
        time = bytes(time).decode(errors="replace")
    try:
        value = time * 1000 if isinstance(time, int) else round(Decimal(str(time).strip('" ')) * 1000)
    except (ValueError, InvalidOperation, OverflowError):
        return None
    return value if MIN_TIME_NS < value < MAX_TIME_NS else None


def short_name(name: str | None) -> str:
    """The name, cut if it is too long to keep by the million. ``clean_names`` does the rest later, once per name."""
    if name is None:
        return ""
    return name if len(name) <= safe_text.MAX_NAME_LENGTH else safe_text.clean(name)


def _hashable(value: Any) -> int | str:
    return value if isinstance(value, (int, str)) else str(value)
