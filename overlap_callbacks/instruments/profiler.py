"""Takes a live profile: one session of ``torch.profiler``, whose events become a kernel table."""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.autograd.profiler

from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.host import host_kernels
from overlap_callbacks.analysis.kernels.impossible import (
    CAPTURE_BEGINS,
    CAPTURE_ENDS,
    call_of,
    captures_of,
    missing_kernels,
    possible,
    without_time,
)
from overlap_callbacks.analysis.kernels.table import (
    Indices,
    KernelTable,
    KernelTableBuilder,
    Kind,
    LaunchShape,
    device_kernels,
    size_of_copy,
    step_of,
)
from overlap_callbacks.instruments.other_profilers import other_profilers

_torch_autograd: Any = torch.autograd
_torch_profiler: Any = torch.autograd.profiler
_UINT64 = 2**64 - 1

# Number of events read between pauses, about a millisecond's worth, and the pause.
_BURST = 512
_PAUSE_S = 0.0005
_ACTIVITY = operator.methodcaller("activity_type")
_THREAD, _NAME = operator.methodcaller("device_resource_id"), operator.methodcaller("name")
_START, _DURATION = operator.methodcaller("start_ns"), operator.methodcaller("duration_ns")


def _record_on_this_thread(record: bool) -> None:
    """Set whether operators of this thread, and of autograd's threads on its behalf, are recorded."""
    _torch_autograd._enable_record_function(record)


# Below half of Kineto's limit. A launch has two records, about 270 bytes together.
_MOST_BYTES, _BYTES_A_RECORD = 64 * 2**20, 200
# One step and its warm-up, in each mode.
FIRST_STEPS = 4


def may_end_the_process(torch_version: str, cuda_version: str | None) -> bool:
    """Whether a profile that reaches Kineto's limit may end the process with SIGSEGV.

    Kineto of torch 2.13 denies CUPTI a buffer at its limit, and CUPTI before CUDA 12.9 crashes on that (from Kineto's
    source and its issue 1275; not reproduced here). Later versions may have the fix, but are treated the same.
    """
    if cuda_version is None:
        return False
    release, cuda = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (torch_version, cuda_version))
    return release >= [2, 13] and cuda < [12, 9]


def threads_hold_buffers(cuda_version: str | None) -> bool:
    """Whether each thread that calls CUDA holds one of CUPTI's buffers while the first profile of a process runs.

    The default since CUDA 13; Kineto changes it only when its first session ends. So in jobs with many process groups,
    whose watchdogs call CUDA, the buffers of the first profile may be full at once (from Kineto's source).
    """
    return cuda_version is not None and int(cuda_version.partition(".")[0]) >= 13


class RecordBound:
    """Limits the steps recorded by one session, so that it stays below Kineto's limit if reaching that is unsafe."""

    def __init__(self, *, applies: bool) -> None:
        self.applies = applies
        self._records_a_step = 0.0

    def learn(self, num_records: int, num_steps: int) -> None:
        """Learn from a session how many records its steps had."""
        if num_steps:
            self._records_a_step = max(self._records_a_step, num_records / num_steps)

    @property
    def steps(self) -> float:
        if not self.applies:
            return math.inf
        if not self._records_a_step:
            return FIRST_STEPS
        return _MOST_BYTES / _BYTES_A_RECORD // self._records_a_step


# Shared by the process: each window has its own session.
record_bound = RecordBound(applies=may_end_the_process(torch.__version__, torch.version.cuda))


