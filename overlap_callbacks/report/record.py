"""Reads a record. Complete lines count; a line cut off by a crash does not."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.analysis.bottleneck import Bottleneck, run_bottleneck
from overlap_callbacks.analysis.job.part import part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.catalogue import recorded_figures
from overlap_callbacks.analysis.results.causal import CausalWindow
from overlap_callbacks.analysis.results.change import Change
from overlap_callbacks.analysis.results.decision import Decision
from overlap_callbacks.analysis.results.environment import Finding, JobEnvironment, RankEnvironment, Severity
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.frontier import StepFrontier
from overlap_callbacks.analysis.results.goodput import Goodput
from overlap_callbacks.analysis.results.prediction import Prediction
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME, SCHEMA_VERSION, RunInfo
from overlap_callbacks.analysis.results.step_parts import Bound
from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from overlap_callbacks.analysis.run_summary import (
    RunSummary,
    are_comparable,
    drop_incomparable_figures,
    without_details,
)
from overlap_callbacks.report.record_lines import UNREADABLE, Details, Outlines, decode_window, line_at, lines_of

# The schedule options that reports use, and their types.
_SCHEDULE_TYPES = {"every_n_steps": int, "profiled_steps": int, "control": bool, "blocks": str}


class RecordError(ValueError):
    """A record cannot be read; the message says why."""


class _Head(msgspec.Struct):
    """Fields common to all lines: the kind, and the first line's in any version. Later versions may add more."""

    record: Any = None
    schema_version: Any = None
    library_version: Any = "a newer version"


class _BlockLine(msgspec.Struct):
    """A timed block of a window that has no report yet."""

    window: int
    first_step: int
    sample: TimedBlock


class _LeftOutLine(msgspec.Struct):
    """Why a window has no report."""

    reason: str


# Prefixes of the frequent kinds of lines, as the sink writes them. Other lines are decoded twice.
_BLOCK, _WINDOW = b'{"record":"block",', b'{"record":"window",'

# In why a window was cut short, where the job ended.
_JOB_ENDS = "the monitor was closed"

# Each line is decoded straight into its struct: going through dictionaries would take ten times the memory.
_decode_head = msgspec.json.Decoder(_Head).decode
_decode_run = msgspec.json.Decoder(RunInfo).decode
_decode_arm = msgspec.json.Decoder(ArmReport).decode
_decode_causal = msgspec.json.Decoder(CausalWindow).decode
_decode_frontier = msgspec.json.Decoder(StepFrontier).decode
_decode_change = msgspec.json.Decoder(Change).decode
_decode_goodput = msgspec.json.Decoder(Goodput).decode
_decode_decision = msgspec.json.Decoder(Decision).decode
_decode_prediction = msgspec.json.Decoder(Prediction).decode
_decode_left_out = msgspec.json.Decoder(_LeftOutLine).decode
_decode_block = msgspec.json.Decoder(_BlockLine).decode


