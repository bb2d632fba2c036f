"""Runs a job for its record."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from overlap_callbacks.analysis.results.env_overrides import RUN_DIR
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.experiments.failures import exit_in_words
from overlap_callbacks.experiments.supervisor import Ending, interruptible, supervise
from overlap_callbacks.report.record import RecordError, read

_STDERR = 2


class CommandFailedError(Exception):
    """A command that failed, and how."""


def run_for_windows(command: Sequence[str], folder: Path, windows: int | None, timeout_s: float) -> None:
    """Run a command until it ends, or its record has enough windows. Its output goes to our stderr.

    Args:
        command: program and arguments.
        folder: gets the record.
        windows: that must count before the command is ended; None to let it end by itself.
        timeout_s: maximum time.

    Raises:
        CommandFailedError: it cannot be started, ended with an error, or took too long.
        KeyboardInterrupt: Ctrl-C. The command has ended.
    """
    watched = _Windows(folder / FILE_NAME)

    def is_done() -> bool:
        return windows is not None and watched.count() >= windows

    try:
        with interruptible():
            outcome = supervise(
                command,
                environment={**os.environ, RUN_DIR: str(folder)},
                is_done=is_done,
                timeout_s=timeout_s,
                stdout=_STDERR,  # stdout is the verdict's
            )
    except OSError as error:
        raise CommandFailedError(f"the command cannot be started: {error.strerror}") from None
    if outcome.ending is Ending.TIMEOUT:
        raise CommandFailedError(f"the command took longer than {timeout_s:g} s (--timeout)")
    if outcome.ending is Ending.BY_ITSELF and outcome.exit_code:
        raise CommandFailedError(f"the command failed ({exit_in_words(outcome.exit_code)})")


class _Windows:
    """The windows that count in a record which grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = -1
        self._count = 0

    def count(self) -> int:
        try:
            size = self._path.stat().st_size
            if size != self._size:
                self._size = size
                self._count = len(read(self._path, details=False).valid_windows)
        except (OSError, RecordError):
            return 0
        return self._count
