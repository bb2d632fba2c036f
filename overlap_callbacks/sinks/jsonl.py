"""The record: one JSON object a line, on disk before the next window begins.

Three kinds of line: ``{"record": "run", ...}`` opens a run (a resumed job adds one), ``{"record": "block", ...}`` is
one timed block of rank 0 as it was measured, ``{"record": "window", ...}`` is the report of a whole window. All else
(tables, pages, W&B) can be made again from it.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME, RunInfo
from overlap_callbacks.analysis.results.window import TimedBlock
from overlap_callbacks.sinks.base import Sink


class JsonlSink(Sink):
    """Appends to ``overlap.jsonl`` in a folder, which it makes.

    Args:
        folder: of the run.

    Raises:
        OSError: (from ``open``) the folder or file cannot be written.
    """

    keeps_record = True
    _all: ClassVar[weakref.WeakSet[JsonlSink]] = weakref.WeakSet()

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE_NAME
        self._file: Any = None
        self._run: RunInfo | None = None
        self._all.add(self)

    @classmethod
    def path_of(cls, run: RunInfo) -> Path | None:
        """The record of a run, for sinks that pass it on; None where none is kept.

        Args:
            run: the very object with which the sinks were opened: all of a monitor's are given the same.
        """
        return next((sink.path for sink in list(cls._all) if sink._run is run), None)

    def open(self, run: RunInfo) -> None:
        self._run = run
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        if self._file.tell():
            # A run that was killed may have left half a line: end it, so that it cannot swallow our first.
            self._file.write(b"\n")
        self._write("run", run)

    def block(self, window: int, first_step: int, block: TimedBlock) -> None:
        self._write("block", {"window": window, "first_step": first_step, "sample": block})

    def log(self, report: OverlapReport) -> None:
        self._write("window", report)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, content: Any) -> None:
        fields = {"record": kind, **msgspec.to_builtins(content)}
        # The whole line in one write, then to the disk: a crash leaves whole lines, and at most one that is cut.
        self._file.write(msgspec.json.encode(fields) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