@dataclass
class Record:
    """A record as read.

    Attributes:
        path: the file.
        runs: one for each start of the job.
        windows: the reports, in the order of measurement.
        arms: the reports of windows with arms other than sequential steps.
        causal: windows in which collectives were delayed.
        frontier: what stretches of steps were spent on.
        changes: lasting changes along the run.
        goodput: where the time went, one for each start of the job that knows it.
        decision: what the job has decided about its arms, the latest; None in a job that does not decide.
        predictions: what the advice of the last start predicts.
        seldom_held: topics of advice whose predictions hold too seldom, in words; not read from the file.
        left_out: why windows have no report.
        unfinished: what rank 0 had measured of a window that was cut off before its report.
        ended: whether the last start of the job has ended, according to its record.
        broken_lines: lines that could not be read.
        long_lines: how many of them are longer than any line of a record can be.
    """

    path: Path
    runs: list[RunInfo] = field(default_factory=list)
    windows: list[OverlapReport] = field(default_factory=list)
    arms: list[ArmReport] = field(default_factory=list)
    causal: list[CausalWindow] = field(default_factory=list)
    frontier: list[StepFrontier] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    goodput: list[Goodput] = field(default_factory=list)
    decision: Decision | None = None
    predictions: list[Prediction] = field(default_factory=list)
    seldom_held: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unfinished: OverlapReport | None = None
    ended: bool = False
    broken_lines: int = 0
    long_lines: int = 0
    # Where the details of windows without them are, by ``id`` of the window.
    _details: dict[int, Details] = field(default_factory=dict, repr=False, compare=False)
    _summary: RunSummary | None = field(default=None, repr=False, compare=False)

    @property
    def summary(self) -> RunSummary:
        """Which windows count, and their pooled figures."""
        run = self.runs[-1] if self.runs else None
        known = self._summary
        if (
            known is None
            or known.run is not run
            or known.windows is not self.windows
            or known.unfinished is not self.unfinished
            or known.running is not self.running
        ):
            # Cached: adding up the figures of ten thousand windows takes a while.
            known = self._summary = RunSummary(
                run, self.windows, self.unfinished, running=self.running, left_out=self.left_out
            )
        return known

    @property
    def running(self) -> bool:
        """Whether the job may still be running: its record marks its end, and has not yet."""
        return bool(self.runs) and self.runs[-1].tells_end and not self.ended

    @property
    def valid_windows(self) -> list[OverlapReport]:
        """The windows that count; see ``RunSummary``."""
        return self.summary.valid_windows

    @property
    def partial(self) -> OverlapReport | None:
        """The unfinished window to show if no window counts; see ``RunSummary``."""
        return self.summary.partial

    @property
    def environment(self) -> RankEnvironment | None:
        """Environment of the lowest rank that reported; before the first report, rank 0's. None in older records."""
        if self.job_environment is not None:
            return self.job_environment.lowest_rank
        return self.runs[-1].environment if self.runs else None

    @property
    def job_environment(self) -> JobEnvironment | None:
        """The ranks' environment, as last reported."""
        window = self.summary.latest("environment")
        return None if window is None else window.environment

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Each finding of the windows once, in its latest form; most serious first."""
        found = {finding.rule: finding for window in self.windows for finding in window.findings}
        return tuple(sorted(found.values(), key=lambda finding: list(Severity).index(finding.severity)))

    @property
    def info(self) -> RunInfo:
        return self.runs[-1]

    @property
    def control(self) -> bool:
        """Whether the run is an A/A control."""
        return self.summary.control

    @property
    def figures(self) -> dict[str, Estimate]:
        """Means over the valid windows; without any, the figures of a window that was cut short."""
        return self.summary.figures()

    @property
    def shown_windows(self) -> list[OverlapReport]:
        """The windows that count; without any, the one that was cut short after its timed part."""
        partial = self.partial
        if self.valid_windows or partial is None:
            return self.valid_windows
        return [self.whole(window) for window in self.windows if window.window == partial.window][-1:]

    def latest_shown(self, part: str) -> OverlapReport | None:
        """The last of ``shown_windows`` with this part (e.g. ``kernels``), including its details."""
        if self.valid_windows:
            return self.latest_valid(part)
        return next((window for window in self.shown_windows if getattr(window, part)), None)

    def pooled(self) -> dict[str, Estimate]:
        """Each figure pooled over the valid windows."""
        return self.summary.pooled()

    def bottleneck(self, among: Sequence[Bound] = ()) -> Bottleneck | None:
        """What limits the steps of the run, or the longest ``among`` some, and what to try; None without a profile."""
        found = run_bottleneck(self.summary, self.latest_valid("collectives"), among)
        if found is None or not self.seldom_held:
            return found
        advice = [one._replace(held=self.seldom_held.get(one.topic, "")) for one in found.advice]
        return found._replace(advice=tuple(advice))

    def whole(self, window: OverlapReport) -> OverlapReport:
        """One of ``windows`` with its details: tables, timelines, samples.

        They are read from the file if ``read`` left them there. If that fails, the line counts as unreadable, and the
        window is returned without them.
        """
        details = self._details.get(id(window))
        if details is None:
            return window
        try:
            found = decode_window(line_at(self.path, details.start))
            if without_details(found) == window:  # otherwise somebody has written another record there
                return found
        except (OSError, *UNREADABLE):
            pass
        self.broken_lines += 1
        del self._details[id(window)]
        return window

    def latest_valid(self, part: str) -> OverlapReport | None:
        """The last window that counts and has this part (e.g. ``kernels``), with its details."""
        return self._latest(part, self.valid_windows)

    def latest(self, part: str) -> OverlapReport | None:
        """The last window with this part, including its details; preferably one that counts."""
        return self.latest_valid(part) or self._latest(part, self.windows)

    def last_valid(self, part: str, most: int) -> list[OverlapReport]:
        """The last windows that count and have this part, ``most`` at most, with their details."""
        return list(itertools.islice(self._having(part, self.valid_windows), most))[::-1]

    def _latest(self, part: str, windows: Sequence[OverlapReport]) -> OverlapReport | None:
        return next(self._having(part, windows), None)

    def _having(self, part: str, windows: Sequence[OverlapReport]) -> Iterator[OverlapReport]:
        """The windows that have a part, with their details, the last one first."""
        for window in reversed(windows):
            details = self._details.get(id(window))
            if part in details.parts if details is not None else getattr(window, part):
                whole = self.whole(window)
                if getattr(whole, part):
                    yield whole


def read(
    path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None, *, details: bool = True
) -> Record:
    """Read a record.

    Args:
        path: a run folder, or its ``overlap.jsonl``.
        progress: called every few lines with the number of bytes read so far, and the size of the file in bytes.
        details: whether to read tables, timelines and samples of all windows now. If not, ``Record.whole`` reads
            them on request: a long record then takes far less time and memory.

    Raises:
        RecordError: no such file, unreadable, not a record, or its schema is newer than this library.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.is_file():
        raise RecordError(f"no record at {file}: give a run folder or its {FILE_NAME}")
    record = Record(file)
    blocks = _Blocks()
    add_block = blocks.lines.append
    take = _whole_window if details else Outlines()
    lists: dict[str, tuple[list[Any], Callable[[bytes], Any]]]
    lists = {
        "arm": (record.arms, _decode_arm),
        "causal": (record.causal, _decode_causal),
        "frontier": (record.frontier, _decode_frontier),
        "change": (record.changes, _decode_change),
        "goodput": (record.goodput, _decode_goodput),
        "prediction": (record.predictions, _decode_prediction),
        "left_out": (record.left_out, lambda line: _decode_left_out(line).reason),
    }

    def add(kind: str, start: int, line: bytes) -> None:
        if kind == "window":
            window, left = take(start, line)
            _add_window(record, window, left)
            record.broken_lines += blocks.end_window(window.window, window.first_step)
        elif kind == "block":
            add_block(line)
        elif kind in lists:
            values, decode = lists[kind]
            values.append(decode(line))
        elif kind == "decision":
            record.decision = _decode_decision(line)
        elif kind == "end":
            record.ended = True
        elif kind == "run":
            _check_schema(file, _decode_head(line))
            _add_run(record, _with_known_schedule(_decode_run(line)))
            record.broken_lines += blocks.end_run()

    try:
        for start, line in lines_of(file, progress or (lambda done_bytes, total_bytes: None)):
            if line is None:
                record.long_lines += 1
                record.broken_lines += 1
                continue
            if line.startswith(_BLOCK):  # most lines
                add_block(line)
                continue
            try:
                add(_kind_of(line), start, line)
            except UNREADABLE:
                record.broken_lines += 1
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror or error}") from None
    if not record.runs:
        raise RecordError(f"{file} is not an overlap record: it has no readable line of kind 'run'")
    _keep_last(record)
    record.broken_lines += blocks.decode()
    if blocks.by_window:
        _add_unfinished(record, *next(reversed(blocks.by_window.items())))
    return record


