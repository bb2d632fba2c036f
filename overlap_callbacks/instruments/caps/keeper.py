"""The keeper: a separate process that sets and restores caps, whatever happens to the experiment or job.

It reads requests from its standard input, one JSON object per line, and answers each. It restores everything when asked
to, and when the experiment's process has ended in any way: its pipe closes, or the keeper gets another parent. Signals
that end an experiment (Ctrl-C, SIGTERM, SIGHUP) do not end it. It does not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from overlap_callbacks.instruments.caps.settings import (
    Before,
    CapError,
    Caps,
    Driver,
    check,
    not_put_back,
    put_back,
    read_before,
    set_and_verify,
)

# Exit code of a keeper that refuses to start, having changed nothing; unlike that of a Python traceback.
REFUSED = 3
# How often to check that the experiment's process still exists: a child of it may hold the pipe open.
_LOOK_S = 0.2


class Request(msgspec.Struct):
    """Caps to set on devices (all, if none are named); without caps, restore the earlier settings."""

    caps: Caps | None = None
    uuids: list[str] = []


class Answer(msgspec.Struct):
    """The capped devices, or an error message."""

    error: str = ""
    uuids: list[str] = []


def default_folder() -> Path:
    """The journal's folder, shared by all who act as root on this machine until it reboots, which also resets caps."""
    run = Path("/run")
    return (run if os.access(run, os.W_OK) else Path(tempfile.gettempdir())) / "overlap-callbacks-caps"


class Journal:
    """The devices' earlier settings, on disk: written before anything is changed, removed once all is restored.

    Used by one keeper at a time. If a keeper and its experiment die together, the next keeper on this machine restores
    the settings.

    Args:
        folder: shared by all keepers of the machine.
        device: the only device that is capped; each rank of a job has such a journal at the same time. Empty for any:
            then no other keeper may have a journal, and what each of them left is restored.

    Raises:
        CapError: another keeper has it, or it cannot be read or written; its methods raise it too.
    """

    def __init__(self, folder: Path, device: str = "") -> None:
        self.path = folder / f"{device or 'before'}.json"
        self._folder, self._device = folder, device
        self._locks: list[IO[str]] = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock("lock", fcntl.LOCK_SH if device else fcntl.LOCK_EX)
            if device:
                self._lock(f"{device}.lock", fcntl.LOCK_EX)
        except BlockingIOError:
            raise CapError(f"another experiment or job has capped devices of this machine (lock in {folder})") from None
        except OSError as error:
            raise CapError(f"the devices' present settings cannot be saved in {folder}: {error.strerror}") from None

    def _lock(self, name: str, kind: int) -> None:
        file = (self._folder / name).open("w")
        self._locks.append(file)
        fcntl.flock(file, kind | fcntl.LOCK_NB)

    def read(self) -> list[Before]:
        """The settings left by an earlier keeper; empty if it restored all."""
        of_all = self._folder / "before.json"
        if self._device and of_all.exists():
            raise CapError(f"an earlier experiment did not put its caps back, and the next one will: see {of_all}")
        before: list[Before] = []
        for path in [self.path] if self._device else sorted(self._folder.glob("*.json")):
            try:
                before += msgspec.json.decode(path.read_bytes(), type=list[Before])
            except FileNotFoundError:
                continue
            except (OSError, msgspec.DecodeError) as error:
                raise CapError(f"{path} cannot be read, and may say how devices stood: {error}") from None
        return before

    def write(self, before: list[Before]) -> None:
        """Replace the contents; on disk when this returns."""
        unfinished = self.path.with_suffix(".new")
        try:
            with unfinished.open("wb") as file:
                file.write(msgspec.json.encode(before))
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.path)
        except OSError as error:
            raise CapError(f"{self.path} cannot be written: {error.strerror}") from None

    def clear(self) -> None:
        """Mark everything as restored."""
        for path in [self.path] if self._device else self._folder.glob("*.json"):
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Release it for another keeper."""
        for lock in self._locks:
            lock.close()


class Keeper:
    """Sets and restores caps; ``say`` shows a message to the user."""

    def __init__(self, driver: Driver, journal: Journal, say: Callable[[str], None]) -> None:
        self._driver = driver
        self._journal = journal
        self._say = say
        self._before: list[Before] = []

    def recover(self) -> None:
        """Restore the settings left by an earlier keeper, or raise a CapError."""
        self._before = self._journal.read()
        if self._before:
            self._say("an earlier experiment did not put its caps back: doing so now")
        why = self.restore()
        if why:
            raise CapError(why)

    def cap(self, uuids: Sequence[str], caps: Caps) -> list[str]:
        """Restore, then set and verify caps. Returns the devices; after a ``CapError`` none is capped."""
        why = self.restore()
        if why:
            raise CapError(why)
        chosen = list(uuids) or self._driver.uuids()
        if not chosen:
            raise CapError("no device that could be capped was found")
        for uuid in chosen:
            check(self._driver, uuid, caps)
        self._before = [read_before(self._driver, uuid, caps) for uuid in chosen]
        try:
            self._journal.write(self._before)
            for uuid in chosen:
                set_and_verify(self._driver, uuid, caps)
        except BaseException as error:
            why = self.restore()
            if why and isinstance(error, CapError):
                raise CapError(f"{error}. {why}") from error
            raise
        return chosen

    def restore(self) -> str:
        """Restore everything. Returns why something is not restored, with the command to type; empty if all is."""
        failed = []
        left = []
        for before in self._before:
            why = put_back(self._driver, before)
            if why:
                left.append(before)
                failed.append(not_put_back(self._driver, before, why))
        self._before = left
        if not left:
            self._journal.clear()
        for message in failed:
            self._say(message)
        return " ".join(failed)


def serve(keeper: Keeper) -> None:
    """Answer requests until the experiment's process ends; then restore everything."""
    try:
        for line in _lines(os.getppid()):
            _answer(_handle(keeper, msgspec.json.decode(line, type=Request)))
    finally:
        keeper.restore()


def _handle(keeper: Keeper, request: Request) -> Answer:
    try:
        if request.caps is None:
            return Answer(error=keeper.restore())
        return Answer(uuids=keeper.cap(request.uuids, request.caps))
    except CapError as error:
        return Answer(error=str(error))


def _lines(parent: int) -> Iterator[bytes]:
    """Lines of the standard input, until it ends or this process gets another parent."""
    rest = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], _LOOK_S)[0]:
            continue
        got = os.read(0, 65536)
        if not got:
            return
        *lines, rest = (rest + got).split(b"\n")
        yield from lines


def _answer(answer: Answer) -> None:
    try:
        os.write(1, msgspec.json.encode(answer) + b"\n")
    except OSError:  # its reader is gone, which the next read will notice
        return


def _say(message: str) -> None:
    try:
        os.write(2, f"overlap-callbacks: {message}\n".encode())
    except OSError:
        return


def main() -> int:
    from overlap_callbacks.instruments.caps.drivers import find_driver

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        journal = Journal(Path(sys.argv[1]), *sys.argv[2:])
        driver = find_driver()
        keeper = Keeper(driver, journal, _say)
        keeper.recover()
    except CapError as error:
        _answer(Answer(error=str(error)))
        return REFUSED
    _answer(Answer())
    serve(keeper)
    driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