class Profile:
    """One session of ``torch.profiler``, with minimal settings.

    On an accelerator it records only device activity (no operators, shapes or stacks); on CPU only operators. Steps are
    identified by their start and end in host time: the profiler's clock is aligned to the host's.

    Attributes:
        taken_over: whether the session ended because another profiler was prepared or started.
        truncated: whether Kineto stopped recording before the session ended, with too many buffers in flight (128 MiB),
            so that kernels are missing. torch before 2.13 has no such limit.
        session: torch's profiler; None once its events were read.
        bounds: host start and end of each recorded step, as of ``time.time_ns``.
    """

    def __init__(self, on_cuda: bool) -> None:
        activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
        self.session: torch.profiler.profile | None = torch.profiler.profile(
            activities=[activity], experimental_config=_config(on_cuda)
        )
        self._on_cuda = on_cuda
        self._thread = threading.get_native_id()
        self.bounds: list[tuple[int, int]] = []
        self._quiet_ns: list[int] = []
        self._step_start = 0
        self._not_recording = False  # the training thread is not recording
        self.taken_over = False
        self.truncated = False
        self._ended_ns: int | None = None

    @staticmethod
    def available() -> bool:
        """Whether no other profiler, such as the user's, is running in this process or about to."""
        # The first check covers all sessions of this thread; the second those of all threads, if started in Python.
        running = torch._C._autograd._profiler_enabled() or _torch_profiler._is_profiler_enabled
        return not (running or other_profilers.prepared)

    def start(self) -> None:
        """Begin the session. If torch's profiler raises, it is as if there had been no session."""
        assert self.session is not None
        other_profilers.watch()
        try:
            with other_profilers.starting(self):
                self.session.start()
        except Exception:
            other_profilers.unwatch()
            _forget_session()
            raise

    def begin_step(self, record: bool = True) -> None:
        """Mark the start of a step. Unless ``record``, a CPU profile leaves its operators out.

        Each operator costs the training thread about 4 us when the session ends, and the reading thread about 2.
        """
        # Once another profiler runs, leave nothing out: the operators are its own now.
        if not (record or self._on_cuda or self.taken_over):
            self._not_recording = True
            _record_on_this_thread(False)
        self._step_start = time.time_ns()

    def end_step(self, quiet: bool = False) -> int:
        """Mark the end of the current step. Returns its index among the recorded ones, -1 if it is not one.

        ``quiet``: every collective issued so far is complete. Host ranges that end later are then cut: Gloo wakes the
        waiting threads before it ends a collective's range, and its thread may lose its core.
        """
        end_ns = time.time_ns()
        if quiet:
            self._quiet_ns.append(end_ns)
        if self._not_recording:
            self._resume_recording()
            return -1
        self.bounds.append((self._step_start, end_ns))
        return len(self.bounds) - 1

    @property
    def is_full(self) -> bool:
        """Whether no more steps may be recorded."""
        return self._on_cuda and len(self.bounds) >= record_bound.steps

    def stop(self, *, wait: bool = True) -> bool:
        """End the session. Returns False if it had to end earlier, for another profiler.

        ``wait``: for the device, as torch does; what it still runs is lost otherwise. A collective of a rank that is
        gone may hang there, and with it the end of the job.

        If torch's profiler raises, the session has ended too, and its events are lost.
        """
        self._resume_recording()
        if other_profilers.claim(self):
            if not wait and self.session is not None and self.session.profiler is not None:
                self.session.profiler.use_device = None
            try:
                self._end()
            finally:
                other_profilers.unwatch()
        return not self.taken_over

    def give_way(self) -> None:
        """End the session at once, because another profiler starts. Its events are lost."""
        self.taken_over = True
        self._resume_recording()
        try:
            self._end()
        finally:
            other_profilers.unwatch()

    def _resume_recording(self) -> None:
        """Make the training thread record again, for other profilers. No other thread can."""
        if self._not_recording and threading.get_native_id() == self._thread:
            _record_on_this_thread(True)  # before the flag: a signal handler may raise in between
            self._not_recording = False

    def _end(self) -> None:
        assert self.session is not None
        # Only a device profile sets the flag anew; a CPU profile would read an earlier session's.
        self.truncated = self._on_cuda and _kineto_stopped()
        try:
            self.session.stop()
        except Exception:
            _forget_session()
            raise
        self._ended_ns = time.time_ns()
        # Work still queued on the device at the first check is recorded while the session stops.
        self.truncated = self.truncated or (self._on_cuda and _kineto_stopped())

    def kernels(self) -> KernelTable:
        """Read the events. May be called once, after ``stop``, on any thread. Raises what torch's profiler raises."""
        assert self.session is not None
        assert self.session.profiler is not None
        results: Any = self.session.profiler.kineto_results
        _let_others_run()
        events = results.events()
        self.session = None
        del results
        record_bound.learn(len(events), len(self.bounds))
        return read_events(
            events, self.bounds, self._thread, self._quiet_ns, on_device=self._on_cuda, ended_ns=self._ended_ns
        )


def _forget_session() -> None:
    """Clean up after torch's profiler raised: no profiler runs, but its flag in Python may still be set."""
    if not torch._C._autograd._profiler_enabled():
        _torch_profiler._is_profiler_enabled = False


