"""Reading a record back: whole lines count, a line that a crash cut off does not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.estimates import Estimate, pool
from overlap_callbacks.metrics import FIGURES, OverlapReport, report
from overlap_callbacks.samples import RankWindow, TimedBlock
from overlap_callbacks.sinks.base import SCHEMA_VERSION, RunInfo
from overlap_callbacks.sinks.jsonl import FILE_NAME


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

    def pooled(self) -> dict[str, Estimate]:
        """Each figure over the valid windows; the unit of its interval is the window."""
        found = {}
        for figure in FIGURES:
            values = [getattr(window, figure.name) for window in self.valid_windows]
            pooled = pool([value for value in values if value is not None])
            if pooled is not None:
                found[figure.name] = pooled
        return found


def read(path: str | os.PathLike[str]) -> Record:
    """Read a record.

    Args:
        path: a run folder, or its ``overlap.jsonl``.

    Raises:
        RecordError: no such file, not a record, or of a schema that is newer than this library.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.is_file():
        raise RecordError(f"no record at {file}: give a run folder or its {FILE_NAME}")
    record = Record(file)
    blocks: dict[tuple[int, int], list[TimedBlock]] = {}
    for line in _lines(file):
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
                blocks.setdefault((line["window"], line["first_step"]), []).append(sample)
            elif kind == "window":
                window = msgspec.convert(line, OverlapReport)
                record.windows.append(window)
                blocks.pop((window.window, window.first_step), None)
        except (msgspec.ValidationError, KeyError, TypeError):
            record.broken_lines += 1
    if not record.runs:
        raise RecordError(f"{file} is not an overlap record: it has no readable line of kind 'run'")
    if blocks:
        record.unfinished = _unfinished(record.runs[-1], *next(reversed(blocks.items())))
    return record


def _lines(file: Path) -> Iterator[dict[str, Any] | None]:
    with file.open("rb") as lines:
        for line in lines:
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
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RecordError(
            f"{file} has schema version {version!r}; this library reads up to {SCHEMA_VERSION}: "
            f"upgrade overlap-callbacks to {line.get('library_version', 'a newer version')}"
        )


def _unfinished(run: RunInfo, key: tuple[int, int], blocks: list[TimedBlock]) -> OverlapReport:
    number, first_step = key
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
        problems=(f"cut off after {len(blocks)} timed blocks",),
    )
    return report(
        [sample],
        world_size=run.world_size,
        every_n_steps=run.schedule.get("every_n_steps", 1),
        control=run.schedule.get("control", False),
    )
