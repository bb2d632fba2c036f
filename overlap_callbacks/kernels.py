"""From a profile to a timeline of kernels, told apart into compute, communication, copies and the rest.

On an accelerator a kernel is a kernel of the device. On a machine without one, "compute kernels" are torch operators of
the training thread, each with its self time, and communication is the ranges of Gloo's own threads: a real measurement
of how the two contend for the CPU.
"""

from __future__ import annotations

import enum
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.autograd.profiler

from overlap_callbacks.samples import KernelTime, ProfiledBlock
from overlap_callbacks.schedule import Mode
from overlap_callbacks.timeline import Intervals, self_segments


class Kind(enum.IntEnum):
    """What a kernel does."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    OTHER = 3


_torch_profiler: Any = torch.autograd.profiler

# Searched (not matched) in the kernel's name; extend with ``communication_patterns.append``. A name prefix would not
# do: hipblaslt_* and the like are compute, and multimem_all_reduce_kernel is communication.
communication_patterns: list[str] = [
    r"^(void )?(nccl|rccl|ncclx|oneccl|hccl)",
    r"nccl(Dev)?Kernel",
    r"mscclpp|msccl[A-Z_]|^(void )?msccl",
    r"nvshmem|rocshmem|barrier_on_stream",
    r"multimem_(all_reduce|one_shot|all_gather|reduce)",
    r"(?i:(one|two)_?shot_?all_?reduce)",
    r"symmetric_memory::|intra_node_comm::|(?i:symm_mem).*(all_gather|all_reduce|reduce_scatter|all_to_all)",
    r"deep_ep::|hybrid_ep::|^Ep(Dispatch|Combine)",
    r"userbuffers_|cross_device_reduce_|allreduce_fusion_kernel",
    r"^(gloo|ucc|mpi):",
]

# Torch operators that are no computation although their name says aten.
_NO_COMPUTE = re.compile(r"wait_tensor|^aten::(record_stream|is_pinned)")


def is_communication(name: str) -> bool:
    """Whether a kernel (or, on CPU, an asynchronous range) of this name communicates."""
    return any(re.search(pattern, name) for pattern in communication_patterns)


@dataclass(frozen=True)
class Kernels:
    """Kernels in columns, one row each; on CPU one row for each piece of an operator's self time.

    Attributes:
        intervals: when they ran; n rows.
        kind: ``Kind`` of each; shape (n,).
        name: index into ``names``; shape (n,).
        step: index of the profiled step in which they were launched, -1 outside all; shape (n,).
        counts: 1 for the first row of a kernel, 0 for further pieces of it; shape (n,).
        names: the distinct names.
    """

    intervals: Intervals
    kind: npt.NDArray[np.uint8]
    name: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    names: tuple[str, ...]

    def of(self, kind: Kind) -> Intervals:
        """Intervals of one kind, in all steps."""
        return self.intervals[self.kind == kind]


class Profile:
    """One session of ``torch.profiler``, with the least that it needs.

    Only device activity on an accelerator (no operators, shapes or stacks), only operators on CPU. Steps are found
    again by the host time of their bounds, to which the profiler's clock is aligned.

    Args:
        on_cuda: profile the device; else the CPU.
    """

    def __init__(self, on_cuda: bool) -> None:
        activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
        # On CPU the profiler follows one thread unless told otherwise; the communication that escapes the gate is just
        # that of other threads.
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=not on_cuda)
        self._profile: torch.profiler.profile | None = torch.profiler.profile(
            activities=[activity], experimental_config=config
        )
        self._thread = threading.get_native_id()
        self._bounds: list[tuple[int, int]] = []
        self._quiet_ns: list[int] = []
        self._step_start = 0
        self._running = False
        self._enable: Any = None
        self.taken_over = False

    @staticmethod
    def available() -> bool:
        """False while another profiler (the user's own, say) runs in this process."""
        # The first knows sessions of this thread, whoever began them; the second those of all threads begun in Python.
        return not (torch._C._autograd._profiler_enabled() or _torch_profiler._is_profiler_enabled)

    def start(self) -> None:
        assert self._profile is not None
        self._profile.start()
        self._running = True
        self._watch()

    def begin_step(self) -> None:
        self._step_start = time.time_ns()

    def end_step(self, quiet: bool = False) -> None:
        """The step that began last is to be found again; its index is the number of such steps before it.

        Args:
            quiet: every collective issued so far is complete. On the host, ranges that the profile ends later are cut
                here: Gloo wakes those who wait for a collective before it ends the range, so where its thread loses
                its core in between, the range goes on for milliseconds in which nothing is communicated.
        """
        end_ns = time.time_ns()
        self._bounds.append((self._step_start, end_ns))
        if quiet:
            self._quiet_ns.append(end_ns)

    def stop(self) -> bool:
        """End the session; False where another profiler started meanwhile and took torch's only session over."""
        self._unwatch()
        if self._running and self._profile is not None:
            self._running = False
            self._profile.stop()
        return not self.taken_over

    def kernels(self) -> Kernels:
        """Read the events, once; may run on any thread, after ``stop``."""
        assert self._profile is not None
        assert self._profile.profiler is not None
        results: Any = self._profile.profiler.kineto_results
        events = results.events()
        self._profile = None
        return read_events(events, self._bounds, self._thread, self._quiet_ns)

    # A profiler of the user's that starts during ours (one with a schedule, say) silently takes the session over, and
    # our stop would then end theirs. torch has no way to ask whose session it is, so their start is noticed on its way.
    def _watch(self) -> None:
        self._enable = enable = _torch_profiler._enable_profiler

        def taken_over(*args: Any, **kwargs: Any) -> Any:
            self.taken_over = True
            self._running = False
            self._unwatch()
            return enable(*args, **kwargs)

        _torch_profiler._enable_profiler = taken_over

    def _unwatch(self) -> None:
        if self._enable is not None:
            _torch_profiler._enable_profiler, self._enable = self._enable, None


def read_events(
    events: Iterable[Any], bounds: Sequence[tuple[int, int]], thread: int, quiet_ns: Sequence[int] = ()
) -> Kernels:
    """Turn Kineto's events into columns.

    Args:
        events: ``kineto_results.events()``.
        bounds: host start and end of each profiled step, ``time.time_ns``.
        thread: native identifier of the training thread, whose operators are the compute of a CPU job.
        quiet_ns: host times, ascending, at which no collective was in flight; cuts the ranges of a CPU job.
    """
    device, host, ranges, launches = _Rows(), _Rows(), _Rows(), {}
    for event in events:
        activity = _activity(event)
        if activity in ("kernel", "gpu_memcpy", "gpu_memset"):
            device.add(event, Kind.COPY if activity != "kernel" else Kind.COMPUTE, event.correlation_id())
        elif activity in ("cuda_runtime", "cuda_driver"):
            launches[event.correlation_id()] = event.start_ns()
        elif event.is_async():
            ranges.add(event, Kind.COMMUNICATION, 0)
        elif event.device_resource_id() == thread:
            host.add(event, Kind.COMPUTE, 0)
    if len(device.names):
        return _device_kernels(device, launches, bounds)
    return _host_kernels(host, ranges, bounds, quiet_ns)


def _activity(event: Any) -> str:
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    # Before torch 2.10 (about), Kineto's events do not tell; the device and the name do.
    if event.device_type() == torch._C._autograd.DeviceType.CPU:
        return "cuda_runtime" if re.match(r"(cuda|hip|cu)[A-Z]", event.name()) else "cpu_op"
    if event.is_user_annotation():
        return "gpu_user_annotation"
    return "gpu_memcpy" if event.name().startswith(("Memcpy", "Memset")) else "kernel"


class _Rows:
    """Columns that grow."""

    def __init__(self) -> None:
        self.start: list[int] = []
        self.end: list[int] = []
        self.kind: list[int] = []
        self.names: list[str] = []
        self.correlation: list[int] = []

    def add(self, event: Any, kind: Kind, correlation: int) -> None:
        start = event.start_ns()
        self.start.append(start)
        self.end.append(start + event.duration_ns())
        self.kind.append(kind)
        self.names.append(event.name())
        self.correlation.append(correlation)

    @property
    def intervals(self) -> Intervals:
        return Intervals(np.array(self.start, dtype=np.int64), np.array(self.end, dtype=np.int64))


def _step_of(times_ns: npt.NDArray[np.int64], bounds: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Index of the step that each time lies in, -1 outside all."""
    if not bounds:
        return np.full(len(times_ns), -1, dtype=np.int64)
    begins, ends = np.array(bounds, dtype=np.int64).T
    index = np.searchsorted(begins, times_ns, side="right") - 1
    inside = (index >= 0) & (times_ns < ends[np.maximum(index, 0)])
    return np.where(inside, index, -1)


def _columns(intervals: Intervals, kind: Any, step: Any, counts: Any, names: Any) -> Kernels:
    distinct, name = np.unique(np.array(names, dtype=object), return_inverse=True)
    return Kernels(intervals, np.asarray(kind, np.uint8), name.astype(np.int64), step, counts, tuple(distinct))


def _device_kernels(rows: _Rows, launches: dict[int, int], bounds: Sequence[tuple[int, int]]) -> Kernels:
    intervals = rows.intervals
    # A kernel belongs to the step that launched it: the device lags behind the host by up to a step, and kernels of the
    # step before profiling began, whose launches are not in the profile, still run when it does. Where there are no
    # launches at all, the kernels' own starts must do.
    launched = [launches.get(correlation, -1) for correlation in rows.correlation] if launches else rows.start
    communicates = {name: is_communication(name) for name in set(rows.names)}
    kind = [
        Kind.COMMUNICATION if kind == Kind.COMPUTE and communicates[name] else kind
        for kind, name in zip(rows.kind, rows.names, strict=True)
    ]
    step = _step_of(np.array(launched, dtype=np.int64), bounds)
    return _columns(intervals, kind, step, np.ones(len(kind), dtype=np.int64), rows.names)


def _host_kernels(host: _Rows, ranges: _Rows, bounds: Sequence[tuple[int, int]], quiet_ns: Sequence[int]) -> Kernels:
    calls = host.intervals
    pieces, owner = self_segments(calls)
    names = np.array(host.names, dtype=object)
    computes = {name: name.startswith("aten::") and not _NO_COMPUTE.search(name) for name in set(host.names)}
    is_compute = np.array([computes[name] for name in host.names], dtype=bool)
    wanted = is_compute[owner] if len(owner) else np.empty(0, dtype=bool)
    pieces, owner = pieces[wanted], owner[wanted]
    counts = np.zeros(len(owner), dtype=np.int64)
    counts[np.unique(owner, return_index=True)[1]] = 1
    step = _step_of(calls.start_ns, bounds)[owner]  # of the call's start, so that all its pieces go together
    communicates = np.array([is_communication(name) for name in ranges.names], dtype=bool)
    sent = _cut(ranges.intervals[communicates], quiet_ns)
    sent_names = np.array(ranges.names, dtype=object)[communicates]
    return _columns(
        Intervals(np.concatenate((pieces.start_ns, sent.start_ns)), np.concatenate((pieces.end_ns, sent.end_ns))),
        np.concatenate((np.full(len(owner), Kind.COMPUTE), np.full(len(sent), Kind.COMMUNICATION))),
        np.concatenate((step, _step_of(sent.start_ns, bounds))),
        np.concatenate((counts, np.ones(len(sent), dtype=np.int64))),
        np.concatenate((names[owner], sent_names)),
    )


def _cut(ranges: Intervals, quiet_ns: Sequence[int]) -> Intervals:
    """The ranges, each ended at the first quiet time after its start."""
    never = np.iinfo(np.int64).max
    quiet = np.append(np.asarray(quiet_ns, dtype=np.int64), never)
    next_quiet = quiet[np.searchsorted(quiet, ranges.start_ns, side="left")]
    return Intervals(ranges.start_ns, np.minimum(ranges.end_ns, next_quiet))


def profiled_block(
    arm: Mode, block: int, num_steps: int, kernels: Kernels, steps: npt.NDArray[np.int64]
) -> ProfiledBlock:
    """Kernel times of the profiled steps ``steps`` (indices), as means per step.

    Cover is taken against the whole profile: communication that begins in one step may run beside the compute of the
    next.
    """
    inside = np.isin(kernels.step, steps)
    compute_rows = kernels.kind == Kind.COMPUTE
    comm_rows = kernels.kind == Kind.COMMUNICATION
    all_compute, all_comm = kernels.intervals[compute_rows], kernels.intervals[comm_rows]
    compute, comm = kernels.intervals[compute_rows & inside], kernels.intervals[comm_rows & inside]
    copies = kernels.intervals[(kernels.kind == Kind.COPY) & inside]

    def per_step_ms(time_ns: int) -> float:
        return time_ns / num_steps / 1e6

    return ProfiledBlock(
        arm=arm,
        block=block,
        num_steps=num_steps,
        compute_ms=per_step_ms(compute.sum_ns),
        compute_busy_ms=per_step_ms(compute.busy_ns),
        comm_ms=per_step_ms(comm.sum_ns),
        comm_busy_ms=per_step_ms(comm.busy_ns),
        hidden_comm_ms=per_step_ms(comm.shared_ns(all_compute)),
        covered_compute_ms=per_step_ms(int(compute.covered_ns(all_comm).sum())),
        copy_ms=per_step_ms(copies.sum_ns),
    )


def kernel_times(
    kernels: Kernels, overlapped: npt.NDArray[np.int64], sequential: npt.NDArray[np.int64], most: int
) -> tuple[KernelTime, ...]:
    """Time and calls of each kernel in both modes, per step; the ``most`` kernels with the most time.

    Args:
        kernels: of the whole profile.
        overlapped: indices of the overlapped profiled steps.
        sequential: indices of the sequential ones.
        most: rows to keep.
    """
    size = len(kernels.names)
    durations = kernels.intervals.durations_ns

    def totals(steps: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        rows = np.isin(kernels.step, steps)
        calls = np.bincount(kernels.name[rows], weights=kernels.counts[rows], minlength=size)
        time_ns = np.bincount(kernels.name[rows], weights=durations[rows], minlength=size)
        return calls / max(len(steps), 1), time_ns / max(len(steps), 1) / 1e6

    calls_ov, ms_ov = totals(overlapped)
    calls_seq, ms_seq = totals(sequential)
    kind = np.full(size, Kind.OTHER)
    kind[kernels.name] = kernels.kind
    ran = calls_ov + calls_seq > 0
    wanted = np.flatnonzero(((kind == Kind.COMPUTE) | (kind == Kind.COMMUNICATION)) & ran)
    wanted = wanted[np.argsort(-(ms_ov + ms_seq)[wanted], kind="stable")][:most]
    return tuple(
        KernelTime(
            name=kernels.names[i],
            communication=bool(kind[i] == Kind.COMMUNICATION),
            overlapped_calls=float(calls_ov[i]),
            sequential_calls=float(calls_seq[i]),
            overlapped_ms=float(ms_ov[i]),
            sequential_ms=float(ms_seq[i]),
        )
        for i in wanted
    )
