"""``with capped(Caps(power_w=300)):`` around a part of an experiment, and the process that keeps the caps."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from overlap_callbacks._log import logger
from overlap_callbacks.analysis.results.env_overrides import COMMAND_MARK
from overlap_callbacks.instruments.caps.keeper import REFUSED, Answer, Journal, Keeper, Request, default_folder
from overlap_callbacks.instruments.caps.settings import CapError, Caps

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
    process = KeeperProcess(journal)
    try:
        yield process.ask(Request(caps, list(uuids)))
    finally:
        process.end()


class KeeperProcess:
    """The keeper process, seen from the experiment or job. Raises CapError if it does not start.

    Args:
        folder: of the journal.
        device: as for ``Journal``.
        answer_s: maximum time that it may take to start or to answer.
    """

    def __init__(self, folder: Path, device: str = "", answer_s: float = _ANSWER_S) -> None:
        self._journal = (folder, device)
        self._answer_s = answer_s
        # Its own session, so that Ctrl-C in the terminal does not reach it. Without the marks that identify our
        # processes, it outlives whatever kills them, and restores what it set. Its errors go to our stderr.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "overlap_callbacks.instruments.caps.keeper", *map(str, self._journal)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith(COMMAND_MARK)},
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
            self._process.wait(self._answer_s)
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._process.poll() not in (0, REFUSED):
            self._put_back_here()
        elif error is not None and self._process.poll() != REFUSED:  # one that refuses to start has said why
            raise error

    def _put_back_here(self) -> None:
        """The keeper was killed, or crashed: restore from its journal."""
        from overlap_callbacks.instruments.caps.drivers import find_driver

        self._process.kill()  # an unresponsive keeper must not change anything any more
        try:
            self._process.wait(self._answer_s)
        except subprocess.TimeoutExpired:  # held in the driver: it cannot be followed, and nobody waits for it
            raise CapError("the process that sets the caps does not end: the next cap restores them") from None
        journal = Journal(*self._journal)
        driver = find_driver()
        try:
            Keeper(driver, journal, logger.warning).recover()
        finally:
            driver.close()
            journal.close()

    def _await_answer(self) -> list[str]:
        stdout = self._process.stdout
        assert stdout is not None
        deadline, line = time.monotonic() + self._answer_s, b""
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                raise CapError(f"the process that sets the caps did not answer within {self._answer_s:g} s")
            got = os.read(stdout.fileno(), 65536)
            if not got:
                raise CapError("the process that sets the caps has ended")
            line += got
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise CapError(answer.error)
        return answer.uuids