def _keep_last(record: Record) -> None:
    """Of lines about the same change or start of the job, the last one counts."""
    known = [change for change in record.changes if change.of_steps or change.what in recorded_figures()]
    record.changes = list({(change.what, change.first_step): change for change in known}.values())
    starts: list[Goodput] = []
    for goodput in record.goodput:
        if starts and goodput.begun_s < starts[-1].begun_s + starts[-1].total_s:
            starts.pop()
        starts.append(goodput)
    record.goodput = starts


def _add_run(record: Record, run: RunInfo) -> None:
    """Add a start of the job, whose advice predicts anew."""
    record.runs.append(run)
    record.ended = False
    record.predictions.clear()


def _add_window(record: Record, window: OverlapReport, details: Details | None) -> None:
    """Add a window. One that the job's end cut short before a step counted is like one without a report."""
    empty = not window.complete and window.e2e_overlapped_ms is window.e2e_sequential_ms is None
    if empty and any([_JOB_ENDS in problem for problem in window.problems]):
        record.left_out.append(window.problems[0])
        return
    record.windows.append(window)
    if details is not None:
        record._details[id(window)] = details


def _add_unfinished(record: Record, key: tuple[int, int], of_window: dict[int, TimedBlock]) -> None:
    try:
        record.unfinished = _unfinished(record.runs[-1], key, [of_window[number] for number in sorted(of_window)])
    except OverflowError:  # a number that no window or step has
        record.broken_lines += len(of_window)


