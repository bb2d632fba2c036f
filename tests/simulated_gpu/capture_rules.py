"""CUDA's rules of what may be done while a stream captures a graph, by calls of the runtime."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

# CUDA's errors.
OK, ILLEGAL = 0, 401
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = range(
    900, 909
)
# Its modes.
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NON_BLOCKING, EXTERNAL = 1, 1


class Runtime:
    """A stream to capture, another, and events that are recorded on a third before any capture."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libcudart.so.13")
        self.stream, self.side, self.outside = self.new_stream(), self.new_stream(), self.new_stream()
        self.event, self.before = self.new_event(), self.new_event()
        self.address, self.host = c_void_p(), (ctypes.c_char * 64)()
        assert self.call("cudaMalloc", byref(self.address), c_size_t(64)) == OK
        self.call("cudaEventRecord", self.before, self.outside)
        self.call("cudaDeviceSynchronize")

    def call(self, name: str, *args: Any) -> int:
        error = int(getattr(self._library, name)(*args))
        assert self._library.cudaGetLastError() == error
        return error

    def new_stream(self, flags: int = NON_BLOCKING) -> c_void_p:
        made = c_void_p()
        assert self.call("cudaStreamCreateWithFlags", byref(made), flags) == OK
        return made

    def new_event(self) -> c_void_p:
        made = c_void_p()
        assert self.call("cudaEventCreateWithFlags", byref(made), 0) == OK
        return made

    def begin(self, mode: int = GLOBAL, stream: c_void_p | None = None) -> int:
        return self.call("cudaStreamBeginCapture", stream or self.stream, mode)

    def end(self, stream: c_void_p | None = None, launches: int = 0) -> int:
        """End a capture, and launch its graph so often."""
        graph, ready = c_void_p(), c_void_p()
        error = self.call("cudaStreamEndCapture", stream or self.stream, byref(graph))
        assert (graph.value is not None) == (error == OK)
        if error != OK:
            return error
        errors = [self.call("cudaGraphInstantiateWithFlags", byref(ready), graph, ctypes.c_ulonglong(0))]
        errors.append(self.call("cudaGraphDestroy", graph))
        errors += [self.call("cudaGraphLaunch", ready, self.side) for _ in range(launches)]
        errors += [self.call("cudaDeviceSynchronize"), self.call("cudaGraphExecDestroy", ready)]
        return max(errors)

    def status(self, stream: c_void_p) -> int:
        found = c_int()
        assert self.call("cudaStreamIsCapturing", stream, byref(found)) == OK
        return found.value

    def fill(self, stream: c_void_p | None) -> int:
        return self.call("cudaMemsetAsync", self.address, 0, c_size_t(64), stream)

    def record(self, stream: c_void_p, event: c_void_p | None = None, flags: int = 0) -> int:
        return self.call("cudaEventRecordWithFlags", event or self.event, stream, flags)

    def wait(self, stream: c_void_p | None, event: c_void_p | None = None, flags: int = 0) -> int:
        return self.call("cudaStreamWaitEvent", stream, event or self.event, flags)

    def copy(self, *more: Any) -> int:
        name = "cudaMemcpyAsync" if more else "cudaMemcpy"
        return self.call(name, self.host, self.address, c_size_t(64), 2, *more)

    def allocate_and_free(self) -> int:
        """Memory in the order of the stream."""
        address = c_void_p()
        return (
            self.call("cudaMallocAsync", byref(address), c_size_t(64), self.stream)
            or self.call("cudaMemsetAsync", address, 1, c_size_t(64), self.stream)
            or self.call("cudaFreeAsync", address, self.stream)
        )

    def exchange(self, mode: int) -> int:
        before = c_int(mode)
        self.call("cudaThreadExchangeStreamCaptureMode", byref(before))
        return before.value

    def merge(self) -> int:
        """Let a stream wait for a point of another capture."""
        self.record(self.stream)
        self.begin(GLOBAL, self.side)
        error = self.wait(self.side)
        assert self.end(self.side) == INVALIDATED
        return error

    def on_legacy_stream_beside_a_blocking_one(self) -> int:
        self.record(self.stream)
        self.wait(self.new_stream(0))
        return self.fill(None)


