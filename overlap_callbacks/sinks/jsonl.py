"""The record: one JSON object a line, on disk before the next window begins.

Kinds of lines: ``{"record": "run", ...}`` opens a run; a resumed job adds one. ``{"record": "block", ...}`` is one
timed block of rank 0, written as soon as it is measured. ``{"record": "window", ...}`` is the report of a whole window.
``{"record": "change", ...}`` is a lasting change; the line is written again once a window has shown more of it.
``{"record": "goodput", ...}`` is where the time of this start went; the last line counts.
``"arm_block"`` and ``"arm"`` are the same of windows that compare with another arm than sequential steps.
``{"record": "prediction", ...}`` is what advice predicts, anew until an arm tries it: the last line of a kind counts.
``{"record": "decision", ...}`` is what the job has decided about its arms, whenever that changes or
more is owed, and at the end: the last line counts.
``{"record": "causal", ...}`` is a window in which collectives were delayed.
``{"record": "left_out", ...}`` says why a window has no report. Everything else (tables, pages, W&B) can be made from
it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks._log import logger
from overlap_callbacks.analysis.bottleneck import predictions_of
from overlap_callbacks.analysis.causal import slopes_by_name
from overlap_callbacks.analysis.causal_findings import findings_of, fix_of
from overlap_callbacks.analysis.exposure import with_blocking
from overlap_callbacks.analysis.results.arm import ArmReport, ComparedArm
from overlap_callbacks.analysis.results.causal import CausalWindow
from overlap_callbacks.analysis.results.change import Change
from overlap_callbacks.analysis.results.decision import Decision
from overlap_callbacks.analysis.results.exposure import Exposure
from overlap_callbacks.analysis.results.frontier import StepFrontier
from overlap_callbacks.analysis.results.goodput import Goodput
from overlap_callbacks.analysis.results.prediction import Prediction, topic_of
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME, RunInfo
from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from overlap_callbacks.analysis.run_summary import without_details
from overlap_callbacks.analysis.safe_text import digest
from overlap_callbacks.sinks.base import Sink


class JsonlSink(Sink):
    """Appends to ``overlap.jsonl`` in a folder, which it creates if needed.

    If the folder is deleted meanwhile, it is created again, with the lines written so far, which stay readable while
    the file is open.

    The record of a long run omits some details of most windows; see ``KeptDetails``.

    Args:
        folder: the run's folder.

    Raises:
        OSError: (from ``open``) the folder or file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE_NAME
        self._file: Any = None
        self._run: RunInfo | None = None
        self._details = KeptDetails()
        self._predicted: dict[tuple[str, bool | None], tuple[bool, Prediction]] = {}
        self._tried: set[str] = set()  # topics
        self._causal: list[CausalWindow] = []
        self._exposure: Exposure | None = None

    def kept_record(self) -> Path:
        return self.path

    def destination(self) -> str:
        return f"record {self.path.parent}"

    def check(self) -> None:
        new = [folder for folder in (self.path.parent, *self.path.parent.parents) if not folder.exists()]
        is_new = not self.path.exists()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        finally:
            with contextlib.suppress(OSError):
                if is_new and not self.path.stat().st_size:
                    self.path.unlink()
                for folder in new:
                    folder.rmdir()

    def open(self, run: RunInfo) -> None:
        self._run = msgspec.structs.replace(run, tells_end=True)
        self._file = self._opened()
        self._append_run()

    def block(self, window: int, first_step: int, block: TimedBlock) -> None:
        self._write("block", {"window": window, "first_step": first_step, "sample": block})

    def arm_block(self, window: int, first_step: int, arm: ComparedArm, block: TimedBlock) -> None:
        self._write("arm_block", {"window": window, "first_step": first_step, "arm": arm.name, "sample": block})

    def log_arm(self, report: ArmReport) -> None:
        self._write("arm", report)
        self._tried.add(topic_of(report.arm.name))

    def log_causal(self, window: CausalWindow) -> None:
        self._write("causal", window)
        self._causal.append(window)
        configuration = {} if self._run is None else self._run.configuration
        exposure = None if self._exposure is None else with_blocking(self._exposure, slopes_by_name(self._causal))
        fixes = [(found, fix_of(found, exposure, configuration)) for found in findings_of(self._causal, exposure)]
        self._predict([fix.prediction(found) for found, fix in fixes if fix is not None], delayed=True)

    def left_out(self, window: int, first_step: int, reason: str) -> None:
        self._write("left_out", {"window": window, "first_step": first_step, "reason": reason})

    def answer(self, text: str) -> None:
        self._write("answer", {"text": text})

    def frontier(self, stretch: StepFrontier) -> None:
        self._write("frontier", stretch)

    def change(self, change: Change) -> None:
        self._write("change", change)

    def goodput(self, goodput: Goodput) -> None:
        self._write("goodput", goodput)

    def decision(self, decision: Decision) -> None:
        self._write("decision", decision)

    def log(self, report: OverlapReport) -> None:
        self._write("window", self._details.of(report))
        self._exposure = report.exposure or self._exposure
        self._predict(predictions_of(report, self._run))

    def _predict(self, predictions: Sequence[Prediction | None], *, delayed: bool = False) -> None:
        """Write the first of each kind, anew until an arm tries it. One by delays replaces one by a profile."""
        firsts = {(one.topic, one.rises): one for one in reversed(predictions) if one is not None}
        for kind, prediction in reversed(firsts.items()):
            told = delayed, prediction
            known = self._predicted.setdefault(kind, told)
            if known is told or (prediction.topic not in self._tried and delayed >= known[0] and told != known):
                self._predicted[kind] = told
                self._write("prediction", prediction)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._write("end", {})
            finally:
                self._file.close()
                self._file = None

    def _opened(self) -> Any:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b")  # read only if the folder is deleted
        if file.seek(0, os.SEEK_END):
            # A killed run may have left half a line. End it, so that our first line does not join it.
            file.write(b"\n")
        return file

    def _restore_if_gone(self) -> None:
        """Write the record again, with all lines so far, if its file or folder was deleted."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                return
        gone, self._file = self._file, self._opened()
        restored = False
        if not self._file.tell():  # otherwise somebody has put another file there, perhaps with these lines
            with contextlib.suppress(OSError):  # a network file system may have lost them
                gone.seek(0)
                shutil.copyfileobj(gone, self._file)
                restored = self._file.tell() > 0
        gone.close()
        if restored:
            outcome = "no line is lost"
        else:
            outcome = "its earlier lines are lost, unless somebody put them back"
            self._append_run()
        logger.warning(
            "overlap-callbacks: the record was deleted during the run, and goes on in %s; %s [OC606]",
            self.path,
            outcome,
        )

    def _write(self, kind: str, content: Any) -> None:
        self._restore_if_gone()
        self._append(kind, content)

    def _append_run(self) -> None:
        assert self._run is not None
        self._append("run", {**msgspec.to_builtins(self._run), "process": _own_process(self._run.started_at)})

    def _append(self, kind: str, content: Any) -> None:
        fields = {"record": kind, **msgspec.to_builtins(content)}
        # The whole line in one write, then to disk: a crash leaves complete lines, and at most one that is cut off.
        self._file.write(msgspec.json.encode(fields) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


# -- record thinning


# After two hundred windows, every second one is kept whole, after three hundred every third, and so on.
_STRETCH = 100


class KeptDetails:
    """Thins the record: omits details of most windows after the first two hundred.

    These are timelines, power trace, experts' loads by step, each rank's own tables and rank 0's series of steps.
    Windows that count and windows that do not are thinned independently.
    """

    def __init__(self) -> None:
        self._seen: Counter[bool] = Counter()

    def of(self, report: OverlapReport) -> OverlapReport:
        """The report as the record keeps it; call it once per report, in order."""
        counts = report.valid and report.complete
        number = self._seen[counts]
        self._seen[counts] += 1
        if number % max(1, number // _STRETCH) == 0:
            return report
        samples = tuple([_without_tables(sample) for sample in report.samples])
        return msgspec.structs.replace(report, pictures=(), power_trace=None, expert_details=None, samples=samples)


def _without_tables(sample: RankWindow) -> RankWindow:
    return msgspec.structs.replace(sample, kernels=(), pairs=(), dimension_pairs=(), series=None)


# Line starts, as ``JsonlSink`` writes them.
_RUN, _WINDOW, _ARM = b'{"record":"run"', b'{"record":"window"', b'{"record":"arm"'
_ANSWER, _DECISION, _CAUSAL = b'{"record":"answer"', b'{"record":"decision"', b'{"record":"causal"'
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass
class EarlierStarts:
    """Windows from earlier starts of the job, without details, of other arms and causal ones, and what was decided.

    ``run``: the last of these starts.
    """

    windows: list[OverlapReport] = field(default_factory=list)
    arms: list[ArmReport] = field(default_factory=list)
    causal: list[CausalWindow] = field(default_factory=list)
    decision: Decision | None = None
    run: RunInfo | None = None


def earlier_starts(record: Path) -> EarlierStarts:
    """The record's contents before its last start; unreadable lines are skipped.

    A record that leads to a device, such as ``/dev/full``, counts as empty: reading it might never end.

    Raises:
        OSError: the record cannot be read.
    """
    found, before = EarlierStarts(), EarlierStarts()
    decode_window, decode_arm = msgspec.json.Decoder(OverlapReport).decode, msgspec.json.Decoder(ArmReport).decode
    if not stat.S_ISREG(record.stat().st_mode):
        return before
    with record.open("rb") as lines:
        for line in lines:
            try:
                if line.startswith(_RUN):
                    before.windows += found.windows
                    before.arms += found.arms
                    before.causal += found.causal
                    before.decision, before.run = found.decision or before.decision, found.run or before.run
                    found = EarlierStarts()
                    found.run = msgspec.json.decode(line, type=RunInfo)
                elif line.startswith(_WINDOW):
                    found.windows.append(without_details(decode_window(line)))
                elif line.startswith(_ARM):
                    found.arms.append(decode_arm(line))
                elif line.startswith(_CAUSAL):
                    found.causal.append(msgspec.json.decode(line, type=CausalWindow))
                elif line.startswith(_DECISION):
                    found.decision = msgspec.json.decode(line, type=Decision)
            except _UNREADABLE:
                continue
    return before


def has_answer(record: Path) -> bool:
    """Whether a record has the answer of a quick look; not if it cannot be read, or is no file."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(record.stat().st_mode):
            with record.open("rb") as lines:
                return any(line.startswith(_ANSWER) for line in lines)
    return False


