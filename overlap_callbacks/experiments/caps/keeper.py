"""The keeper: a process of its own that sets caps and puts them back, whatever becomes of the experiment.

It reads requests from its standard input, one JSON object a line, and answers each. It puts everything back when asked
to, and when the experiment's process has ended in whatever way: its pipe closes, or the keeper gets another parent.
Signals that end an experiment (Ctrl-C, SIGTERM, SIGHUP) do not end it. It loads no torch.
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

from overlap_callbacks.experiments.caps.settings import (
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

# Exit code of a keeper that refuses to begin, having changed nothing. That of a Python traceback is another one.
REFUSED = 3
# Time between two looks at whether the experiment's process is still there: a child of it may hold the pipe open.
_LOOK_S = 0.2


class Request(msgspec.Struct):
    """Caps to set on devices (all, if none are named), or without caps to put back what was before."""

    caps: Caps | None = None
    uuids: list[str] = []


class Answer(msgspec.Struct):
    """The devices that are capped, or an error in words."""

    error: str = ""
    uuids: list[str] = []


def default_folder() -> Path:
    """Where the journal is, for all users of root's on this machine, until it starts anew (as caps do)."""
    run = Path("/run")
    return (run if os.access(run, os.W_OK) else Path(tempfile.gettempdir())) / "overlap-callbacks-caps"


class Journal:
    """How devices were before, on disk: written before anything is changed, removed once all is put back.

    It is for one keeper at a time. If a keeper and its experiment die together, the next keeper on this machine puts
    back what it finds.

    Raises:
        CapError: another keeper has it, or it cannot be read or written; so do its methods.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "before.json"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock: IO[str] = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CapError(f"another experiment has capped devices of this machine (lock in {folder})") from None
        except OSError as error:
            raise CapError(f"what stands on the devices cannot be written down in {folder}: {error.strerror}") from None

    def read(self) -> list[Before]:
        """What an earlier keeper has left; empty if it has put all back."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=list[Before])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            raise CapError(f"{self.path} cannot be read, and may say how devices stood: {error}") from None

    def write(self, before: list[Before]) -> None:
        """Keep this instead, on disk when this returns."""
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
        """All is as before."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def close(self) -> None:
        """Let another keeper have it."""
        self._lock.close()


class Keeper:
    """Sets caps and puts them back; ``say`` tells a person."""

    def __init__(self, driver: Driver, journal: Journal, say: Callable[[str], None]) -> None:
        self._driver = driver
        self._journal = journal
        self._say = say
        self._before: list[Before] = []

    def recover(self) -> None:
        """Put back what an earlier keeper has left, or raise a CapError."""
        self._before = self._journal.read()
        if self._before:
            self._say("an earlier experiment did not put its caps back: doing so now")
        why = self.restore()
        if why:
            raise CapError(why)

    def cap(self, uuids: Sequence[str], caps: Caps) -> list[str]:
        """Set and verify caps, after putting back what is set. Returns the devices; after a ``CapError`` none is."""
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
        """Put everything back. Returns why something is not as before, with what to type; empty if all is."""
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
    """Answer requests until the experiment's process ends; then put everything back."""
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
    except OSError:  # its reader is gone: the next look at the input says so
        return


def _say(message: str) -> None:
    try:
        os.write(2, f"overlap-callbacks: {message}\n".encode())
    except OSError:
        return


def main() -> int:
    """Serve one experiment."""
    from overlap_callbacks.experiments.caps.drivers import find_driver

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        journal = Journal(Path(sys.argv[1]))
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
