"""The one file that knows the device: the accelerator of this process, whatever its vendor, or none.

``torch.accelerator`` has the type of device, and the type's own module in torch the rest: ``torch.cuda`` for NVIDIA and
AMD, ``torch.xpu`` for Intel, ``torch.npu`` for Ascend. What a module does not know is missing. Streams and events are
the module's own, too: where a thread that never chose a device frees a ``torch.Event`` of CUDA, torch sets device 0
afterwards, which since CUDA 12 creates a context there.

A device counts only once the job has initialised it. Nothing here creates a context, which takes hundreds of MiB, or
waits for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from overlap_callbacks.analysis.kernels.sm_loss import Chip
from overlap_callbacks.analysis.memory import AllocatorReading

Stream = torch.Stream
Event = torch.Event

_THREAD_LOCAL_CAPTURE = 1  # cudaStreamCaptureModeThreadLocal, and hipStreamCaptureModeThreadLocal


def kind() -> str:
    """The type of device for which torch was built, e.g. ``cuda`` (ROCm too); empty for none. Initialises nothing."""
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def in_use() -> torch.device | None:
    """This thread's current device, if the process has initialised it; None where the job trains on the CPU."""
    own = _accelerator(kind())
    return torch.device(own.kind, own.current_device()) if own.is_initialized() else None


def is_timed(device: torch.device) -> bool:
    """Whether steps on this device can be timed: it is of the type that torch knows, and in use."""
    own = accelerator()
    return own.kind == device.type and own.is_initialized()


def is_profiled(device: torch.device) -> bool:
    """Whether the library reads this device's kernels from torch's profiler."""
    return device.type == "cuda"


def refusal(kind: str) -> str:
    """Why a job with tensors on a device of this type is not measured, for people."""
    return (
        f"the job has tensors on a device of type {kind!r}, which cannot be timed (torch.accelerator has none "
        f"of it in use): nothing is measured, training goes on"
    )


# -- streams and events


class Accelerator(NamedTuple):
    """What is asked of the accelerator for every collective of a window. All but ``is_initialized`` needs it in use.

    Attributes:
        kind: its type; empty for none.
        is_initialized: whether this process uses it.
        current_device: the index of this thread's device.
        is_capturing: whether this thread captures a graph on its current stream. Then it must not query events.
        current_stream: the stream on which this thread enqueues work for a device.
        event: the type of its events.
    """

    kind: str
    is_initialized: Callable[[], bool]
    current_device: Callable[[], int]
    is_capturing: Callable[[], bool]
    current_stream: Callable[[torch.device], Stream]
    event: Callable[..., Event]

    def mark(self, stream: Stream) -> Event:
        """An event on a stream, with a time: the device passes it when all work enqueued before it is done."""
        event = self.event(enable_timing=True)
        event.record(stream)
        return event


@functools.cache
def accelerator() -> Accelerator:
    """This process's accelerator, looked up once. Not to be called before the job has imported its package."""
    return _accelerator(kind())


def _accelerator(kind: str) -> Accelerator:
    module = _module(kind)
    return Accelerator(
        kind,
        getattr(module, "is_initialized", _no),
        getattr(module, "current_device", torch.accelerator.current_device_index),
        getattr(module, "is_current_stream_capturing", _no),
        getattr(module, "current_stream", torch.accelerator.current_stream),
        getattr(module, "Event", Event),
    )


def _no() -> bool:
    return False


def prepare_thread(device: torch.device) -> None:
    """Prepare a thread of the library's own for querying events of a device.

    A new thread has the device of index 0, which may belong to another rank, and calls from it could create a context
    there. So it gets the events' device, as NCCL's watchdog in torch does. Nor does querying an event from it
    invalidate a CUDA graph that another thread is capturing, as it would by default.
    """
    _module(device.type).set_device(device)
    if device.type == "cuda":
        _leave_captures_alone()


