"""The record: one JSON object a line, on disk before the next window begins.

There are three kinds of line. ``{"record": "run", ...}`` opens a run; a resumed job adds one.
``{"record": "block", ...}`` is one timed block of rank 0, written as soon as it is measured.
``{"record": "window", ...}`` is the report of a whole window. Everything else (tables, pages, W&B) can be made from it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME, RunInfo
from overlap_callbacks.analysis.results.window import TimedBlock
from overlap_callbacks.sinks.base import Sink


class JsonlSink(Sink):
    """Appends to ``overlap.jsonl`` in a folder, which it makes if there is none.

    Args:
        folder: of the run.

    Raises:
        OSError: (from ``open``) the folder or file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE_NAME
        self._file: Any = None

    def kept_record(self) -> Path:
        return self.path

    def open(self, run: RunInfo) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        if self._file.tell():
            # A run that was killed may have left half a line. End it, or our first line would become part of it.
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
        # The whole line in one write, then to the disk: a crash leaves whole lines, and at most one that is cut off.
        self._file.write(msgspec.json.encode(fields) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
