"""Detects when another profiler is prepared or started, so that the library's own session gives way.

A process has one profiler. If two meet, torch loses events, raises, or crashes: a profiler with a schedule is prepared
some steps before it starts, and a session in between undoes that. torch records neither who owns a session nor whether
one is prepared, so its two functions are wrapped while a monitor measures.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch.autograd.profiler

_torch_profiler: Any = torch.autograd.profiler


def serves_a_daemon() -> bool:
    """Whether Kineto accepts trace requests from a daemon (dynolog).

    Python cannot see when such a trace begins, and another session during it leaves it empty.
    """
    return "KINETO_USE_DAEMON" in os.environ


class Yielding(Protocol):
    """A session of the library, which another profiler can end."""

    def give_way(self) -> None:
        """End the session; callable from any thread."""


class OtherProfilers:
    """The state of other profilers, which any thread may start.

    ``prepared``: one is prepared and has not started yet.
    """

    def __init__(self) -> None:
        self.prepared = False
        self._lock = threading.RLock()
        self._num_watching = 0
        self._restore: list[tuple[str, Any, Any]] = []  # name, torch's own function, its wrapper
        self._starting = 0  # the thread that is starting a session of the library
        self._ours: Yielding | None = None
        self._disturbed = False  # a session of the library may have undone an unseen preparation

    def watch(self) -> None:
        """Start detecting. Each call needs a matching ``unwatch``."""
        with self._lock:
            self._num_watching += 1
            if self._num_watching == 1:
                prepare, enable = _torch_profiler._prepare_profiler, _torch_profiler._enable_profiler
                self._wrap("_prepare_profiler", prepare, self._around_prepare(prepare))
                self._wrap("_enable_profiler", enable, self._around_enable(prepare, enable))

    def unwatch(self) -> None:
        """Restore torch's functions when the last watcher leaves."""
        with self._lock:
            self._num_watching -= 1
            while not self._num_watching and self._restore:
                name, function, around = self._restore.pop()
                if getattr(_torch_profiler, name) is around:  # otherwise somebody else has wrapped them since
                    setattr(_torch_profiler, name, function)
            if not self._num_watching:
                self.prepared = self._disturbed = False

    @contextlib.contextmanager
    def starting(self, ours: Yielding) -> Iterator[None]:
        """Context for starting a session of the library, which owns it from then on unless an exception is raised."""
        self._starting = threading.get_ident()
        try:
            yield
            self._ours = ours
            self._disturbed = True
        finally:
            self._starting = 0

    def claim(self, ours: Yielding) -> bool:
        """Whether the session is still the library's; if so, the caller must end it. True for one caller at most."""
        with self._lock:
            if self._ours is not ours:
                return False
            self._ours = None
            return True

    # -- wrappers of torch's functions

    def _wrap(self, name: str, function: Any, around: Any) -> None:
        self._restore.append((name, function, around))
        setattr(_torch_profiler, name, around)

    def _around_prepare(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_and_note(*args: Any, **kwargs: Any) -> Any:
            if self._starting == threading.get_ident():
                return prepare(*args, **kwargs)
            self._end_own_session()
            result = prepare(*args, **kwargs)
            self.prepared = self._num_watching > 0
            self._disturbed = False
            return result

        return prepare_and_note

    def _around_enable(self, prepare: Callable[..., Any], enable: Callable[..., Any]) -> Callable[..., Any]:
        def enable_and_note(*args: Any, **kwargs: Any) -> Any:
            if self._starting == threading.get_ident():
                return enable(*args, **kwargs)
            unprepared = self._disturbed and not self.prepared
            if self._end_own_session():
                _torch_profiler._run_on_profiler_start()  # ending the library's session has cleared the other's flag
            if unprepared:
                # Prepared before the watch began, then undone by the library's session. Unprepared, it would crash the
                # process.
                with contextlib.suppress(Exception):
                    prepare(*args[:2])
            self.prepared = self._disturbed = False
            return enable(*args, **kwargs)

        return enable_and_note

    def _end_own_session(self) -> bool:
        with self._lock:
            ours, self._ours = self._ours, None
            if ours is None:
                return False
            with contextlib.suppress(Exception):  # the other profiler starts in any case
                ours.give_way()
            return True


other_profilers = OtherProfilers()
