"""Messages to the user, and the handling of the library's own errors.

No error of the library reaches the job, unless the user asked for it with ``strict``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec

import torch.distributed as dist

from overlap_callbacks._log import logger, to_stderr
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.interruptions import is_from_handler
from overlap_callbacks.gate.switches import RefusedError
from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.environment import hidden_names
from overlap_callbacks.monitor.background.roll_call import Refusal
from overlap_callbacks.monitor.background.store import StoreFailedError
from overlap_callbacks.sinks import Sink

P = ParamSpec("P")


class MisuseError(ValueError):
    """Calls out of order (such as ``step_end`` without ``step_begin``) or an invalid step number. Strict mode only."""


class Notices:
    """Messages through ``logging``: warnings from every rank, with its number; everything else from rank 0 only.

    With ``hosts=False``, no later message of this process names a host.
    """

    def __init__(self, *, hosts: bool = True) -> None:
        if not hosts:
            logger.hide(hidden_names("this host"))
        self._given: set[str] = set()

    def warn_once(self, key: str, message: str, error: Exception | None = None) -> None:
        """Warn, unless a message with this key was given before. Logs the traceback of ``error``, if given."""
        if key not in self._given:
            self._given.add(key)
            rank = current_rank()
            logger.warning("overlap-callbacks%s: %s", f" (rank {rank})" if rank else "", message, exc_info=error)

    def info_once(self, key: str, message: str) -> None:
        """Inform, unless a message with this key was given before."""
        if key not in self._given:
            self._given.add(key)
            self.info(message)

    def announce_once(self, key: str, message: str) -> None:
        """Announce, unless a message with this key was given before."""
        if key not in self._given:
            self._given.add(key)
            self.announce(message)

    @staticmethod
    def info(message: str) -> None:
        """Log something that needs no action."""
        if not current_rank():
            logger.info("overlap-callbacks: %s", message)

    @staticmethod
    def warn_on_first(message: str) -> None:
        """Warn on rank 0 of something that is the same on every rank."""
        if not current_rank():
            logger.warning("overlap-callbacks: %s", message)

    @staticmethod
    def announce(message: str) -> None:
        """Log on rank 0. Printed to stderr if logging is not configured, so that the user always sees it."""
        if current_rank():
            return
        if logger.shows_info:
            logger.info("overlap-callbacks: %s", message)
        elif not logger.is_configured:
            to_stderr(logger.hidden(f"overlap-callbacks: {message}"))


def say_refusal(refusal: Refusal) -> None:
    """On rank 0, say that no rank measures, and why."""
    Notices.warn_on_first(f"measuring is switched off on all ranks, training goes on: {refusal.text} [OC110]")


def current_rank() -> int:
    """This process's rank in the default process group; without one, the launcher's."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    given = os.environ.get("RANK", "0")
    return int(given) if given.isdigit() else 0


class FaultGuard:
    """Runs the library's own work on the training thread and handles its errors.

    In production the first error warns once and switches measuring off; in strict mode it is also raised. Errors on the
    library's threads are kept until the training thread's next step. Later ones are dropped: queued reports fail in the
    same way.

    ``stop`` switches measuring off, between steps or within one; ``fail`` does so after an internal error, when no open
    state can be trusted; ``wake`` makes the next ``step_begin`` check for errors of the threads. These are bound
    methods, held weakly: the threads must not keep alive a monitor that its user has dropped.
    """

    def __init__(
        self,
        notices: Notices,
        gate: Gate,
        *,
        strict: bool,
        stop: Callable[[], None],
        fail: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self.strict = strict
        self.notices = notices
        self._gate = gate
        self._stop = weakref.WeakMethod(stop)
        self._fail = weakref.WeakMethod(fail)
        self._wake = weakref.WeakMethod(wake)
        self._reported: Exception | None = None
        self.refusal: Refusal | None = None  # not acted on yet
        self._failed = self._is_woken = False

    # -- on the training thread

    def run(self, action: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``action``. Its errors do not reach the job, except in strict mode; those of signal handlers do."""
        try:
            action(*args, **kwargs)
        except MisuseError:
            raise  # only happens in strict mode
        except Exception as error:
            if is_from_handler(error):
                raise  # the user's own exception
            self._gate.stop()  # from here on the job's collectives pass through unchanged
            self._failed = True
            if not self.strict:
                self.notices.warn_once("failed", _why(error), error)
            _call(self._fail)
            if self.strict:
                raise

    def misuse(self, key: str, message: str) -> None:
        """Report inconsistent calls by the user: warn once, or raise ``MisuseError`` in strict mode."""
        if self.strict:
            raise MisuseError(message)
        self.notices.warn_once(key, message)

    def switch_off(self, key: str, message: str) -> None:
        """Warn once that nothing more can be measured, and switch measuring off."""
        self.notices.warn_once(key, message)
        _call(self._stop)

    @property
    def pending(self) -> bool:
        """Whether a thread of the library has reported an error that is not raised yet, or calls for ``begin``."""
        return self.has_error or self.refusal is not None or self._is_woken

    def raise_reported(self) -> None:
        """Raise what a thread of the library reported, if anything; called by ``run``."""
        self._is_woken = False
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            _call(self._stop)
            if self.strict:
                raise RuntimeError(f"measuring is switched off on all ranks: {refusal.text}")
        error, self._reported = self._reported, None
        if error is not None and not self._failed:
            raise error

    @property
    def has_error(self) -> bool:
        """Whether a thread has reported an error that is not raised yet."""
        return self._reported is not None

    # -- on any thread

    def report(self, error: Exception) -> None:
        """Keep a thread's error for the training thread's next step, and let collectives pass from now on."""
        self._reported = error  # first: a step that ends meanwhile does not count
        self._gate.stop()
        _call(self._wake)

    def wake(self) -> None:
        """Make the training thread look, before its next step, at what a thread has left for it."""
        self._is_woken = True
        _call(self._wake)

    def refused(self, refusal: Refusal) -> None:
        """Stop before the next step: the ranks agreed that none measures."""
        self.refusal = refusal
        if not self.strict:
            say_refusal(refusal)
        _call(self._wake)

    def sink_failed(self, sink: Sink, error: Exception) -> None:
        """Warn once that a sink failed and is no longer used; in strict mode the next step raises the error."""
        name = type(sink).__name__
        self.notices.warn_once(
            f"sink {name}", f"{name} failed and is not used again, the rest goes on: {error} [OC603]"
        )
        if self.strict:
            self.report(error)


def _why(error: Exception) -> str:
    # No bugs of the library: usually the store's process is gone, or a step begins where none can be measured.
    if isinstance(error, (StoreFailedError, RefusedError)):
        return f"measuring is switched off, training goes on: {error}"
    if failure := device.failure(error):
        return f"the device or a collective failed, and measuring is switched off: {failure} [OC128]"
    return f"an internal error switched measuring off, training goes on: {error!r} [OC113]"


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()
