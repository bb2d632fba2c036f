"""Collects the required events of a trace file.

If it has device kernels, these are kernels, launches and torch's annotations (``device_events``), else operators and
ranges of the host (``host``). Files have millions of events, so events of a piece are sorted by category, and each
property is read from all events of a category at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.kernels.table import StringTable
from overlap_callbacks.traces.columns import Array
from overlap_callbacks.traces.events import MAX_TIME_NS, Args, Event, EventColumns, nanoseconds
from overlap_callbacks.traces.stream import EventStream

# Kineto's categories, of today and of 2021. Then, ranges were operators too.
ROW, LAUNCH, NOTE, OPERATOR, OLD_RANGE, PYTHON, FOREIGN, MARK, BESIDE, UNKNOWN_CATEGORY = range(10)
KERNELS = frozenset({"kernel", "Kernel"})
CATEGORIES: dict[str | None, int] = {
    **dict.fromkeys(KERNELS, ROW),
    "gpu_memcpy": ROW, "gpu_memset": ROW, "Memcpy": ROW, "Memset": ROW,
    "cuda_runtime": LAUNCH, "cuda_driver": LAUNCH, "hip_runtime": LAUNCH, "Runtime": LAUNCH,
    "xpu_runtime": LAUNCH, "xpu_driver": LAUNCH, "privateuse1_runtime": LAUNCH, "privateuse1_driver": LAUNCH,
    "user_annotation": NOTE,
    "cpu_op": OPERATOR, "Operator": OLD_RANGE, "python_function": PYTHON,
    # Rows of devices for which compute and communication cannot be distinguished.
    "mtia_ccp_events": FOREIGN, "mtia_insight": FOREIGN, "hpu_op": FOREIGN, "collective_comm": FOREIGN,
    None: MARK,
    # Other categories of the host, or of nothing that runs by itself. An event of any other that names a device is
    # foreign.
    **dict.fromkeys(
        (
            "ac2g", "async_cpu_to_gpu", "async_gpu", "fwdbwd", "Trace", "overhead", "cpu_instant_event",
            "gpu_user_annotation", "cuda_sync", "cuda_profiler_range", "gpu_pm_counter", "external_correlation",
            "mtia_runtime", "glow_runtime",
        ),
        BESIDE,
    ),
}  # fmt: skip
# Calls of these launch a kernel, by the host libraries of NVIDIA, AMD and Intel.
_LAUNCHES_KERNEL = re.compile(r"LaunchKernel|LaunchCooperativeKernel|KernelLaunch")
# Kineto's mark of when all that the device did had been recorded.
_END = "Record Window End"
# Torch's ranges of the collectives of a device. Of these the host sees only that it enqueued them.
ENQUEUED = ("nccl:", "rccl:", "xccl:", "hccl:", "oneccl:")

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Note(NamedTuple):
    """A range of the host that is a step. Without a valid time, it ends before it starts."""

    name: str
    thread: int | str
    start_ns: int
    end_ns: int


class Numbers(dict[_Key, int]):
    """Numbers keys in order of appearance."""

    def __missing__(self, key: _Key) -> int:
        number = self[key] = len(self)
        return number


class Memo(dict[_Key, _Value]):
    """Values of keys, cached; ``new`` computes that of a new key.

    ``new`` must not refer to the object that holds this: such a cycle would keep all collected data in memory.
    """

    def __init__(self, new: Callable[[_Key], _Value]) -> None:
        self._new = new

    def __missing__(self, key: _Key) -> _Value:
        value = self[key] = self._new(key)
        return value


class EventCollector:
    """Collects the events of one kind of file, one piece of the file at a time.

    Arguments are those of ``EventColumns`` for ``rows``, and a pattern for the names of steps.

    Attributes:
        rows, names: the kernels (on CPU, operators), and their distinct names.
        threads: numbers of the host's threads; an id as a number or as text is the same thread.
        notes: ranges of the host that are steps.
        foreign: number of events of unsupported devices, by category.
        places, launching, stepping: process, device and ``args.rank`` of the rows, processes that launch, and process
            and ``args.rank`` of steps, on the host of some operators and of collectives too.
    """

    def __init__(
        self, steps: re.Pattern[str] | None, *, exact: bool, keep_untimed: bool = False, **numbers: str
    ) -> None:
        self._exact = exact
        self._all_events: list[EventColumns] = []
        self.rows = self._events(keep_untimed=keep_untimed, **numbers)
        self.names = names = StringTable()
        threads = StringTable()
        self.threads: Memo[int | str, int] = Memo(lambda thread: threads[str(thread)])
        self.notes: list[Note] = []
        self.foreign: Counter[str] = Counter()
        self.places: set[tuple[int | str, int, int | str]] = set()
        self.launching: set[int | str] = set()
        self.stepping: set[tuple[int | str, int | str]] = set()
        self._ended_ns = -1
        self._sorted: list[list[Event]] = [[] for _ in range(UNKNOWN_CATEGORY + 1)]
        self._sort = {
            category: self._sorted[group].append if group != BESIDE else None for category, group in CATEGORIES.items()
        }
        self._name_of: Memo[str | None, int] = Memo(lambda name: names[short_name(name)])
        self._is_step: Memo[str | None, bool] = Memo(lambda name: bool(name) and is_step(name or "", steps))

    def collect(self, events: list[Event], stream: EventStream) -> None:
        """Keep the required events of one piece of a stream."""
        sort, unknown = self._sort.get, self._sorted[UNKNOWN_CATEGORY].append
        for event in events:
            add = sort(event.cat, unknown)
            if add is not None:
                add(event)
        ends_ns = [nanoseconds(event.ts) or -1 for event in self._sorted[MARK] if event.name == _END]
        self._ended_ns = max(self._ended_ns, *ends_ns, -1)
        self._collect(stream)
        for group in self._sorted:
            group.clear()

    def _collect(self, stream: EventStream) -> None:
        """Keep the required parts of the sorted events."""
        raise NotImplementedError

    def ended_ns(self, starts_ns: Array) -> int:
        """When the profile had ended; beyond all clocks if that is not known, or before the last of some starts."""
        started_ns = max([int(starts_ns.max(initial=0)), *[note.start_ns for note in self.notes]])
        return self._ended_ns if self._ended_ns > started_ns else MAX_TIME_NS

    @property
    def inexact(self) -> bool:
        """Whether nanoseconds were lost, so that the file must be read again with times as text."""
        return any([events.inexact for events in self._all_events])

    def _events(self, *, keep_untimed: bool = False, **numbers: str) -> EventColumns:
        """Columns for one more kind of events, see ``EventColumns``."""
        self._all_events.append(EventColumns(self._exact, keep_untimed=keep_untimed, **numbers))
        return self._all_events[-1]

    def _threads_of(self, events: list[Event]) -> Iterable[int]:
        """The number of each event's thread."""
        return map(self.threads.__getitem__, all_hashable([event.tid for event in events]))

    def _durations(self, group: int) -> list[Event]:
        """The events of a group that have durations."""
        return [event for event in self._sorted[group] if event.ph == "X"]

    def _note(self, events: list[Event], stream: EventStream) -> None:
        """Keep steps."""
        for event in events:
            self.notes.append(_as_note(event))
            self._note_place(event, stream)

    def _note_place(self, event: Event, stream: EventStream) -> None:
        """Note the process and rank of an event; arguments that have none are not looked at."""
        (args,) = stream.args_of([event], Args) if b'"rank"' in bytes(event.args) else (None,)
        self.stepping.add((hashable(event.pid), hashable(None if args is None else args.rank)))


def is_step(name: str, steps: re.Pattern[str] | None = None) -> bool:
    """Whether a range of this name is a step: torch's ``ProfilerStep#``, or a name that ``steps`` matches."""
    return name.startswith("ProfilerStep#") if steps is None else steps.search(name) is not None


def launches_kernel(name: str | None) -> bool:
    """Whether a host call of this name launches a kernel."""
    return bool(_LAUNCHES_KERNEL.search(name or ""))


def _as_note(event: Event) -> Note:
    start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
    if start is None or duration is None:
        start, duration = 0, -1
    return Note(event.name or "", hashable(event.tid), start, start + duration)


def short_name(name: str | None) -> str:
    """The name, cut if very long; ``safe_text.clean`` does the rest later."""
    if name is None:
        return ""
    return name if len(name) <= safe_text.MAX_NAME_LENGTH else safe_text.clean(name)


def hashable(value: Any) -> int | str:
    """A thread or stream as a key: text, unless it is a number."""
    return value if isinstance(value, (int, str)) else str(value)


def all_hashable(values: list[Any]) -> list[Any]:
    return values if {*map(type, values)} <= {int, str} else list(map(hashable, values))
