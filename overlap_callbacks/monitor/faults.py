"""What users hear of trouble, and what becomes of errors of ours.

None of them reaches the job, unless the user asked for it with ``strict``.
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
from overlap_callbacks.instruments.environment import hidden_names
from overlap_callbacks.monitor.background.store import StoreFailedError
from overlap_callbacks.sinks import Sink

P = ParamSpec("P")


class MisuseError(ValueError):
    """A call out of order (``step_end`` without ``step_begin``, say) or an invalid step number; in strict mode only."""


class Notices:
    """Messages through ``logging``: warnings from every rank, with its number; everything else from rank 0 only.

    Without ``hosts`` no message of this process names a host from here on.
    """

    def __init__(self, *, hosts: bool = True) -> None:
        if not hosts:
            logger.hide(hidden_names("this host"))
        self._given: set[str] = set()

    def warn_once(self, key: str, message: str, error: Exception | None = None) -> None:
        """Warn, unless a message with this key was given before; with the traceback of ``error``."""
        if key not in self._given:
            self._given.add(key)
            rank = current_rank()
            logger.warning("overlap-callbacks%s: %s", f" (rank {rank})" if rank else "", message, exc_info=error)

    def info_once(self, key: str, message: str) -> None:
        """Inform, unless a message with this key was given before."""
        if key not in self._given:
            self._given.add(key)
            self.info(message)

    @staticmethod
    def info(message: str) -> None:
        """Say something that needs no action."""
        if not current_rank():
            logger.info("overlap-callbacks: %s", message)

    @staticmethod
    def announce(message: str) -> None:
        """The final line. Printed to stderr if logging is not configured, so the user always sees it."""
        if current_rank():
            return
        if logger.shows_info:
            logger.info("overlap-callbacks: %s", message)
        elif not logger.is_configured:
            to_stderr(logger.hidden(f"overlap-callbacks: {message}"))


def current_rank() -> int:
    """This process's rank: of the default process group, else what the launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    given = os.environ.get("RANK", "0")
    return int(given) if given.isdigit() else 0


class FaultGuard:
    """Runs our own work on the training thread, and decides what becomes of its errors.

    In production the first error warns once and switches measuring off; in strict mode it is raised as well. Errors on
    threads of our own are kept until the training thread asks for them at its next step. Later ones are dropped:
    reports that were still queued fail in the same way.

    ``stop`` switches measuring off, between steps or within one; ``fail`` does so after an error of ours, when nothing
    that is open can be trusted; ``wake`` has the next ``step_begin`` ask for errors of our threads. These are methods,
    held weakly: our threads must not keep a monitor alive that its user has dropped.
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
        self._failed = False

    # -- on the training thread

    def run(self, action: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``action``. Its errors do not reach the job, except in strict mode; those of signal handlers do."""
        try:
            action(*args, **kwargs)
        except MisuseError:
            raise  # only raised in strict mode
        except Exception as error:
            if is_from_handler(error):
                raise  # the user's own
            self._gate.stop()  # from here on the job's collectives pass as they are
            self._failed = True
            if not self.strict:
                self.notices.warn_once("failed", _why(error), error)
            _call(self._fail)
            if self.strict:
                raise

    def misuse(self, key: str, message: str) -> None:
        """The user's calls do not fit together: warn once, or raise ``MisuseError`` in strict mode."""
        if self.strict:
            raise MisuseError(message)
        self.notices.warn_once(key, message)

    def switch_off(self, key: str, message: str) -> None:
        """Nothing can be measured any more: warn once, and switch measuring off."""
        self.notices.warn_once(key, message)
        _call(self._stop)

    @property
    def pending(self) -> bool:
        """Whether a thread of ours has reported an error that was not raised yet."""
        return self._reported is not None

    def raise_reported(self) -> None:
        """Raise what a thread of ours reported, if anything; called by ``run``."""
        error, self._reported = self._reported, None
        if error is not None and not self._failed:
            raise error

    # -- on any thread

    def report(self, error: Exception) -> None:
        """Keep an error of a thread of ours for the training thread's next step, and let collectives through now."""
        self._gate.stop()
        self._reported = error
        _call(self._wake)

    def sink_failed(self, sink: Sink, error: Exception) -> None:
        """A sink failed and is not used again: warn once; in strict mode the next step raises the error."""
        name = type(sink).__name__
        self.notices.warn_once(f"sink {name}", f"{name} failed and is not used again, the rest goes on: {error}")
        if self.strict:
            self.report(error)


def _why(error: Exception) -> str:
    if isinstance(error, StoreFailedError):  # no error of ours: the process that serves it is gone, mostly
        return f"{error}; measuring is switched off, training goes on"
    return f"an internal error switched measuring off, training goes on: {error!r}"


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()