# -- the process that writes a record


class Writer(msgspec.Struct, frozen=True):
    """Of the run's line: the process by host (a digest that differs between runs), id and start in clock ticks.

    ``process``: empty if unknown, and in older records.
    """

    started_at: str
    process: str = ""

    def is_gone(self) -> bool:
        """Whether it has ended; False if it is on another host, or in doubt."""
        with contextlib.suppress(*_IN_DOUBT):
            host, process, began = self.process.split()
            if host == _host(self.started_at):
                try:
                    os.kill(int(process), 0)  # /proc may hide other users' processes
                    return _began(process) != began
                except ProcessLookupError:
                    return True
        return False


# Another system, or a made-up record.
_IN_DOUBT = (OSError, ValueError, OverflowError, IndexError)


def last_writer(record: Path) -> Writer | None:
    """Of the last start of the job; None if it cannot be read."""
    found = None
    with contextlib.suppress(OSError, *_UNREADABLE):
        if stat.S_ISREG(record.stat().st_mode):
            with record.open("rb") as lines:
                for line in lines:
                    if line.startswith(_RUN):
                        found = None
                        found = msgspec.json.decode(line, type=Writer)
    return found


def _own_process(started_at: str) -> str:
    with contextlib.suppress(*_IN_DOUBT):
        return f"{_host(started_at)} {os.getpid()} {_began('self')}"
    return ""


def _host(started_at: str) -> str:
    """A digest of all that gives a process its id and start."""
    if os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc is of another namespace")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    spaces = [os.readlink(file) for name in ("pid", "time") if os.path.exists(file := f"/proc/self/ns/{name}")]
    return digest(f"{started_at} {platform.node()} {boot} {spaces}")[:12]


def _began(process: str) -> str:
    """When a process began, in clock ticks of the system."""
    return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
