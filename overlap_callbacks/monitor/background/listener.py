"""Hears what rank 0 is asked from outside: a file that is looked for once a second, torch's debug server, a signal."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Any

import msgspec

from overlap_callbacks._log import logger
from overlap_callbacks.analysis.results.request import WINDOW, JobAnswer, Request
from overlap_callbacks.monitor.background.desk import Desk
from overlap_callbacks.monitor.background.mailbox import Mailbox
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.faults import Notices

_LOOK_S = 1.0
# Name of the handler of torch's debug server, and how long a request there waits for its answer.
_HANDLER = "overlap_callbacks"
_DEBUG_TIMEOUT_S = 60.0


class Listener:
    """A thread of rank 0 that takes requests to the desk. A file system that hangs holds up nothing but this thread.

    Args:
        desk: answers.
        config: the options; the mailbox is in the folder of the record, if there is one.
        notices: for what cannot be answered.
    """

    def __init__(self, desk: Desk, config: MonitorConfig, notices: Notices) -> None:
        self._desk = desk
        self._notices = notices
        records = [record for sink in config.sinks if (record := sink.kept_record()) is not None]
        self._mailbox = (
            Mailbox(records[0].parent, group=config.ask == "group", refused=self._refuse) if records else None
        )
        self._signal_number = None if config.ask_signal is None else signal.Signals[config.ask_signal]
        self._previous: Any = None  # handler of the signal; None while it is not ours
        self._is_signalled = False
        self._over = threading.Event()
        self._answers: list[JobAnswer] = []  # from other threads; the file is this thread's
        self._thread = threading.Thread(target=self._run, name="overlap-callbacks-ask", daemon=True)

    def _refuse(self, why: str) -> None:
        self._notices.warn_once("request", f"a request from outside is not read: {why} [OC145]")

    def start(self) -> None:
        """Called on the training thread. Without another thread nobody listens, and measuring goes on."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the system cannot start one
            logger.debug("the thread that hears requests", exc_info=error)
            return
        _served["desk"] = self._desk
        if self._signal_number is not None and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(self._signal_number, self._on_signal)

    def close(self, timeout_s: float) -> None:
        """Hear nothing more."""
        self._over.set()
        if _served.get("desk") is self._desk:
            _served.clear()
        number, is_main = self._signal_number or 0, threading.current_thread() is threading.main_thread()
        if self._previous is not None and is_main and signal.getsignal(number) == self._on_signal:
            signal.signal(number, self._previous)
            self._previous = None
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True
        if callable(self._previous):
            self._previous(number, frame)

    def _run(self) -> None:
        try:
            self._look(is_new=False)
            while not self._over.wait(_LOOK_S):
                self._look()
            if self._mailbox is not None:
                self._mailbox.clear()
        except Exception as error:  # nobody listens from now on
            self._notices.warn_once("listener", f"requests from outside are heard no more: {error!r} [OC149]", error)

    def _look(self, *, is_new: bool = True) -> None:
        """``is_new``: whether a request was made while somebody listened; a job before may have left it."""
        if getattr(sys.modules.get("torch.distributed.debug"), "_WORKER_SERVER", None) is not None:
            _register_handler()
        if self._is_signalled:
            self._is_signalled = False
            self._desk.respond(Request.of(WINDOW), lambda _: None)  # the log has the answer
        if self._mailbox is not None:
            request = self._mailbox.take()
            if request is not None:
                self._desk.respond(request, self._answers.append, is_new=is_new)
            while self._answers:
                self._mailbox.answer(self._answers.pop(0))


# -- torch's debug server, where the job has started one: it serves what is registered here, by POST at its own port

# The desk that answers there, if any. The handler stays registered.
_served: weakref.WeakValueDictionary[str, Desk] = weakref.WeakValueDictionary()


@functools.cache
def _register_handler() -> None:
    with contextlib.suppress(ImportError, AttributeError, ValueError):  # another torch
        from torch._C import _distributed_c10d

        # torch drops its reference once the interpreter is gone, and would abort if it were the last one.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_serve))
        _distributed_c10d._register_handler(_HANDLER, _serve)


def _serve(request: Any, response: Any) -> None:
    """POST ``/handler/overlap_callbacks?ask=status``, with ``now=1`` for a window outside the budget."""
    desk, answers = _served.get("desk"), queue.SimpleQueue[JobAnswer]()
    status, content = 503, b"nobody listens here: ask rank 0\n"
    try:
        if desk is not None:
            desk.respond(Request.of(request.get_param("ask"), now=request.get_param("now") == "1"), answers.put)
            status, content = 200, msgspec.json.encode(answers.get(timeout=_DEBUG_TIMEOUT_S))
    except ValueError as error:
        status, content = 400, f"{error}\n".encode()
    except queue.Empty:
        status, content = 504, b"no answer in time\n"
    response.set_content(content, "application/json" if status == 200 else "text/plain")
    response.set_status(status)
