"""The one file that knows the device: the accelerator of this process, whatever its vendor, or none.

Streams, events and the current device are those of ``torch.accelerator``, which all vendors share. What has no common
form is asked of the accelerator's own module in torch: ``torch.cuda`` for NVIDIA and AMD, ``torch.xpu`` for Intel. A
module that does not know the answer makes it None: then a figure is missing, and nothing else.

A device counts only once the job has initialised it. Nothing here creates a context, which takes hundreds of MiB, and
nothing waits for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

Stream = torch.Stream
Event = torch.Event

_THREAD_LOCAL_CAPTURE = 1  # cudaStreamCaptureModeThreadLocal, and hipStreamCaptureModeThreadLocal


def kind() -> str:
    """The type of the accelerator for which torch is built, e.g. ``cuda`` (ROCm too); empty for none."""
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def in_use() -> torch.device | None:
    """The current device of this thread, if this process has initialised it; None where the job trains on the CPU."""
    accelerator = kind()
    if not accelerator:
        return None
    is_initialized = _of_module(accelerator, "is_initialized")
    if is_initialized is None or not is_initialized():
        return None
    return torch.device(accelerator, torch.accelerator.current_device_index())


def current(accelerator: str) -> torch.device | None:
    """The current device of a type; None where this process has none. Asking may initialise it.

    Args:
        accelerator: the type, e.g. ``cuda``.
    """
    if kind() != accelerator or not torch.accelerator.is_available():
        return None
    return torch.device(accelerator, torch.accelerator.current_device_index())


def is_profiled(device: torch.device) -> bool:
    """Whether the library reads this device's kernels from torch's profiler."""
    return device.type == "cuda"


def refusal(accelerator: str) -> str:
    """Why nothing is measured of a job that has tensors on a device of this type, for people."""
    return (
        f"the job has tensors on a device of type {accelerator!r}, and torch's accelerator of this process is "
        f"{kind() or 'none'}: nothing is measured, training goes on"
    )


# -- streams and events


def current_stream(device: torch.device) -> Stream:
    """The stream on which this thread enqueues work for a device."""
    return torch.accelerator.current_stream(device)


def mark(stream: Stream) -> Event:
    """An event on a stream, with a time: the device passes it when all work that was enqueued before it is done."""
    event = Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


def is_capturing(device: torch.device) -> bool:
    """Whether a graph is captured on the current stream of this thread; False for a device without graphs."""
    ask = _CAPTURES.get(device.type)
    if ask is None:
        ask = _CAPTURES[device.type] = _of_module(device.type, "is_current_stream_capturing") or _never
    return bool(ask())


# By the type of the device: every collective of a window asks.
_CAPTURES: dict[str, Callable[[], Any]] = {}


def _never() -> bool:
    return False


def prepare_thread(device: torch.device) -> None:
    """Have a thread of the library's own query events of a device, and leave alone what other threads capture.

    A new thread has the device of index 0, which may belong to another rank. Calls from it could create a context
    there. So the thread gets the events' device, as the watchdog of NCCL in torch does. By default, querying an event
    from this thread would also invalidate a CUDA graph that another thread is capturing in torch's default mode.
    """
    torch.accelerator.set_device_index(device)
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
    """A library that torch has loaded already. Another copy (of the system's ROCm, say) must not be loaded beside it.

    Args:
        *names: that it may have, one of which the wheels use, and another a torch built from source.

    Raises:
        OSError: no library of these names is loaded.
    """
    for name in names[:-1]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return ctypes.CDLL(names[-1], mode=os.RTLD_NOLOAD | os.RTLD_NOW)


# -- what a device is


def name(device: torch.device) -> str:
    """Its name, e.g. ``NVIDIA H100 80GB HBM3``; its type where torch does not tell."""
    ask = _of_module(device.type, "get_device_name")
    return device.type if ask is None else str(ask(device))


def properties(device: torch.device) -> Any:
    """What torch knows about it since the context was made; which fields there are depends on vendor and version.

    Raises:
        AttributeError: the accelerator's module has no properties.
    """
    return torch.get_device_module(device).get_device_properties(device)


def count() -> int:
    """Devices that this process sees."""
    return torch.accelerator.device_count()


def collectives_version(device: torch.device) -> str:
    """Version of NCCL (RCCL); empty for other devices."""
    if device.type != "cuda":
        return ""
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call, unused-ignore]
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def ranges() -> Any:
    """The module by which ranges are shown to the vendor's own profiler; None where there is none."""
    return torch.cuda.nvtx if current("cuda") is not None else None


# -- memory and random numbers


def allocator_counters(device: torch.device) -> dict[str, Any] | None:
    """The counters of torch's allocator, by name; None where there are none. Never resets them: they are the user's."""
    ask = _of_module(device.type, "memory_stats_as_nested_dict")
    return None if ask is None else ask(device) or None


def free_bytes(device: torch.device, share: float) -> float | None:
    """What this process may take of a device's memory beyond its peak so far; None where torch does not tell.

    Args:
        device: whose.
        share: of the memory that may be used.
    """
    module: Any = torch.get_device_module(device)
    try:
        free, total = module.mem_get_info(device)
        others = total - free - module.memory_reserved(device)
        return float(share * total - others - module.max_memory_allocated(device))
    except (AttributeError, RuntimeError):
        return None


def random_state(device: torch.device) -> torch.Tensor:
    """The state of its random generator."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Restore a state."""
    torch.get_device_module(device).set_rng_state(state, device)


def _of_module(accelerator: str, function: str) -> Callable[..., Any] | None:
    """A function of an accelerator's module; None if it has none."""
    try:
        return getattr(torch.get_device_module(accelerator), function, None)
    except RuntimeError:  # a type for which no module was registered
        return None
