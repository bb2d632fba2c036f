"""Reads an export of Nsight Systems (SQLite, or a folder of Parquet) into a ``Trace``, by the rules of Kineto files.

Each kind of record has a table: kernels, copies, fills, calls of the CUDA API, NVTX ranges. Times are whole
nanoseconds. A call and its kernel or copy share a correlation number within a process.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.kernels.impossible import CAPTURE_BEGINS, CAPTURE_ENDS, NO_LAUNCH, call_of
from overlap_callbacks.analysis.kernels.table import Kind, LaunchShape, size_of_copy
from overlap_callbacks.traces.archives import starts_with
from overlap_callbacks.traces.collect import ENQUEUED, Memo, Note, hashable, is_step, short_name
from overlap_callbacks.traces.collectives import UNKNOWN, RangeDetail
from overlap_callbacks.traces.device_events import (
    SYNCHRONIZES,
    WAITING_CALLS,
    DeviceEvents,
    device_number,
    unsigned,
)
from overlap_callbacks.traces.device_trace import trace_of_device
from overlap_callbacks.traces.files import SQLITE_MAGIC, TABLE_FILES, Document, Progress, TraceError
from overlap_callbacks.traces.nsys_tables import ROWS_AT_ONCE, Tables, open_tables
from overlap_callbacks.traces.trace import Trace

_KERNELS, _COPIES, _FILLS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
_CALLS, _GRAPHS = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_DIAGNOSTICS, _INFO = "DIAGNOSTIC_EVENT", 1
# What it says of events that are not in the file, and of what it did not trace, among other things that went wrong.
_LOST = re.compile(
    r"(?i)not all .*(?:events|data|records).*collected|\b(?:lost|losing|dropped|discarded|overflow\w*|incomplete)\b"
    r"|(?:events|data|records|buffers?)\b.*\b(?:missing|exceeded|full)\b"
)
_NONE = re.compile(r"[:=]\s*0\b|\b0 (?:\w+ )?(?:events|records|buffers)")
_NOT_TRACED = re.compile(
    r"(?i)\bcu(?:da|pti)\b.*\b(?:not?|fail\w*|unable|cannot|disabled)\b"
    r"|\b(?:not?|fail\w*|unable|cannot|disabled)\b.*\bcu(?:da|pti)\b"
)
_MAX_TEXT, _MAX_TEXTS = 200, 4
_TABLES = (
    _KERNELS, _COPIES, _FILLS, _CALLS, _GRAPHS, _DIAGNOSTICS, "ENUM_DIAGNOSTIC_SEVERITY_LEVEL", "NVTX_EVENTS",
    "StringIds", "TARGET_INFO_GPU",
)  # fmt: skip
# NCCL names its ranges after its functions.
_OF_NCCL = re.compile("nccl[A-Z]")
# NVTX ranges: pushed and popped on a thread, or started and ended on any; CUPTI's kinds of copies and memories.
_RANGES = (_PUSHED, _STARTED) = (59, 60)
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH",
               10: "PtoP"}  # fmt: skip
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static"}
# Ranges that count as steps if there is no ProfilerStep#.
_LIKE_STEPS = re.compile(r"(?i)^(?:train(?:ing)?[\s_-]*)?(?:step|iter|iteration|batch)[\s_#:=-]*(\d{1,18})$")
# Calls have the version of their interface in their names, as cudaDeviceSynchronize_v3020.
_VERSION = re.compile(r"(_v\d+)?(_pt[sd]z)?$")
# Host, process and thread in one number.
_HOST_SHIFT, _PID_SHIFT, _PID_MASK, _HOST_MASK = 48, 24, 0xFFFFFF, 0xFFFF


def is_nsys(file: Path) -> bool:
    """Whether a file is an export of Nsight Systems."""
    if not starts_with(file, SQLITE_MAGIC):
        return file.name in TABLE_FILES
    import sqlite3

    try:
        with open_tables(file, _TABLES) as tables:
            return not {_KERNELS, _CALLS, _DIAGNOSTICS, "META_DATA_EXPORT", "NVTX_EVENTS"}.isdisjoint(tables.columns)
    except sqlite3.Error:
        return False


class _Process(NamedTuple):
    """A process that launched kernels; ``host`` is None where no other host has one of this number."""

    number: int
    host: int | None

    @classmethod
    def of(cls, number: int) -> _Process:
        return cls(number >> _PID_SHIFT & _PID_MASK, number >> _HOST_SHIFT & _HOST_MASK)

    @property
    def name(self) -> str:
        return str(self.number) if self.host is None else f"{self.host}-{self.number}"

    def has(self, number: Any) -> bool:
        """Whether the number of a process or a thread in the file is of this one."""
        if type(number) is not int or number >> _PID_SHIFT & _PID_MASK != self.number:
            return False
        return self.host is None or number >> _HOST_SHIFT & _HOST_MASK == self.host


def processes_in(file: Path) -> list[str]:
    """What the processes that launched kernels are called, in order; empty if the file does not tell."""
    import sqlite3

    try:
        with open_tables(file, (_KERNELS,)) as tables:
            return [process.name for process in _processes(tables)]
    except (sqlite3.Error, TraceError):
        return []  # reading it tells why


def _processes(tables: Tables) -> list[_Process]:
    if "globalPid" not in tables.columns.get(_KERNELS, ()):
        return []
    rows = tables.rows(f"SELECT DISTINCT globalPid FROM {_KERNELS}")
    found = sorted({_Process.of(pid) for (pid,) in rows if type(pid) is int})
    hosts = Counter([process.number for process in found])
    return [process if hosts[process.number] > 1 else process._replace(host=None) for process in found]


def _named(file: Path, name: str, processes: Sequence[_Process]) -> _Process:
    """The process that a path names, which may have no kernels."""
    for process in processes:
        if process.name == name:
            return process
    if not name.isdecimal() or any([process.number == int(name) for process in processes]):
        raise TraceError(f"{file} holds {', '.join([process.name for process in processes])}, but no {name}")
    return _Process(int(name), None)


def read_nsys(
    file: Path,
    process: str | None = None,
    progress: Progress | None = None,
    steps: re.Pattern[str] | None = None,
    *,
    with_ranges: bool = False,
) -> Trace:
    """Read an export of Nsight Systems.

    Args:
        file: the SQLite file, or in a folder of Parquet one of ``TABLE_FILES``.
        process: the process to read, as ``processes_in`` calls it; None for all.
        progress: called with the number of rows read so far and of all rows.
        steps: matches the names of NVTX ranges that are steps. None for torch's ``ProfilerStep#``, or if there is none,
            names like ``iteration 3``.
        with_ranges: as for ``read_trace``.

    Raises:
        TraceError: the file cannot be read; or there is no room for temporary files.
    """
    import sqlite3

    try:
        with open_tables(file, _TABLES) as tables:
            known = _processes(tables)
            mine = None if process is None else _named(file, process, known)
            reader = _Reader(tables, mine, progress, steps, with_ranges)
            reader.read()
            names = _device_names(tables, mine)
            if not reader.events.rows:
                raise TraceError(_no_kernels(file, mine, tables))
            warnings = _losses(tables, known if mine is None else [mine])
    except sqlite3.Error as error:
        raise TraceError(f"{file} cannot be read as an export of Nsight Systems: {error}") from None
    head = {"deviceProperties": [{"id": number, "name": name} for number, name in names.items()]}
    path = file.parent if file.name in TABLE_FILES else file
    path = path if process is None else path / process
    document = Document(path, head, reader.problems, warnings=warnings)
    return trace_of_device(document, reader.events, reader.steps)


def _diagnostics(tables: Tables, processes: Sequence[_Process]) -> list[str]:
    """What Nsight Systems says itself of what it lost or did not trace, that of CUDA first; of any process if empty."""
    levels = {
        number: f"{name or ''} {label or ''}".lower()
        for number, name, label in tables.select("ENUM_DIAGNOSTIC_SEVERITY_LEVEL", ("id", "name", "label"))
    }
    found: dict[str, None] = {}
    for level, text, pid in tables.select(_DIAGNOSTICS, ("severity", "text", "globalPid")):
        of_process = type(pid) is int and pid > 0 and _Process.of(pid).number
        if not isinstance(text, str) or (of_process and processes and not any([of.has(pid) for of in processes])):
            continue
        says = levels.get(level, "info" if level == _INFO else "")
        is_lost = bool(_LOST.search(text)) and not _NONE.search(text)
        if is_lost or (_NOT_TRACED.search(text) and not ("info" in says or "verbose" in says)):
            found[safe_text.clean(" ".join(text.split()))[:_MAX_TEXT]] = None
    return sorted(found, key=lambda text: "cuda" not in text.lower())[:_MAX_TEXTS]


def _losses(tables: Tables, processes: Sequence[_Process]) -> list[str]:
    """What a file with kernels of these processes may lack."""
    texts = [text for text in _diagnostics(tables, processes) if not text.startswith("No CUDA events")]
    if not texts:
        return []
    return [f"Nsight Systems says that it lost events, so kernels or ranges may be missing: {' '.join(texts)} [OC755]"]


def _no_kernels(file: Path, process: _Process | None, tables: Tables) -> str:
    """Why an export cannot be read."""
    where = f" of process {process.name}" if process is not None else ""
    texts = _diagnostics(tables, () if process is None else (process,))
    says = f"; Nsight Systems says: {' '.join(texts)}" if texts else ""
    return (
        f"{file} is an export of Nsight Systems, but holds no CUDA kernels{where}: profile with nsys profile "
        f"--trace=cuda,nvtx{says}"
    )


class _Row(NamedTuple):
    """A kernel, copy or fill; where and when it ran as in the file."""

    kind: Kind
    name: str
    shape: LaunchShape | str
    start: Any
    end: Any
    device: Any
    stream: Any
    correlation: Any


@dataclass
class _Reader:
    """Turns the rows of one process into the events of a Kineto file; arguments as of ``read_nsys``.

    Attributes:
        events: the kernels, copies, launches and ranges.
        problems: faults and doubts.
    """

    tables: Tables
    process: _Process | None
    progress: Progress | None
    steps: re.Pattern[str] | None
    with_ranges: bool

    def __post_init__(self) -> None:
        self.events = DeviceEvents(self.steps, exact=True, with_ranges=self.with_ranges)
        self.problems: list[str] = []
        tables = self.tables
        # By their numbers in the file.
        self._texts: Memo[Any, str] = Memo(
            lambda number: str(next(tables.select("StringIds", ("value",), "WHERE id = ?", number), ("",))[0])
        )
        self._shapes: Memo[tuple[Any, ...], LaunchShape | str] = Memo(_shape)

    def read(self) -> None:
        """Read everything."""
        self._rows()
        self._launches()
        self._waits()
        self._ranges()
        graphs = sum(1 for _ in self.tables.select(_GRAPHS, ("start",)))
        if graphs:
            self.problems.append(
                f"{graphs} CUDA graphs ran whose kernels are not in the file: profile with "
                "nsys profile --cuda-graph-trace=node [OC751]"
            )

    def _kernels(self) -> Iterator[_Row]:
        columns = (
            "start", "end", "deviceId", "streamId", "correlationId", "demangledName", "shortName", "gridX", "gridY",
            "gridZ", "blockX", "blockY", "blockZ", "registersPerThread", "staticSharedMemory", "dynamicSharedMemory",
        )  # fmt: skip
        for start, end, device, stream, correlation, name, short, *launch in self._of_process(_KERNELS, columns):
            text, shape = self._texts[name if name is not None else short], self._shapes[tuple(launch)]
            yield _Row(Kind.COMPUTE, text, shape, start, end, device, stream, correlation)

    def _copies(self) -> Iterator[_Row]:
        where = ("start", "end", "deviceId", "streamId", "correlationId")
        kinds = ("copyKind", "srcKind", "dstKind", "bytes")
        for *place, kind, source, target, size in self._of_process(_COPIES, (*where, *kinds)):
            between = f"{_MEMORIES.get(source, 'Unknown')} -> {_MEMORIES.get(target, 'Unknown')}"
            text = f"Memcpy {_COPY_KINDS.get(kind, 'Unknown')} ({between})"
            yield _Row(Kind.COPY, text, size_of_copy(size), *place)
        for *place, kind in self._of_process(_FILLS, (*where, "memKind")):
            yield _Row(Kind.COPY, f"Memset ({_MEMORIES.get(kind, 'Unknown')})", "", *place)

    def _rows(self) -> None:
        """The kernels, copies and fills."""
        events, found = self.events, itertools.chain(self._kernels(), self._copies())
        while rows := list(itertools.islice(found, ROWS_AT_ONCE)):
            rows = list(itertools.compress(rows, events.rows.keep_ns(*[(row.start, row.end) for row in rows])))
            devices = [device_number(row.device) for row in rows]
            events.rows.label(
                kind=[row.kind for row in rows],
                name=[events.names[short_name(row.name)] for row in rows],
                correlation=unsigned([row.correlation if type(row.correlation) is int else 0 for row in rows]),
                shape=[events.shapes[row.shape] for row in rows],
                lane=[events.lanes[device, hashable(row.stream)] for device, row in zip(devices, rows, strict=True)],
                device=devices,
                info=[-1] * len(rows),
                num_bytes=[UNKNOWN] * len(rows),
                sequence=[UNKNOWN] * len(rows),
            )

    def _launches(self) -> None:
        """The calls that launched a row, or should have; there are many other calls."""
        launched = " UNION ALL ".join(
            f"SELECT correlationId FROM {table}"
            for table in (_KERNELS, _COPIES, _FILLS)
            if "correlationId" in self.tables.columns.get(table, ())
        )
        events, calls = self.events, self._calls_of(call_of)
        where = f"WHERE correlationId IN ({launched})" if launched else ""
        if where and calls:
            where += f" OR nameId IN ({', '.join(map(str, calls))})"
        columns = ("start", "end", "globalTid", "correlationId", "nameId", "returnValue")
        for start, end, thread, correlation, name, failed in self.tables.select(_CALLS, columns, where):
            call = calls.get(name, NO_LAUNCH)
            if not self._is_mine(thread) or (failed and call):
                continue
            if call in (CAPTURE_BEGINS, CAPTURE_ENDS):
                events.captures.add(start, end, begins=call == CAPTURE_BEGINS)
            elif type(correlation) is int and correlation:
                (number,), of_thread = unsigned([correlation]), events.threads[hashable(thread)]
                events.launches.add(start, end, correlation=number, thread=of_thread, call=call)

    def _calls_of(self, kind: Callable[[str], Any]) -> dict[int, Any]:
        """The kinds of relevant calls, by the numbers of their names."""
        if "nameId" not in self.tables.columns.get(_CALLS, ()):
            return {}
        names = self.tables.select("StringIds", ("id", "value"))
        found = {number: kind(_VERSION.sub("", name)) for number, name in names if isinstance(name, str)}
        return {number: of for number, of in found.items() if of and type(number) is int}

    def _waits(self) -> None:
        """The calls in which the host waits for the device."""
        waiting = self._calls_of(lambda name: (name in WAITING_CALLS) + (name in SYNCHRONIZES))
        if not waiting:
            return
        where = f"WHERE nameId IN ({', '.join(map(str, waiting))})"
        for start, end, thread, name in self.tables.select(_CALLS, ("start", "end", "globalTid", "nameId"), where):
            if self._is_mine(thread):
                self.events.waits.add(start, end)
                if waiting.get(name) == 2:
                    self.events.syncs.add(start, end)

    def _ranges(self) -> None:
        """The NVTX ranges of steps and collectives."""
        notes, like = list[Note](), list[Note]()
        has_ours, issued = False, 0
        for name, thread, start, end, kind in self._named_ranges():
            if name.startswith(ENQUEUED):
                self._annotate(name, thread, start, end)
            elif _OF_NCCL.match(name):
                has_ours = True
            elif re.match(name_rules.ON_HOST, name):
                issued += not self._is_timed(name, start, end)
            elif is_step(name, self.steps):
                notes.append(Note(name, thread, start, end))
            elif self.steps is None and _LIKE_STEPS.match(name):
                like.append(Note(name, thread, start, end))
            elif kind == _PUSHED and self.with_ranges:  # others need not nest
                number, of_thread = self.events.range_numbers[name], self.events.threads[hashable(thread)]
                self.events.ranges.add(start, end, thread=of_thread, name=number)
        if has_ours and not self.events.annotations:
            # NCCL's ranges lie within torch's, so they only count without torch's.
            for name, thread, start, end, _ in self._named_ranges():
                if _OF_NCCL.match(name):
                    self._annotate(name, thread, start, end)
        if not notes and like:
            notes, self.steps = like, _LIKE_STEPS
            self.problems.append(
                f"steps are the NVTX ranges with names like {safe_text.clean(notes[0].name)}; --step REGEX names "
                "others [OC752]"
            )
        elif not notes:
            self.problems.append(
                "no NVTX range names a step: the file counts as a whole; --step REGEX names steps [OC753]"
            )
        self.events.notes = notes
        self.problems += _untimed(issued)

    def _is_timed(self, name: str, start: int, end: int) -> bool:
        """Add a collective on the host if its range has its time; returns whether it has."""
        if "," in name:  # torch's own, with the operator's number, ends on another thread than it began on
            return False
        self.events.on_host.add(start, end, name=self.events.on_host_numbers[name])
        return True

    def _annotate(self, name: str, thread: Any, start: int, end: int) -> None:
        detail, of_thread = self.events.details[RangeDetail(name)], self.events.threads[hashable(thread)]
        self.events.annotations.add(start, end, thread=of_thread, detail=detail, num_bytes=UNKNOWN)

    def _named_ranges(self) -> Iterator[tuple[str, Any, int, int, int]]:
        """Name, thread, start, end and kind of each NVTX range of the process."""
        columns = ("start", "end", "text", "textId", "globalTid", "eventType")
        for start, end, text, number, thread, kind in self.tables.select("NVTX_EVENTS", columns):
            if kind in _RANGES and self._is_mine(thread) and type(start) is int and type(end) is int:
                yield text if isinstance(text, str) else self._texts[number], thread, start, max(start, end), kind

    def _of_process(self, table: str, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
        known = table in self.tables.columns
        total = next(self.tables.rows(f"SELECT MAX(rowid) FROM {table}"))[0] if known and self.progress else 0
        for done, (process, *row) in enumerate(self.tables.select(table, ("globalPid", *columns))):
            if self.progress and total and done % ROWS_AT_ONCE == 0:
                self.progress(done, total)
            if process is None or self._is_mine(process):
                yield tuple(row)

    def _is_mine(self, number: Any) -> bool:
        return self.process is None or self.process.has(number)


def _untimed(number: int) -> Iterator[str]:
    if number:
        yield f"NVTX ranges of {number} collectives on the host end too early: their time is not known [OC754]"


def _shape(launch: tuple[Any, ...]) -> LaunchShape | str:
    *sizes, registers, static, dynamic = launch
    known: dict[str, Any] = {"grid": sizes[:3], "block": sizes[3:]}
    if type(registers) is int:
        known["registers per thread"] = registers
    if type(static) is int and type(dynamic) is int:
        known["shared memory"] = static + dynamic
    return LaunchShape.of(known) or ""


def _device_names(tables: Tables, process: _Process | None) -> dict[int, str]:
    """The names of the devices by their numbers; of a process, those of its host."""
    rows = list(tables.select("TARGET_INFO_GPU", ("vmId", "id", "name")))
    host = None if process is None else process.host
    own = [row for row in rows if type(row[0]) is int and _Process.of(row[0]).host == host]
    return {number: name for _, number, name in own or rows if type(number) is int and isinstance(name, str)}
