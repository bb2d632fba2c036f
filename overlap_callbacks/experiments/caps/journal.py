"""What stood on the devices before, on disk: written before anything is changed, removed once all is put back.

Of two keepers that die together, this is what is left. The next one that caps on this machine puts back what it finds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

import msgspec

from overlap_callbacks.experiments.caps.settings import Before, CapError

_NAME = "overlap-callbacks-caps"


def default_folder() -> Path:
    """Where the journal is, for all users of root's on this machine, until it starts anew (as caps do)."""
    run = Path("/run")
    return (run if os.access(run, os.W_OK) else Path(tempfile.gettempdir())) / _NAME


class Journal:
    """The journal of this machine, for one keeper at a time.

    Args:
        folder: of the journal.

    Raises:
        CapError: another keeper has it, or it cannot be written.
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
        return read(self.path)

    def write(self, before: list[Before]) -> None:
        """Keep this instead, on disk when this returns.

        Raises:
            CapError: it cannot be written.
        """
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


def read(path: Path) -> list[Before]:
    """What a journal holds; empty without one.

    Raises:
        CapError: it cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Before])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise CapError(f"{path} cannot be read, and may say how devices stood: {error}") from None