def read_events(
    events: list[Any],
    bounds: Sequence[tuple[int, int]],
    thread: int,
    quiet_ns: Sequence[int] = (),
    *,
    on_device: bool = False,
    ended_ns: int | None = None,
) -> KernelTable:
    """Turn Kineto's events into a kernel table, in short bursts: reading an event holds the interpreter.

    Args:
        events: removed from the list as they are read: freeing all at once would take long too.
        bounds: host start and end of each profiled step, as of ``time.time_ns``.
        thread: native identifier of the training thread, whose operators are the compute of a CPU job.
        quiet_ns: ascending host times at which no collective was in flight; ranges of a CPU job are cut there.
        ended_ns: end of the session, after which no kernel ends; None if not known.
        on_device: the profile is of a device: without its kernels the table has no rows. False for a CPU job.
    """
    device, ranges, launches = _DeviceRows(), KernelTableBuilder(), _Launches()
    host = _HostOperators(thread)
    for burst in _bursts(events):
        unclear = burst if on_device else host.take(burst)
        for event, activity in zip(unclear, _activities(unclear), strict=True):
            if activity == "kernel":
                device.add(event, Kind.COMPUTE)
            elif activity in ("gpu_memcpy", "gpu_memset"):
                device.add(event, Kind.COPY)
            elif activity in ("cuda_runtime", "cuda_driver"):
                launches.add(event)
            elif not on_device and event.is_async():
                _add_range(ranges, event)
            elif not on_device and activity == "cpu_op":
                host.add([event], [event.name()])
    rows = device.rows
    if on_device or len(rows):
        rows.clean_names()
        correlation = np.array(rows.correlation, dtype=np.uint64)
        launched_ns, from_graph = launches.of(correlation)
        wrong, of_launch = without_time(rows.intervals, launched_ns)
        launched_ns[of_launch] = -1
        kernels = device_kernels(rows, launched_ns if len(launches) else None, bounds, from_graph)
        lost = step_of(launches.lost_ns(correlation), bounds)
        return possible(kernels, np.array(device.number), correlation, wrong, lost, len(bounds), ended_ns)
    for rows in (host.rows, ranges):
        rows.clean_names()
    return host_kernels(host.rows, ranges, bounds, quiet_ns)


def _bursts(events: list[Any]) -> Iterator[list[Any]]:
    """The events in order, in bursts; other threads run in between. Empties the list."""
    events.reverse()
    while events:
        burst = events[: -_BURST - 1 : -1]
        del events[-_BURST:]
        yield burst
        del burst  # before other threads run
        _let_others_run()


def _let_others_run() -> None:
    """Release the interpreter to waiting threads. Without this a thread waits 5 ms each time it wants it back."""
    time.sleep(_PAUSE_S)


def _add_range(rows: KernelTableBuilder, event: Any) -> None:
    _add_times(rows, event)
    rows.label(Kind.COMMUNICATION, event.name(), lane=event.device_resource_id())


def _add_times(rows: KernelTableBuilder, event: Any) -> None:
    start = event.start_ns()
    rows.start.append(start)
    rows.end.append(start + event.duration_ns())


class _HostOperators:
    """The operators of the training thread: many, so ``rows`` has only their names and times.

    They are read by columns: for each event the interpreter only makes four calls into torch.
    """

    def __init__(self, thread: int) -> None:
        self._is_own = thread.__eq__
        self._names = _OperatorNames()
        self.rows = KernelTableBuilder()

    def take(self, events: list[Any]) -> list[Any]:
        """Append the events that are operators by name. Returns the others."""
        texts = list(map(sys.intern, map(_NAME, events)))  # each event returns a new string
        known = list(map(self._names.__getitem__, texts))
        self.add(list(itertools.compress(events, known)), list(itertools.compress(texts, known)))
        return list(itertools.compress(events, map(operator.not_, known)))

    def add(self, events: list[Any], texts: list[str]) -> None:
        """Append operators of the training thread."""
        own = list(map(self._is_own, map(_THREAD, events)))
        if not all(own):
            events, texts = list(itertools.compress(events, own)), list(itertools.compress(texts, own))
        started = list(map(_START, events))
        self.rows.start.extend(started)
        self.rows.end.extend(map(operator.add, started, map(_DURATION, events)))
        self.rows.name.extend(map(self.rows.names.__getitem__, texts))


class _OperatorNames(dict[str, bool]):
    """Whether a name is that of one of torch's own operators, which need no further checks."""

    def __missing__(self, name: str) -> bool:
        self[name] = known = name.startswith("aten::")
        return known


# The metadata of a launch shape, or of a copy's size. The rest, such as the correlation number, differs in every event.
_SHAPE = re.compile(
    r'("(?:grid|block|registers per thread|shared memory|blocks per SM|bytes)"): *(\[[^\]]*\]|[^\s,}]+)'
)


def _no_device() -> int:
    return 0


class _DeviceRows:
    """The kernels, copies and fills of a device, with their launch shapes."""

    def __init__(self) -> None:
        self.rows = KernelTableBuilder()
        self.number = array("q")  # device index of each
        self._shapes: dict[tuple[tuple[str, str], ...], LaunchShape | str | None] = {}

    def add(self, event: Any, kind: Kind) -> None:
        _add_times(self.rows, event)
        self.number.append(getattr(event, "device_index", _no_device)())
        shape = self._launch_shape(event)
        self.rows.label(kind, event.name(), event.correlation_id(), shape, lane=event.device_resource_id())

    def _launch_shape(self, event: Any) -> LaunchShape | str | None:
        """A kernel's launch shape, or a copy's size; None before about torch 2.10, which does not give it.

        The metadata is a fragment of JSON, without braces. Equal ones are parsed once.
        """
        if not hasattr(event, "metadata_json"):
            return None
        parts = tuple(_SHAPE.findall(event.metadata_json()))
        if parts not in self._shapes:
            try:
                metadata = json.loads("{" + ", ".join(f"{key}: {value}" for key, value in parts) + "}")
            except ValueError:
                metadata = {}
            self._shapes[parts] = LaunchShape.of(metadata) or size_of_copy(metadata.get("bytes")) or None
        return self._shapes[parts]


