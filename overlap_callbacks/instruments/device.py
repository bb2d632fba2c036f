"""The only file that depends on the device: this process's accelerator, of any vendor, or none.

``torch.accelerator`` gives the device type, and the type's own module in torch the rest: ``torch.cuda`` for NVIDIA and
AMD, ``torch.xpu`` for Intel, ``torch.npu`` for Ascend. Functions that a module lacks are unavailable. Streams and
events are the module's own, too: if a thread that never chose a device frees a ``torch.Event`` of CUDA, torch then sets
device 0, which since CUDA 12 creates a context there.

A device counts only once the job has initialised it. Nothing here creates a context, which takes hundreds of MiB, or
waits for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist

from overlap_callbacks.analysis.kernels.sm_loss import Chip
from overlap_callbacks.analysis.memory import AllocatorReading

Stream = torch.Stream
Event = torch.Event

_NON_BLOCKING = 1  # cudaStreamNonBlocking: the default stream does not wait for it
_HIGH_PRIORITY = -1
_CYCLES_PER_MS = 1_980_000  # of the clock of an H100; marks tell how long it was
_THREAD_LOCAL_CAPTURE = 1  # cudaStreamCaptureModeThreadLocal, and hipStreamCaptureModeThreadLocal


def kind() -> str:
    """The device type that torch was built for, e.g. ``cuda`` (ROCm too); empty for none. Initialises nothing."""
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def in_use() -> torch.device | None:
    """This thread's current device, if the process has initialised it; None if the job trains on the CPU."""
    own = _accelerator(kind())
    return torch.device(own.kind, own.current_device()) if own.is_initialized() else None


def is_timed(device: torch.device) -> bool:
    """Whether steps on this device can be timed: torch knows its type, and it is in use."""
    own = accelerator()
    return own.kind == device.type and own.is_initialized()


def is_profiled(device: torch.device) -> bool:
    """Whether the library reads this device's kernels from torch's profiler."""
    return device.type == "cuda"


def refusal(kind: str) -> str:
    """The message that says why a job with tensors on a device of this type is not measured."""
    return (
        f"the job has tensors on a device of type {kind!r}, which cannot be timed (torch.accelerator is "
        f"not using it): nothing is measured, training goes on [OC111]"
    )


def failure(error: Exception) -> str:
    """What an error of the device or of a collective says, in a line; empty for other errors.

    It is none of the library's: the job's own calls fail too.
    """
    kinds = (getattr(torch, "AcceleratorError", dist.DistError), dist.DistError)
    if isinstance(error, kinds) or str(error).startswith(("CUDA error", "HIP error")):
        return str(error).partition("\n")[0]
    return ""


# -- streams and events


class Accelerator(NamedTuple):
    """The accelerator functions needed for every collective. All but ``is_initialized`` require that it is in use.

    Attributes:
        kind: its type; empty for none.
        is_initialized: whether this process uses it.
        current_device: the index of this thread's device.
        is_capturing: whether this thread is capturing a graph on its current stream. Then it must not query events.
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
        """A timed event on a stream: the device passes it when all work enqueued before it is done."""
        event = self.event(enable_timing=True)
        event.record(stream)
        return event


@functools.cache
def accelerator() -> Accelerator:
    """This process's accelerator, looked up once. Call it only after the job has imported its package."""
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
    """Prepare one of the library's threads for querying events of a device.

    A new thread has device 0, which may belong to another rank, and its calls could create a context there. So it gets
    the events' device, as NCCL's watchdog in torch does. It also leaves CUDA graph captures of other threads valid,
    which by default its event queries would invalidate.
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
            exchange = _runtime().cudaThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL_CAPTURE)))
    except (OSError, AttributeError):
        return  # this build of torch lacks the library: keep the default


def _runtime() -> ctypes.CDLL:
    """CUDA's."""
    return _loaded(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")


def _loaded(*names: str) -> ctypes.CDLL:
    """A library that torch has already loaded, by any of its names; raises OSError if none is.

    It never loads a second copy, such as that of the system's ROCm.
    """
    for name in names[:-1]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return ctypes.CDLL(names[-1], mode=os.RTLD_NOLOAD | os.RTLD_NOW)


# -- an order of streams that the host can end: ``valve.py``

_forever: list[torch.Tensor] = []  # streams that wait for them may outlive all else


class HostOrdered(NamedTuple):
    """A stream that nobody else uses, a zero of the host that the device can reach, and the driver's functions."""

    stream: Any
    memory: torch.Tensor
    write: Callable[..., int]
    wait: Callable[..., int]


def can_be_host_ordered(stream: Stream | None) -> TypeGuard[Stream]:
    return torch.version.cuda is not None and isinstance(stream, torch.cuda.Stream)


def host_ordered(index: int) -> HostOrdered:
    """What the host needs to order streams of a device. Raises OSError, AttributeError or RuntimeError if it cannot."""
    driver = ctypes.CDLL("libcuda.so.1")
    write, wait = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    for function in (write, wait):
        function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    # Streams of torch's are shared: if another owner's waited with this one, the host could not free it.
    create, handle = _runtime().cudaStreamCreateWithFlags, ctypes.c_void_p()
    with torch.cuda.device(index):
        if create(ctypes.byref(handle), _NON_BLOCKING):
            raise RuntimeError("no stream could be made")
        stream = torch.cuda.ExternalStream(handle.value, index)  # type: ignore[no-untyped-call, unused-ignore]
        memory = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    _forever.append(memory)
    return HostOrdered(stream, memory, write, wait)


def on_stream(stream: Stream) -> contextlib.AbstractContextManager[Any]:
    """What this thread asks of a device goes onto this stream."""
    context: contextlib.AbstractContextManager[Any] = _module(stream.device.type).stream(stream)
    return context


@functools.cache
def sleeping_stream(device: torch.device) -> Stream:
    """A stream that nobody else uses, for delays: of high priority, so that a sleep need not wait for compute."""
    create, handle = _runtime().cudaStreamCreateWithPriority, ctypes.c_void_p()
    with torch.cuda.device(device):
        if create(ctypes.byref(handle), _NON_BLOCKING, _HIGH_PRIORITY):
            raise RuntimeError("no stream could be made")
        return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call, unused-ignore]


