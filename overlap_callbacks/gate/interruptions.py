"""Handles exceptions that the user's signal handlers raise while the gate's Python code runs within a collective.

Python runs signal handlers on the main thread, between two bytecodes. Without the library there are none within a
collective: a handler raises once ``backward()`` has returned, and the user may catch that and go on. With Python
kernels the exception would surface in DDP's reducer, and break it for good. Two measures prevent that:

- CPython checks for signals only where a function is entered, after a call, and where a loop jumps back. A kernel that
  is entered ``without_signal_check`` and issues its collective with an ``issuer`` has no such point of its own;
- exceptions that surface elsewhere in a measured step are kept, and raised when the step ends.

In a build without the GIL, a handler may still raise within the issuer.
"""

from __future__ import annotations

import dis
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import starmap
from types import CodeType, FunctionType
from typing import Any

# Without the GIL, threads may interleave between any two bytecodes.
_HAS_GIL = bool(getattr(sys, "_is_gil_enabled", lambda: True)())

_RESUME = dis.opmap.get("RESUME")
_NO_CHECK = 2  # as when a generator resumes after ``yield from``


def without_signal_check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Change a function so that no signal handler runs on entry: ``RESUME 0`` checks for signals, ``RESUME 2`` not."""
    if _RESUME is not None and isinstance(function, FunctionType):
        code = bytearray(function.__code__.co_code)
        for place in range(0, len(code), 2):
            if code[place] == _RESUME:
                code[place + 1] = _NO_CHECK
                function.__code__ = function.__code__.replace(co_code=bytes(code))
                break
    return function


class _OfThread(threading.local):
    """Arguments per thread, for builds in which threads interleave between any two bytecodes."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, ...]] = []

    def __iadd__(self, arguments: tuple[tuple[Any, ...]]) -> _OfThread:
        self._waiting += arguments
        return self

    def pop(self) -> tuple[Any, ...]:
        return self._waiting.pop()


def issuer(redispatch: Callable[..., Any]) -> tuple[Any, Iterator[Any]]:
    """A way to call ``redispatch`` without the check for signals that follows a Python call.

    Returns a list and an iterator. ``arguments += (args,)``, then a ``for`` loop over the iterator that returns in its
    first round, calls ``redispatch(*args)`` once. Threads may share them: the GIL is not released in between.
    """
    arguments: Any = [] if _HAS_GIL else _OfThread()
    return arguments, starmap(redispatch, iter(arguments.pop, None))


class Interrupts(list[BaseException]):
    """Exceptions raised by signal handlers within the kernels, until the step ends. The kernels append with ``+=``."""

    def own(self, error: Exception) -> Exception | None:
        """Return the error if it is internal; otherwise keep it, and return None."""
        if not is_from_handler(error):
            return error
        self.append(error)
        return None

    def take(self) -> BaseException | None:
        """The exception to raise, preferring those that are no ``Exception`` (``KeyboardInterrupt``). Clears all."""
        kept = sorted(self, key=lambda error: isinstance(error, Exception))
        self.clear()
        return kept[0] if kept else None


def is_own(error: BaseException) -> bool:
    """Whether an error caught by the kernels is internal: Python ran out of stack or memory on the way to the gate."""
    return isinstance(error, (RecursionError, MemoryError)) and not is_from_handler(error)


def is_from_handler(error: BaseException) -> bool:
    """Whether the exception passed through a signal handler of the user's. Call it right after catching."""
    handlers = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """The code of a handler; None if it is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__  # a callable object
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None
