"""A live profile: one session of ``torch.profiler``, and its events as columns of kernels."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.autograd.profiler

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.table import KernelTable, KernelTableBuilder, Kind, device_kernels, host_kernels

_torch_profiler: Any = torch.autograd.profiler


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

    def kernels(self) -> KernelTable:
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
) -> KernelTable:
    """Turn Kineto's events into columns.

    Args:
        events: ``kineto_results.events()``.
        bounds: host start and end of each profiled step, ``time.time_ns``.
        thread: native identifier of the training thread, whose operators are the compute of a CPU job.
        quiet_ns: host times, ascending, at which no collective was in flight; cuts the ranges of a CPU job.
    """
    device, ranges, launches = KernelTableBuilder(), KernelTableBuilder(), {}
    starts: list[int] = []
    lengths: list[int] = []
    operators: list[str] = []  # of the host: there are many, so they are taken down with the least that will do
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
    rows.add(start, end, kind, name_rules.clean(event.name()), correlation, shape, event.device_resource_id())


_SHAPE = re.compile(r'"(?:grid|block)": *(\[[^\]]*\])')


def _launch_shape(event: Any) -> str:
    """Grid and block of a kernel, where this torch tells them (2.10, about)."""
    if not hasattr(event, "metadata_json"):
        return ""
    return " ".join(_SHAPE.findall(event.metadata_json()))


def _activity(event: Any) -> str:
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    # Before torch 2.10 (about), Kineto's events do not tell; the device and the name do.
    if event.device_type() == torch._C._autograd.DeviceType.CPU:
        return "cuda_runtime" if re.match(r"(cuda|hip|cu)[A-Z]", event.name()) else "cpu_op"
    if event.is_user_annotation():
        return "gpu_user_annotation"
    return "gpu_memcpy" if event.name().startswith(("Memcpy", "Memset")) else "kernel"