def _leave_captures_alone() -> None:
    try:
        if torch.version.hip is not None:
            major = torch.version.hip.split(".")[0]
            exchange = _loaded("libamdhip64.so", f"libamdhip64.so.{major}").hipThreadExchangeStreamCaptureMode
        else:
            major = str(torch.version.cuda).split(".")[0]
            exchange = _loaded(f"libcudart.so.{major}").cudaThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL_CAPTURE)))
    except (OSError, AttributeError):
        return  # a build of torch without that library: the default stays


def _loaded(*names: str) -> ctypes.CDLL:
    """A library that torch has loaded already, by any of its names; an OSError where none is loaded.

    Another copy (of the system's ROCm, say) must not be loaded too.
    """
    for name in names[:-1]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return ctypes.CDLL(names[-1], mode=os.RTLD_NOLOAD | os.RTLD_NOW)


# -- what a device is


def name(device: torch.device) -> str:
    """Its name, e.g. ``NVIDIA H100 80GB HBM3``; its type if torch does not know."""
    ask = getattr(_module(device.type), "get_device_name", None)
    return device.type if ask is None else str(ask(device))


def properties(device: torch.device) -> Any:
    """What torch knows about it since the context was made; which fields there are depends on vendor and version."""
    return _module(device.type).get_device_properties(device)


def chip_of(stream: Stream | None) -> Chip | None:
    """The chip of a stream's device; None on CPU, and for other vendors, whose compute units have other limits.

    torch knows the properties since it made the context: no call reaches the device.
    """
    if stream is None or stream.device.type != "cuda" or torch.version.hip is not None:
        return None
    found = properties(stream.device)
    return Chip(found.multi_processor_count, (found.major, found.minor))


def count() -> int:
    return torch.accelerator.device_count()


def has_cuda() -> bool:
    """Whether this process sees a GPU of NVIDIA or AMD. Creates no context."""
    return torch.cuda.is_available()


def nccl_version() -> str:
    """Version of NCCL, or of RCCL."""
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call, unused-ignore]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def ranges() -> Any:
    """The module by which ranges are shown to the vendor's own profiler; None where there is none."""
    return torch.cuda.nvtx if has_cuda() else None


# -- memory and random numbers


# As the allocator gives it: numbers, and counters of numbers, by name.
RawReading = dict[str, Any]


class MemoryReader:
    """Reads the allocator's counters of a stream's device, in some tens of microseconds, without waiting for it."""

    def __init__(self, stream: Stream | None) -> None:
        self._device = None if stream is None else stream.device

    def read(self) -> RawReading | None:
        """The counters now; None where there are none. ``reading_of`` works out later what they mean."""
        if self._device is None:
            return None
        try:
            ask = getattr(_module(self._device.type), "memory_stats_as_nested_dict", None)
            return None if ask is None else ask(self._device.index) or None  # never resets them: they are the user's
        except Exception:  # an allocator of the user's own has no counters
            self._device = None
            return None


def reading_of(raw: RawReading) -> AllocatorReading | None:
    """The counters that are used; None if the allocator does not have them."""
    try:
        allocated = raw["allocated_bytes"]["all"]
        return AllocatorReading(int(allocated["current"]), int(allocated["peak"]), tuple(list(_peaks(raw))))
    except (KeyError, TypeError):
        return None


def _peaks(raw: RawReading) -> Iterator[int]:
    for name in sorted(raw):
        value = raw[name]
        if isinstance(value, dict):
            if "peak" in value:
                yield int(value["peak"])
            else:
                yield from _peaks(value)


def free_bytes(device: torch.device, share: float) -> float | None:
    """What this process may take of a share of a device's memory beyond its peak so far; None if unknown."""
    module = _module(device.type)
    try:
        free, total = module.mem_get_info(device)
        others = total - free - module.memory_reserved(device)
        return float(share * total - others - module.max_memory_allocated(device))
    except (AttributeError, RuntimeError):
        return None


def random_state(device: torch.device) -> torch.Tensor:
    """The state of its random generator."""
    state: torch.Tensor = _module(device.type).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    _module(device.type).set_rng_state(state, device)


def _module(kind: str) -> Any:
    """The module of a type of device in torch; None if it has none."""
    return getattr(torch, kind, None)
