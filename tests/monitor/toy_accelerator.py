"""An accelerator of a vendor that the library has never heard of, in processes of its own.

torch's backend for devices in Python (``PrivateUse1``) takes it for its accelerator. Its operators run at once on the
CPU, its collectives are Gloo's, and its events hold the host's time. So streams have nothing to wait for: they keep
what they were told to wait for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration

KIND = "toy"
DEVICE_NAME = "Toy Accelerator 1"
# Older versions of torch lack it.
REGISTER: Any = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)


class Stream:
    """Keeps the names of the streams that it was told to wait for."""

    def __init__(self, name: str) -> None:
        self.name, self.waited_for = name, []  # type: tuple[str, list[str]]

    @property
    def device(self) -> torch.device:
        return torch.device(KIND, 0)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event.stream.name)

    def wait_stream(self, stream: Stream) -> None:
        self.waited_for.append(stream.name)


class Event:
    """The host's time at which it was recorded; passed at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    @property
    def device(self) -> torch.device:
        return self.stream.device

    def record(self, stream: Stream) -> None:
        self.stream, self.time_ns = stream, time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        assert self.enable_timing
        assert end.enable_timing
        return (end.time_ns - self.time_ns) / 1e6


class Module:
    """What ``torch.cuda`` is for a GPU: the least of it, without memory, graphs or a profile."""

    Event, Stream = Event, Stream

    def __init__(self, initialised: bool) -> None:
        self.compute, self.side = Stream("compute"), Stream("side")
        self._current = self.compute
        self._initialised = initialised

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def is_initialized(self) -> bool:
        return self._initialised

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device) -> None:
        assert device == torch.device(KIND, 0)

    def get_device_name(self, device: torch.device) -> str:
        return DEVICE_NAME

    def current_stream(self, device: torch.device) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


class OnToy(torch.Tensor):
    """A tensor of the device; its values are on the host."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> OnToy:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), dtype=host.dtype, device=torch.device(KIND, 0)
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            assert func is torch.ops.c10d.allreduce_.default
            gloo = dist.ProcessGroup.unbox(args[1])._get_backend(torch.device("cpu"))
            return args[0], gloo.allreduce([tensor.host for tensor in args[0]]).boxed()
        on_host = [arg.host if isinstance(arg, OnToy) else arg for arg in args]
        return OnToy(func(*on_host, **(kwargs or {})))


def install(initialise: bool = True) -> Module:
    """Make it this process's accelerator, once; with ``initialise``, in use too."""
    module = Module(initialise)
    REGISTER(rename=KIND, backend_module=module)
    return module