class _Launches:
    """The host's calls of the device's runtime and driver: several per kernel."""

    def __init__(self) -> None:
        self._correlation, self._time_ns, self._is_graph = array("Q"), array("q"), array("b")
        self._end_ns, self._thread, self._call = array("q"), array("q"), array("b")
        self._calls: dict[str, int] = {}

    def add(self, event: Any) -> None:
        self._correlation.append(event.correlation_id() & _UINT64)
        self._time_ns.append(event.start_ns())
        name = event.name()
        self._is_graph.append("GraphLaunch" in name)  # cudaGraphLaunch, hipGraphLaunch, with suffixes
        if name not in self._calls:
            self._calls[name] = call_of(name)
        self._call.append(self._calls[name])
        self._end_ns.append(self._time_ns[-1] + event.duration_ns())
        self._thread.append(event.device_resource_id())

    def __len__(self) -> int:
        return len(self._correlation)

    def of(self, wanted: npt.NDArray[np.uint64]) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """When the host launched each kernel, -1 if unknown, and whether a graph launch did; shape (n,) each.

        ``wanted``: the correlation number that each kernel shares with its launch, 0 for none.
        """
        launched_ns, from_graph = np.full(len(wanted), -1, dtype=np.int64), np.zeros(len(wanted), dtype=bool)
        if len(self):
            correlation = np.array(self._correlation, dtype=np.uint64)
            order = np.argsort(correlation, kind="stable")
            launch = order[np.minimum(np.searchsorted(correlation[order], wanted), len(order) - 1)]
            known = (correlation[launch] == wanted) & (wanted != 0)
            launched_ns[known] = np.array(self._time_ns, dtype=np.int64)[launch[known]]
            from_graph[known] = np.array(self._is_graph, dtype=bool)[launch[known]]
        return launched_ns, from_graph

    def lost_ns(self, of_kernels: npt.NDArray[np.uint64]) -> Indices:
        """When the host launched the kernels missing from the profile. ``of_kernels``: numbers of those it has."""
        call, begun_ns = np.array(self._call, dtype=np.uint8), np.array(self._time_ns, dtype=np.int64)
        has_row = np.isin(np.array(self._correlation, dtype=np.uint64), of_kernels[of_kernels != 0])
        captures = (call == CAPTURE_BEGINS) | (call == CAPTURE_ENDS)
        found = missing_kernels(
            Intervals(begun_ns, np.array(self._end_ns, dtype=np.int64)), call, np.array(self._thread), has_row,
            captures_of(begun_ns[captures], call[captures] == CAPTURE_BEGINS),
        )  # fmt: skip
        # A kernel without a number may belong to any launch.
        is_sure = has_row.any() and len(found.launches) > int((of_kernels == 0).sum())
        return begun_ns[found.launches if is_sure else found.launches[:0]]


def _activities(events: list[Any]) -> list[str]:
    try:
        return list(map(_ACTIVITY, events))
    except AttributeError:  # older versions of torch
        return list(map(_activity, events))


def _activity(event: Any) -> str:
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    # In older versions of torch, Kineto's events have a device and a name but no activity.
    if event.device_type() == torch._C._autograd.DeviceType.CPU:
        if event.is_user_annotation():
            return "user_annotation"
        return "cuda_runtime" if re.match(r"(cuda|hip|cu)[A-Z]", event.name()) else "cpu_op"
    if event.is_user_annotation():
        return "gpu_user_annotation"
    return "gpu_memcpy" if event.name().startswith(("Memcpy", "Memset")) else "kernel"


def _kineto_stopped() -> bool:
    """Whether Kineto stopped recording before its session ended: the buffer for device records was full."""
    stopped = getattr(torch.autograd, "_is_kineto_stopped", None)  # torch 2.13 and later
    return stopped is not None and bool(stopped())


def _config(on_cuda: bool) -> Any:
    """The profiler's experimental settings."""
    make = torch._C._profiler._ExperimentalConfig
    # By default the profiler follows one thread on CPU; communication that escapes the gate is on others.
    options: dict[str, Any] = {"profile_all_threads": not on_cuda}
    try:
        # Without this the events' metadata, which hold the launch shapes, are empty.
        return make(**options, expose_kineto_event_metadata=True)
    except TypeError:  # torch 2.8
        return make(**options)
