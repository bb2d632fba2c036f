"""Takes a live profile: one session of ``torch.profiler``, whose events become a table of kernels."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.autograd.profiler

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.kernels.table import KernelTable, KernelTableBuilder, Kind, device_kernels, host_kernels

_torch_profiler: Any = torch.autograd.profiler


class Profile:
    """One session of ``torch.profiler``, with minimal settings.

    On an accelerator it records only device activity (no operators, shapes or stacks); on CPU only operators. Steps are
    identified by the host times of their bounds: the profiler's clock is aligned to the host's.

    Args:
        on_cuda: whether to profile the device; else the CPU.

    Attributes:
        taken_over: whether another profiler started during the session and took torch's only session over.
        session: torch's profiler; None once its events were read.
        bounds: host start and end of each profiled step, as of ``time.time_ns``.
    """

    def __init__(self, on_cuda: bool) -> None:
        activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
        # By default the profiler follows one thread on CPU. Communication that escapes the gate is on other threads.
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=not on_cuda)
        self.session: torch.profiler.profile | None = torch.profiler.profile(
            activities=[activity], experimental_config=config
        )
        self._thread = threading.get_native_id()
        self.bounds: list[tuple[int, int]] = []
        self._quiet_ns: list[int] = []
        self._step_start = 0
        self._running = False
        self._enable: Any = None
        self.taken_over = False

    @staticmethod
    def available() -> bool:
        """Whether no other profiler, such as one of the user's, runs in this process."""
        # The first check knows all sessions of this thread; the second those of all threads, if begun in Python.
        return not (torch._C._autograd._profiler_enabled() or _torch_profiler._is_profiler_enabled)

    def start(self) -> None:
        """Begin the session."""
        assert self.session is not None
        self.session.start()
        self._running = True
        self._watch()

    def begin_step(self) -> None:
        """Mark the start of a step."""
        self._step_start = time.time_ns()

    def end_step(self, quiet: bool = False) -> None:
        """Mark the end of the step that began last. Its index is the number of steps that ended before it.

        Args:
            quiet: whether every collective that was issued so far is complete. Then ranges of the host that end later
                are cut here. Gloo wakes those who wait for a collective before it ends the range; if its thread loses
                its core in between, the range goes on for milliseconds in which nothing is communicated.
        """
        end_ns = time.time_ns()
        self.bounds.append((self._step_start, end_ns))
        if quiet:
            self._quiet_ns.append(end_ns)

    def stop(self) -> bool:
        """End the session. Returns False if another profiler started meanwhile and took torch's only session over."""
        self._unwatch()
        if self._running and self.session is not None:
            self._running = False
            self.session.stop()
        return not self.taken_over

    def kernels(self) -> KernelTable:
        """Read the events. May be called once, after ``stop``, on any thread."""
        assert self.session is not None
        assert self.session.profiler is not None
        results: Any = self.session.profiler.kineto_results
        events = results.events()
        self.session = None
        return read_events(events, self.bounds, self._thread, self._quiet_ns)

    # If the user's own profiler (e.g. one with a schedule) starts during ours, it silently takes the session over, and
    # our stop would then end theirs. torch cannot tell whose session it is, so the start of another one is intercepted.
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
) -> KernelTable:
    """Turn Kineto's events into a table of kernels.

    Args:
        events: ``kineto_results.events()``.
        bounds: host start and end of each profiled step, as of ``time.time_ns``.
        thread: native identifier of the training thread, whose operators are the compute of a CPU job.
        quiet_ns: ascending host times at which no collective was in flight; ranges of a CPU job are cut there.
    """
    device, ranges, launches = KernelTableBuilder(), KernelTableBuilder(), {}
    starts: list[int] = []
    lengths: list[int] = []
    operators: list[str] = []  # of the host: there are many of them, so only their names and times are kept
    for event in events:
        activity = _activity(event)
        if activity == "kernel":
            _add(device, event, Kind.COMPUTE, event.correlation_id(), _launch_shape(event))
        elif activity in ("gpu_memcpy", "gpu_memset"):
            _add(device, event, Kind.COPY, event.correlation_id())
        elif activity in ("cuda_runtime", "cuda_driver"):
            launches[event.correlation_id()] = event.start_ns()
        elif event.is_async():
            _add(ranges, event, Kind.COMMUNICATION)
        elif event.device_resource_id() == thread:
            starts.append(event.start_ns())
            lengths.append(event.duration_ns())
            operators.append(event.name())
    if len(device):
        launched = np.array([launches.get(number, -1) for number in device.correlation], dtype=np.int64)
        return device_kernels(device, launched if launches else None, bounds)
    host = KernelTableBuilder.of_host(
        starts, [start + length for start, length in zip(starts, lengths, strict=True)], operators
    )
    host.clean_names()
    return host_kernels(host, ranges, bounds, quiet_ns)


def _add(rows: KernelTableBuilder, event: Any, kind: Kind, correlation: int = 0, shape: str = "") -> None:
    start = event.start_ns()
    end = start + event.duration_ns()
    rows.add(start, end, kind, safe_text.clean(event.name()), correlation, shape, event.device_resource_id())


_SHAPE = re.compile(r'"(?:grid|block)": *(\[[^\]]*\])')


def _launch_shape(event: Any) -> str:
    """Grid and block of a kernel, if this torch tells them (about 2.10 and later)."""
    if not hasattr(event, "metadata_json"):
        return ""
    return " ".join(_SHAPE.findall(event.metadata_json()))


def _activity(event: Any) -> str:
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    # Before about torch 2.10, Kineto's events do not tell their activity; the device and the name do.
    if event.device_type() == torch._C._autograd.DeviceType.CPU:
        return "cuda_runtime" if re.match(r"(cuda|hip|cu)[A-Z]", event.name()) else "cpu_op"
    if event.is_user_annotation():
        return "gpu_user_annotation"
    return "gpu_memcpy" if event.name().startswith(("Memcpy", "Memset")) else "kernel"
