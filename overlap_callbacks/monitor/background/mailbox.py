"""The two files through which a job is asked from outside; see ``analysis/results/request.py``.

Anybody who may write to the folder can put anything there: a link, a pipe, a device, gigabytes. So the file is opened
without following links or waiting, and what was opened is checked before a bounded part of it is read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from overlap_callbacks.analysis.formatting import one_line
from overlap_callbacks.analysis.results.request import (
    ANSWERS_FILE,
    MAX_REQUEST_BYTES,
    REQUEST_FILE,
    JobAnswer,
    Request,
    decode_request,
)

# Answers that stay readable.
_MOST_ANSWERS = 16
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Mailbox:
    """Takes requests from a folder, and leaves answers there. One thread uses it.

    Args:
        folder: of the run.
        group: also take requests of other users, where the file has the job's group.
        refused: called with the reason why a file is no request.
    """

    def __init__(self, folder: Path, *, group: bool, refused: Callable[[str], None]) -> None:
        folder = folder.absolute()  # the job may change its working folder
        self._path, self._answers_path = folder / REQUEST_FILE, folder / ANSWERS_FILE
        self._group = group
        self._refused = refused
        self._answers: deque[JobAnswer] = deque(maxlen=_MOST_ANSWERS)

    def take(self) -> Request | None:
        """The request that is waiting, if any; it is removed. A file that may be somebody else's stays."""
        try:
            file = os.open(self._path, os.O_RDONLY | _SAFELY)
            try:
                found = os.fstat(file)
                self._check(found)
                content = os.read(file, MAX_REQUEST_BYTES + 1)
            finally:
                os.close(file)
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(self._path), found):  # else there is another one meanwhile
                    self._path.unlink()
            return decode_request(content)
        except (FileNotFoundError, NotADirectoryError):  # of a folder that could not be made, the sink tells
            return None
        except (OSError, ValueError) as error:  # a link, no permission
            self._refused(one_line(getattr(error, "strerror", "") or str(error), 200))
            return None

    def answer(self, answer: JobAnswer) -> None:
        """Add an answer to the file, which is replaced as a whole. One that cannot be written is not given."""
        self._answers.append(answer)
        new = self._answers_path.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o644)
            with open(file, "wb") as target:
                target.write(msgspec.json.encode(list(self._answers)))
            os.replace(new, self._answers_path)

    def clear(self) -> None:
        """Remove both files: nobody will listen."""
        self.take()
        with contextlib.suppress(OSError):
            self._answers_path.unlink()

    def _check(self, found: os.stat_result) -> None:
        """Raises ValueError unless a file is the user's own, or the group's where that is allowed."""
        others = stat.S_IWOTH if self._group else stat.S_IWOTH | stat.S_IWGRP
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_size > MAX_REQUEST_BYTES:
            raise ValueError(f"it has more than {MAX_REQUEST_BYTES} bytes")
        if found.st_mode & others:
            raise ValueError("others may write to it")
        if found.st_uid != os.geteuid() and not (self._group and found.st_gid == os.getegid()):
            raise ValueError("it is another user's" + (" and not of the job's group" if self._group else ""))