# What spoils a capture, and the error of it.
MISUSES: dict[str, tuple[Callable[[Runtime], int], int]] = {
    "query of an event": (lambda r: r.call("cudaEventQuery", r.before), UNSUPPORTED),
    "wait of the host for an event": (lambda r: r.call("cudaEventSynchronize", r.before), UNSUPPORTED),
    "query of a captured event": (
        lambda r: r.record(r.stream) or r.call("cudaEventQuery", r.event), CAPTURED_EVENT,
    ),
    "wait of the host for a captured event": (
        lambda r: r.record(r.stream) or r.call("cudaEventSynchronize", r.event), CAPTURED_EVENT,
    ),
    "query of the stream": (lambda r: r.call("cudaStreamQuery", r.stream), UNSUPPORTED),
    "query of another stream": (lambda r: r.call("cudaStreamQuery", r.outside), UNSUPPORTED),
    "wait of the host for the stream": (lambda r: r.call("cudaStreamSynchronize", r.stream), UNSUPPORTED),
    "wait of the host for another stream": (lambda r: r.call("cudaStreamSynchronize", r.outside), UNSUPPORTED),
    "wait of the host for the device": (lambda r: r.call("cudaDeviceSynchronize"), UNSUPPORTED),
    "wait for an event that was recorded outside": (lambda r: r.wait(r.stream, r.before), ISOLATION),
    "wait of the legacy stream": (lambda r: r.record(r.stream) or r.wait(None), IMPLICIT),
    "legacy stream beside a blocking one": (Runtime.on_legacy_stream_beside_a_blocking_one, IMPLICIT),
    "two captures become one": (Runtime.merge, MERGE),
    "end on a stream that joined": (
        lambda r: r.record(r.stream) or r.wait(r.side) or r.end(r.side), UNMATCHED,
    ),
    "allocation": (lambda r: r.call("cudaMalloc", byref(c_void_p()), c_size_t(64)), UNSUPPORTED),
    "freeing": (lambda r: r.call("cudaFree", r.address), UNSUPPORTED),
    "allocation on the host": (lambda r: r.call("cudaHostAlloc", byref(c_void_p()), c_size_t(64), 0), UNSUPPORTED),
    "copy that the host waits for": (Runtime.copy, UNSUPPORTED),
    "callback": (lambda r: r.call("cudaStreamAddCallback", r.stream, None, None, 0), UNSUPPORTED),
}  # fmt: skip

# What does no harm within one.
FINE: dict[str, Callable[[Runtime], int]] = {
    "work on another stream": lambda r: r.fill(r.outside),
    "work on the legacy stream": lambda r: r.fill(None),
    "recording on another stream": lambda r: r.record(r.outside),
    "wait for an event that is not recorded": lambda r: r.wait(r.stream),
    "wait of another stream for an event of another": lambda r: r.wait(r.side, r.before),
    "recording that others see": lambda r: r.record(r.stream, flags=EXTERNAL),
    "wait for what others recorded": lambda r: r.wait(r.stream, r.before, EXTERNAL),
    "copy to the host": lambda r: r.copy(r.stream),
    "memory in the order of the stream": Runtime.allocate_and_free,
    "new streams and events": lambda r: 0 * bool(r.new_stream() and r.new_event()),
    "fork and join": lambda r: (
        r.record(r.stream) or r.wait(r.side) or r.fill(r.side) or r.record(r.side) or r.wait(r.stream)
    ),
}


def misused() -> dict[str, tuple[int, int, int, int]]:
    """Of each misuse its error, the capture's status then, the error of the capture's end, and that of later work."""
    found = {}
    for name, (misuse, _) in MISUSES.items():
        runtime = Runtime()
        assert runtime.begin() == runtime.fill(runtime.stream) == OK
        error, status = misuse(runtime), runtime.status(runtime.stream)
        refused, ended = runtime.fill(runtime.stream), runtime.end()
        assert refused == INVALIDATED
        found[name] = error, status, ended, runtime.fill(runtime.stream)
        runtime.call("cudaDeviceSynchronize")
    return found


def well_used() -> dict[str, tuple[int, int]]:
    """Of each harmless use its error, and that of the capture's end and of two launches."""
    found = {}
    for name, use in FINE.items():
        runtime = Runtime()
        assert runtime.begin() == runtime.fill(runtime.stream) == OK
        found[name] = use(runtime), runtime.end(launches=2)
    return found


def by_mode() -> dict[tuple[int, bool, int], tuple[int, int]]:
    """Of a query by the capture's mode, whether its thread asks, and the asking thread's mode; and of the end."""
    found = {}
    for of_capture in (GLOBAL, THREAD_LOCAL, RELAXED):
        for own in (True, False):
            for of_thread in (GLOBAL, THREAD_LOCAL, RELAXED):
                runtime, errors = Runtime(), []

                def ask(runtime: Runtime = runtime, mode: int = of_thread, errors: list[int] = errors) -> None:
                    before = runtime.exchange(mode)
                    assert before == GLOBAL
                    errors.append(runtime.call("cudaEventQuery", runtime.before))
                    assert runtime.exchange(before) == mode

                runtime.begin(of_capture)
                if own:
                    ask()
                else:
                    thread = threading.Thread(target=ask)
                    thread.start()
                    thread.join()
                found[of_capture, own, of_thread] = errors[0], runtime.end()
    return found


def begun_and_ended() -> dict[str, int]:
    """Errors of how captures begin and end."""
    runtime = Runtime()
    found = {
        "end without a begin": runtime.end(),
        "begin on the legacy stream": runtime.call("cudaStreamBeginCapture", None, GLOBAL),
        "begin": runtime.begin(),
        "begin twice": runtime.begin(),
    }
    errors: list[int] = []
    thread = threading.Thread(target=lambda: errors.append(runtime.end()))
    thread.start()
    thread.join()
    found |= {"end on another thread": errors[0], "end": runtime.end()}
    runtime.begin()
    runtime.record(runtime.stream)
    runtime.wait(runtime.side)
    runtime.fill(runtime.side)
    found |= {"end of a fork that is not joined": runtime.end(), "its stream after it": runtime.fill(runtime.side)}
    return found
