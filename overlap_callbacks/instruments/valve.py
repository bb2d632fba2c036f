"""An order between streams that the host can end, should the device wait for ever.

A stream that waits for an event cannot be freed. So a stream of the valve's own waits for the events, and then writes
the next number into the host's memory. The streams that are to come later wait, on the device, until it is there. If
the device does not get on, a thread writes a higher number, and all go on. The host never waits.

Neither takes a kernel: the driver has ``cuStreamWriteValue32`` and ``cuStreamWaitValue32``. A write is enqueued before
the waits for it, so streams that share one of the device's queues cannot hold each other up.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from overlap_callbacks._log import logger
from overlap_callbacks.instruments import device

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ; compares modulo 2**32
_FAR_AHEAD = 2**30
_MASK = 2**32 - 1
_POLL_S = 0.05
# Longest time in which numbers that the device writes late are raised again.
_GIVE_UP_S = 600.0


class Valve:
    """The valve of one device; ``valve_of`` returns it.

    Args:
        stream: its own, which nobody else uses.
        memory: a zero of the host that the device can reach.
        write, wait: the driver's functions.
    """

    def __init__(self, stream: Any, memory: torch.Tensor, write: Callable[..., int], wait: Callable[..., int]) -> None:
        self._own, self._memory, self._write, self._wait = stream, memory, write, wait
        self._word = ctypes.c_uint32.from_address(memory.data_ptr())
        self._number = 0  # last one that the device is to write
        self._ordered: deque[tuple[int, object]] = deque()  # what was not over at the last look
        self._patience_s = 0.0
        self._on_release: Callable[[Any, float], None] | None = None
        self._asked = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False

    def begin(self, patience_s: float, on_release: Callable[[Any, float], None]) -> None:
        """Before a step: release what is ordered if for so long nothing of it gets on.

        ``on_release`` is called before, on the valve's thread, with what is waited for and the patience.
        """
        self._patience_s, self._on_release = patience_s, on_release
        with self._lock:
            self._closing = False
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="overlap-callbacks-valve", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread, once nothing is ordered any more."""
        with self._lock:
            self._closing = True
            self._asked.set()

    def order(self, make_wait: Callable[[Any], None], later: Iterable[Any], what: object) -> None:
        """Make streams wait as ``make_wait`` does with one. ``what`` is waited for, in words."""
        make_wait(self._own)
        number = (self._number + 1) & _MASK
        address = self._memory.data_ptr()
        written = not self._write(self._own.cuda_stream, address, number, 0)
        if written:
            self._number = number
            while self._ordered and self._is_over(self._ordered[0][0]):
                self._ordered.popleft()
            self._ordered.append((number, what))
            if not self._asked.is_set():
                self._asked.set()
        for stream in later:
            if not written or self._wait(stream.cuda_stream, address, number, _AT_LEAST):
                make_wait(stream)  # for good: this driver cannot

    def _is_over(self, number: int) -> bool:
        return (self._word.value - number) & _MASK < _FAR_AHEAD * 2

    # -- on the valve's thread

    def _run(self) -> None:
        while True:
            self._asked.wait()
            with self._lock:
                self._asked.clear()
            self._watch()
            with self._lock:
                if self._closing and not self._asked.is_set():
                    self._thread = self._on_release = None
                    return

    def _watch(self) -> None:
        """Until all is over, or the patience."""
        seen, since_s = self._word.value, time.monotonic()
        while not self._is_over(self._number):
            time.sleep(_POLL_S)
            if self._word.value != seen:
                seen, since_s = self._word.value, time.monotonic()
            elif time.monotonic() - since_s > self._patience_s:
                self._release()
                return

    def _release(self) -> None:
        what = next((what for number, what in list(self._ordered) if not self._is_over(number)), None)
        if self._on_release is not None:
            try:
                self._on_release(what, self._patience_s)
            except Exception:
                logger.debug("the valve's owner failed", exc_info=True)
        _made.cache_clear()  # the next one to need a valve gets another
        # What is over late still writes its own, lower number.
        until_s = time.monotonic() + _GIVE_UP_S
        while time.monotonic() < until_s:
            last = self._number
            self._word.value = (last + _FAR_AHEAD) & _MASK
            time.sleep(_POLL_S)
            if self._word.value == last == self._number:
                return


@functools.cache
def _made(index: int) -> Valve | None:
    """The valve of a device of NVIDIA's; None if its driver or this build of torch lacks what it needs."""
    try:
        return Valve(*device.host_ordered(index))
    except (OSError, AttributeError, RuntimeError):
        logger.debug("no valve", exc_info=True)
        return None


def valve_of(stream: device.Stream | None) -> Valve | None:
    """The valve of a stream's device; None if it can have none."""
    return _made(stream.device.index) if device.can_be_host_ordered(stream) else None