class _Blocks:
    """The blocks whose window has no report yet. Most of the many need no decoding: their report follows.

    Decoded ones are kept by window and first step, then by number. A block may be logged again with more of its steps.
    """

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.by_window: dict[tuple[int, int], dict[int, TimedBlock]] = {}

    def decode(self) -> int:
        """Decode all added blocks. Returns how many cannot be decoded."""
        broken = 0
        for line in self.lines:
            try:
                block = _decode_block(line)
            except UNREADABLE:
                broken += 1
            else:
                self.by_window.setdefault((block.window, block.first_step), {})[block.sample.block] = block.sample
        self.lines.clear()
        return broken

    def end_window(self, window: int, first_step: int) -> int:
        """Drop the blocks of a window that now has its report. Returns how many blocks in total cannot be decoded."""
        begin = b'{"record":"block","window":%d,"first_step":%d,"sample":' % (window, first_step)
        self.lines[:] = [line for line in self.lines if not (line.startswith(begin) and line.endswith(b"}}"))]
        broken = self.decode()
        self.by_window.pop((window, first_step), None)
        return broken

    def end_run(self) -> int:
        """Drop all blocks. Returns how many cannot be decoded."""
        broken = self.decode()
        self.by_window.clear()
        return broken


def _whole_window(start: int, line: bytes) -> tuple[OverlapReport, None]:
    return decode_window(line), None


def _kind_of(line: bytes) -> str:
    if line.startswith(_WINDOW):
        return "window"
    kind = _decode_head(line).record
    return kind if isinstance(kind, str) else ""


def runs_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The run folders in a folder, ordered by the last write to their record, newest last."""
    runs = []
    for file in Path(folder).glob(f"*/{FILE_NAME}"):
        with contextlib.suppress(OSError):  # it may be removed meanwhile
            runs.append((file.stat().st_mtime_ns, file.parent))
    return [run for _, run in sorted(runs)]


def holds_runs(path: Path) -> bool:
    """Whether a path is a record, the folder of a run, or a folder of runs."""
    return path.suffix == ".jsonl" or (path.is_dir() and ((path / FILE_NAME).exists() or bool(runs_in(path))))


def _check_schema(file: Path, header: _Head) -> None:
    version = header.schema_version
    if version is None:
        raise RecordError(f"{file} is not an overlap record: no line of kind 'run' has schema version 1 or above")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise RecordError(
            f"{file} has schema version {version!r}; this library reads up to {SCHEMA_VERSION}: "
            f"upgrade overlap-callbacks to {header.library_version}"
        )


def _with_known_schedule(run: RunInfo) -> RunInfo:
    """Drop schedule options whose type differs from what this library writes."""
    schedule = {
        name: value for name, value in run.schedule.items() if type(value) is _SCHEDULE_TYPES.get(name, type(value))
    }
    return msgspec.structs.replace(run, schedule=schedule)


def _unfinished(run: RunInfo, key: tuple[int, int], blocks: list[TimedBlock]) -> OverlapReport:
    number, first_step = key
    few = "" if are_comparable(blocks) else ", too few blocks to compare the modes"
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
    # As if rank 0 were alone: the others have not been asked yet, so none are missing.
    report = report_of(
        part_of(sample),
        world_size=1,
        every_n_steps=run.schedule.get("every_n_steps", 1),
        control=run.schedule.get("control", False),
    )
    report = msgspec.structs.replace(report, world_size=run.world_size)
    return drop_incomparable_figures(report)
