"""``with capped(Caps(power_w=300)):`` around a part of an experiment, and checks of which caps are possible."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from overlap_callbacks._log import logger
from overlap_callbacks.experiments.caps.keeper import REFUSED, Answer, Journal, Keeper, Request, default_folder
from overlap_callbacks.experiments.caps.settings import CapError, Caps, Driver
from overlap_callbacks.experiments.supervisor import unmarked_environment
from overlap_callbacks.experiments.sweep import CannotGoOnError

Cap = Callable[[Caps], AbstractContextManager[object]]
_OPTIONS = "--power-cap and --clock-cap"
# Maximum time for a keeper to start or to answer; it retries restoring a value several times.
_ANSWER_S = 60.0


@contextlib.contextmanager
def capped(caps: Caps, uuids: Sequence[str] = (), *, folder: Path | None = None) -> Iterator[list[str]]:
    """Cap devices for the duration of a block, and restore them however the block ends.

    A separate process sets and restores the caps (``keeper.py``), even if this one is killed. If that one is killed,
    this one restores them. Without a cap nothing is done, and root is not needed.

    Args:
        caps: to set, the same on all devices.
        uuids: of the devices; empty for all.
        folder: of the journal; None for the machine's.

    Yields:
        The capped devices.

    Raises:
        CapError: a cap cannot be set, verified or restored; with the command to type if a value has not been restored.
    """
    if not caps:
        yield []
        return
    if os.geteuid() != 0:
        raise CapError("caps of power and clocks need root: run as root, or leave out --power-cap and --clock-cap")
    journal = default_folder() if folder is None else folder
    process = _KeeperProcess(journal)
    try:
        yield process.ask(Request(caps, list(uuids)))
    finally:
        process.end()


class _KeeperProcess:
    """The keeper process, seen from the experiment. Raises CapError if it does not start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Its own session, so that Ctrl-C in the terminal does not reach it. Without the marks that identify our
        # processes, it outlives whatever kills them, and restores what it set. Its errors go to our stderr.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "overlap_callbacks.experiments.caps.keeper", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=unmarked_environment(),
            start_new_session=True,
        )
        try:
            self._await_answer()
        except BaseException:
            self.end()
            raise

    def ask(self, request: Request) -> list[str]:
        """Request caps; returns the capped devices."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(msgspec.json.encode(request) + b"\n")
            stdin.flush()
        except OSError:
            raise CapError("the process that sets the caps has ended") from None
        return self._await_answer()

    def end(self) -> None:
        """Restore everything, and end the keeper; if it is gone, restore here. Raises like ``capped``."""
        error: CapError | None = None
        if self._process.poll() is None:
            try:
                self.ask(Request())
            except CapError as found:
                error = found
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ANSWER_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._process.poll() not in (0, REFUSED):
            self._put_back_here()
        elif error is not None:
            raise error

    def _put_back_here(self) -> None:
        """The keeper was killed, or crashed: restore from its journal."""
        from overlap_callbacks.experiments.caps.drivers import find_driver

        self._process.kill()  # an unresponsive keeper must not change anything any more
        self._process.wait()
        journal = Journal(self._folder)
        driver = find_driver()
        try:
            Keeper(driver, journal, logger.warning).recover()
        finally:
            driver.close()
            journal.close()

    def _await_answer(self) -> list[str]:
        stdout = self._process.stdout
        assert stdout is not None
        deadline, line = time.monotonic() + _ANSWER_S, b""
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                raise CapError(f"the process that sets the caps did not answer within {_ANSWER_S:g} s")
            got = os.read(stdout.fileno(), 65536)
            if not got:
                raise CapError("the process that sets the caps has ended")
            line += got
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise CapError(answer.error)
        return answer.uuids


# -- caps for parts of an experiment


class NotPossibleError(Exception):
    """A part of an experiment cannot have its caps; every device has its earlier settings."""


class Capped(Protocol):
    """A part of an experiment with its own caps; None for the device's limit."""

    @property
    def power_cap_w(self) -> float | None: ...

    @property
    def clock_cap_mhz(self) -> float | None: ...


def caps_of(part: Capped) -> Caps:
    """The caps requested by a part of an experiment; falsy if none."""
    clock_mhz = part.clock_cap_mhz
    return Caps(part.power_cap_w, None if clock_mhz is None else round(clock_mhz))


def refuse_on_cpu(asked: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if ``power_caps_w`` or ``clock_caps_mhz`` were requested and ranks are on the CPU."""
    for option, name in (("--power-cap", "power_caps_w"), ("--clock-cap", "clock_caps_mhz")):
        if any([value is not None for value in asked.get(name, ())]):
            raise ValueError(f"{option} caps GPUs, and the ranks are on the CPU here: leave it out")


def check_may_cap(parts: Iterable[Capped], find_driver: Callable[[], Driver] | None = None) -> None:
    """Raise a ``ValueError`` at once if parts have caps and this process is not root, or the GPUs have no driver."""
    if not any([bool(caps_of(part)) for part in parts]):
        return
    if os.geteuid() != 0:
        raise ValueError(f"{_OPTIONS} need root: run as root, or leave them out")
    from overlap_callbacks.experiments.caps import drivers

    try:
        (find_driver or drivers.find_driver)().close()
    except CapError as error:
        raise ValueError(f"{_OPTIONS} need the driver's library: {error}") from None


@contextlib.contextmanager
def capped_part(wanted: Caps, cap: Cap = capped) -> Iterator[None]:
    """Cap all GPUs of the host while a part of an experiment runs; ``cap`` sets and restores the caps.

    Raises:
        NotPossibleError: a cap cannot be set; every device has its earlier settings.
        CannotGoOnError: a device could not be restored. The message has the command to type.
    """
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(cap(wanted))
    except CapError as error:
        raise NotPossibleError(str(error)) from None
    try:
        yield
    finally:
        try:
            stack.close()
        except CapError as error:
            raise CannotGoOnError(str(error)) from None
