"""Reads a record back. Whole lines count; a line that a crash cut off does not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.analysis.aggregate import aggregate_windows, drop_incomparable_figures, has_whole_group
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME, SCHEMA_VERSION, RunInfo
from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from overlap_callbacks.analysis.run_summary import RunSummary, blocks_of

# Lines between two calls of ``progress``.
_LINES_PER_PROGRESS = 20


class RecordError(ValueError):
    """A record that cannot be read, and why."""


@dataclass
class Record:
    """A record as read.

    Attributes:
        path: the file.
        runs: one entry for each start of the job.
        windows: the reports, in the order of measurement.
        unfinished: what rank 0 had measured of a window that was cut off before its report; None without one.
        broken_lines: lines that could not be read.
    """

    path: Path
    runs: list[RunInfo] = field(default_factory=list)
    windows: list[OverlapReport] = field(default_factory=list)
    unfinished: OverlapReport | None = None
    broken_lines: int = 0

    @property
    def summary(self) -> RunSummary:
        """Which windows count, and what they say together."""
        return RunSummary(self.runs[-1] if self.runs else None, self.windows, self.unfinished)

    @property
    def valid_windows(self) -> list[OverlapReport]:
        """The windows that count: see ``RunSummary``."""
        return self.summary.valid_windows

    @property
    def partial(self) -> OverlapReport | None:
        """What there is to look at where no window counts: see ``RunSummary``."""
        return self.summary.partial

    def pooled(self) -> dict[str, Estimate]:
        """Each figure over the valid windows; the unit of its interval is the window."""
        return self.summary.pooled()


def read(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> Record:
    """Read a record.

    Args:
        path: a run folder, or its ``overlap.jsonl``.
        progress: called every few lines with the number of bytes read so far, and the size of the file in bytes.

    Raises:
        RecordError: no such file, one that cannot be read, no record, or of a schema that is newer than this library.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.is_file():
        raise RecordError(f"no record at {file}: give a run folder or its {FILE_NAME}")
    record = Record(file)
    # Keyed by the block's number. A block may be logged again with more of its steps: its last entry is whole.
    blocks: dict[tuple[int, int], dict[int, TimedBlock]] = {}
    for line in _lines(file, progress or _no_progress):
        if line is None:
            record.broken_lines += 1
            continue
        kind = line.pop("record", None)
        try:
            if kind == "run":
                _check_schema(file, line)
                record.runs.append(msgspec.convert(line, RunInfo))
                blocks.clear()
            elif kind == "block":
                sample = msgspec.convert(line["sample"], TimedBlock)
                blocks.setdefault((line["window"], line["first_step"]), {})[sample.block] = sample
            elif kind == "window":
                window = msgspec.convert(line, OverlapReport)
                record.windows.append(window)
                blocks.pop((window.window, window.first_step), None)
        except (msgspec.ValidationError, KeyError, TypeError):
            record.broken_lines += 1
    if not record.runs:
        raise RecordError(f"{file} is not an overlap record: it has no readable line of kind 'run'")
    if blocks:
        key, of_window = next(reversed(blocks.items()))
        record.unfinished = _unfinished(record.runs[-1], key, [of_window[number] for number in sorted(of_window)])
    return record


def runs_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The run folders in a folder, by the time of the last write to their record; the newest last."""
    runs = []
    for file in Path(folder).glob(f"*/{FILE_NAME}"):
        with contextlib.suppress(OSError):  # it may be removed meanwhile
            runs.append((file.stat().st_mtime_ns, file.parent))
    return [run for _, run in sorted(runs)]


def _no_progress(done_bytes: int, total_bytes: int) -> None:
    """Default progress callback: does nothing."""


def _lines(file: Path, progress: Callable[[int, int], None]) -> Iterator[dict[str, Any] | None]:
    try:
        lines = file.open("rb")
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror or error}") from None
    with lines:
        size, done = os.fstat(lines.fileno()).st_size, 0
        for number, line in enumerate(lines):
            done += len(line)
            if number % _LINES_PER_PROGRESS == 0:
                progress(done, max(size, done))  # the job may still be writing
            if not line.strip():
                continue
            try:
                content = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                yield None
                continue
            yield content if isinstance(content, dict) else None


def _check_schema(file: Path, line: dict[str, Any]) -> None:
    version = line.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise RecordError(
            f"{file} has schema version {version!r}; this library reads up to {SCHEMA_VERSION}: "
            f"upgrade overlap-callbacks to {line.get('library_version', 'a newer version')}"
        )


def _unfinished(run: RunInfo, key: tuple[int, int], blocks: list[TimedBlock]) -> OverlapReport:
    number, first_step = key
    few = "" if has_whole_group(blocks, blocks_of(run)) else ", too few blocks to compare the modes"
    sample = RankWindow(
        rank=0,
        window=number,
        first_step=first_step,
        num_steps=0,
        complete=False,
        backend=run.backend,
        device=run.device,
        wall_ms=0.0,
        timed=tuple(blocks),
        problems=(f"{len(blocks)} timed blocks so far{few}",),
    )
    report = aggregate_windows(
        [sample],
        world_size=run.world_size,
        every_n_steps=run.schedule.get("every_n_steps", 1),
        control=run.schedule.get("control", False),
    )
    return drop_incomparable_figures(report, blocks_of(run))
