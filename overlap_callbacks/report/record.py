"""Reading a record back: whole lines count, a line that a crash cut off does not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.analysis.aggregate import aggregate_windows, drop_incomparable_figures, has_whole_group
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.report import Estimate, OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME, SCHEMA_VERSION, RunInfo
from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from overlap_callbacks.analysis.statistics import pool

# Lines from one call of ``progress`` to the next.
_LINES_A_WORD = 20


class RecordError(ValueError):
    """A record that cannot be read, and why."""


@dataclass
class Record:
    """A record as read.

    Attributes:
        path: the file.
        runs: one entry for each start of the job.
        windows: the reports, in the order of measurement.
        unfinished: a window that was cut off before its report: what rank 0 had measured of it; else None.
        broken_lines: lines that could not be read.
    """

    path: Path
    runs: list[RunInfo] = field(default_factory=list)
    windows: list[OverlapReport] = field(default_factory=list)
    unfinished: OverlapReport | None = None
    broken_lines: int = 0

    @property
    def valid_windows(self) -> list[OverlapReport]:
        """The windows that count: complete, with sequential steps that were sequential, and of the last run's kind.

        A record may hold control (A/A) runs and real ones, which must not be mixed.
        """
        control = bool(self.runs[-1].schedule.get("control")) if self.runs else False
        return [window for window in self.windows if window.valid and window.complete and window.control is control]

    @property
    def partial(self) -> OverlapReport | None:
        """What there is to look at where no window counts: the window that was cut off, or the last one cut short.

        The latter only if it was timed for one balanced group of blocks at least.
        """
        if self.unfinished is not None or not self.runs:
            return self.unfinished
        schedule = self.runs[-1].schedule
        for window in reversed(self.windows):
            if window.valid and not window.complete and window.control is bool(schedule.get("control")):
                found = drop_incomparable_figures(window, _order(schedule))
                return found if found.speedup_vs_sequential is not None else None
        return None

    def pooled(self) -> dict[str, Estimate]:
        """Each figure over the valid windows; the unit of its interval is the window."""
        found = {}
        for figure in FIGURES:
            values = [getattr(window, figure.name) for window in self.valid_windows]
            # Step times are means of logarithms within a window already.
            pooled = pool([value for value in values if value is not None], logs=figure.name.startswith("e2e_"))
            if pooled is not None:
                found[figure.name] = pooled
        return found


def read(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> Record:
    """Read a record.

    Args:
        path: a run folder, or its ``overlap.jsonl``.
        progress: called now and then with the bytes read so far, and those of the file.

    Raises:
        RecordError: no such file, one that cannot be read, no record, or of a schema that is newer than this library.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.is_file():
        raise RecordError(f"no record at {file}: give a run folder or its {FILE_NAME}")
    record = Record(file)
    # By number: a block may be logged again, with more of its steps, and the last entry is the whole one.
    blocks: dict[tuple[int, int], dict[int, TimedBlock]] = {}
    for line in _lines(file, progress or _untold):
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
    """The run folders in a folder, the newest last: by the time at which the record was last written to."""
    found = []
    for file in Path(folder).glob(f"*/{FILE_NAME}"):
        with contextlib.suppress(OSError):  # removed meanwhile
            found.append((file.stat().st_mtime_ns, file.parent))
    return [run for _, run in sorted(found)]


def _untold(done_bytes: int, total_bytes: int) -> None:
    """Nobody wants to know."""


def _lines(file: Path, progress: Callable[[int, int], None]) -> Iterator[dict[str, Any] | None]:
    try:
        lines = file.open("rb")
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror or error}") from None
    with lines:
        size, done = os.fstat(lines.fileno()).st_size, 0
        for number, line in enumerate(lines):
            done += len(line)
            if number % _LINES_A_WORD == 0:
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


def _order(schedule: dict[str, Any]) -> str:
    """Of the blocks; the default where a record does not say."""
    return str(schedule.get("blocks") or "OSSO")


def _unfinished(run: RunInfo, key: tuple[int, int], blocks: list[TimedBlock]) -> OverlapReport:
    number, first_step = key
    few = "" if has_whole_group(blocks, _order(run.schedule)) else ", too few blocks to compare the modes"
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
    found = aggregate_windows(
        [sample],
        world_size=run.world_size,
        every_n_steps=run.schedule.get("every_n_steps", 1),
        control=run.schedule.get("control", False),
    )
    return drop_incomparable_figures(found, _order(run.schedule))