def sleep(stream: Stream, time_ms: float) -> None:
    """Make a stream of CUDA's sleep, for about so long: its clock changes. One thread of one multiprocessor spins."""
    with on_stream(stream):
        torch.cuda._sleep(int(time_ms * _CYCLES_PER_MS))


def graph_type() -> Any:
    """The type of captured graphs."""
    return torch.cuda.CUDAGraph


# -- device properties


def name(device: torch.device) -> str:
    """The device's name, e.g. ``NVIDIA H100 80GB HBM3``; its type if torch does not know the name."""
    get_name = getattr(_module(device.type), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


def properties(device: torch.device) -> Any:
    """The properties torch has cached since creating the context; the fields depend on vendor and version."""
    return _module(device.type).get_device_properties(device)


def chip_of(stream: Stream | None) -> Chip | None:
    """The chip of a stream's device; None on CPU, and for other vendors, whose compute units have other limits.

    torch has cached the properties since creating the context, so no call reaches the device.
    """
    if stream is None or stream.device.type != "cuda" or torch.version.hip is not None:
        return None
    found = properties(stream.device)
    return Chip(found.multi_processor_count, (found.major, found.minor))


def count() -> int:
    return torch.accelerator.device_count()


def has_cuda() -> bool:
    """Whether this process sees an NVIDIA or AMD GPU. Creates no context."""
    return torch.cuda.is_available()


def nccl_version() -> str:
    """Version of NCCL or RCCL."""
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call, unused-ignore]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def ranges() -> Any:
    """The module for annotating ranges in the vendor's own profiler; None if there is none."""
    return torch.cuda.nvtx if has_cuda() else None


# -- memory and random numbers


# The allocator's raw output: numbers, and dictionaries of numbers, by name.
RawReading = dict[str, Any]


class MemoryReader:
    """Reads the allocator counters of a stream's device, in tens of microseconds, without waiting for it."""

    def __init__(self, stream: Stream | None) -> None:
        self._device = None if stream is None else stream.device

    def read(self) -> RawReading | None:
        """The current counters; None if there are none. ``reading_of`` interprets them later."""
        if self._device is None:
            return None
        try:
            get_stats = getattr(_module(self._device.type), "memory_stats_as_nested_dict", None)
            # never resets the counters: they are the user's
            return None if get_stats is None else get_stats(self._device.index) or None
        except Exception:  # a custom allocator without counters
            self._device = None
            return None


def reading_of(raw: RawReading) -> AllocatorReading | None:
    """The counters used; None if the allocator lacks them."""
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
    """Bytes that this process has left above its peak so far if the device is filled to ``share``; None if unknown.

    What the job lets its allocator have of the device is filled to this share, too.
    """
    module = _module(device.type)
    try:
        free, total = module.mem_get_info(device)
        others = total - free - module.memory_reserved(device)
        allowed = share * total * getattr(module, "get_per_process_memory_fraction", lambda of: 1.0)(device)
        return float(min(share * total - others, allowed) - module.max_memory_allocated(device))
    except (AttributeError, RuntimeError):
        return None


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the device's random generator."""
    state: torch.Tensor = _module(device.type).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    _module(device.type).set_rng_state(state, device)


def _module(kind: str) -> Any:
    """The torch module of a device type; None if there is none."""
    return getattr(torch, kind, None)
