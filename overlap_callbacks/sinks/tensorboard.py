"""Reports in TensorBoard."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.environment import RankEnvironment
from overlap_callbacks.analysis.results.report import OverlapReport, WindowReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.sinks.base import Sink, fit

# Numbers the event files of this process: two may begin within one second.
_numbers = itertools.count()


class TensorBoardSink(Sink):
    """Writes scalars, one for each metric, against the training step, and the run's configuration as text.

    Args:
        folder: folder of the event files; TensorBoard shows each folder as a run.

    Raises:
        ImportError: (from ``open`` or ``log``) tensorboard is not installed.
        OSError: (from ``open`` or ``log``) the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._writer: Any = None
        self._hosts_named = True

    def open(self, run: RunInfo) -> None:
        self._hosts_named = run.hosts_named
        rows = (
            ("framework", run.framework),
            ("device", run.device),
            ("ranks", run.world_size),
            ("backend", run.backend),
            ("torch", run.torch_version),
            ("overlap-callbacks", run.library_version),
            ("started at", run.started_at),
            *run.schedule.items(),
            *_environment_rows(run.environment),
        )
        self._add_lines("overlap/run", [f"{name}: {value}" for name, value in rows])
        self._events().flush()

    def log(self, report: OverlapReport) -> None:
        findings = [f"{finding.severity.value}: {finding.message} {finding.action}" for finding in report.findings]
        self._add_lines("overlap/findings", findings, report.first_step)
        self._add_lines("overlap/bound", [report.bound] if report.bound else [], report.first_step)
        self._add(report, "overlap/notes")

    def log_arm(self, report: ArmReport) -> None:
        self._add(report, f"arm/{report.arm.name}_notes")

    def _add(self, report: WindowReport, notes: str) -> None:
        for key, value in fit(report.values()).items():
            self._events().add_scalar(key, value.number, report.first_step)
        self._add_lines(notes, report.problems, report.first_step)
        self._events().flush()

    def _add_lines(self, key: str, lines: Sequence[str], step: int = 0) -> None:
        if lines:
            # In Markdown, four spaces make a line code, so that no character is special.
            self._events().add_text(key, "\n".join([f"    {safe_text.clean(line)}" for line in lines]), step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _events(self) -> Any:
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ImportError(
                    "tensorboard is not installed: pip install 'overlap-callbacks[tensorboard]', or leave "
                    "TensorBoardSink out"
                ) from None
            if self._hosts_named:
                self._writer = SummaryWriter(str(self.folder))  # type: ignore[no-untyped-call, unused-ignore]
            else:
                self._writer = _PlainWriter(self.folder)
        return self._writer


class _PlainWriter:
    """Writes an event file whose name does not contain the host's name, unlike those of ``SummaryWriter``."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.host0.{os.getpid()}.{next(_numbers)}"
        self._records: Any = RecordWriter((folder / name).open("wb"))
        self._event: Any = Event
        self._summary: Any = summary
        self._write(file_version="brain.Event:2")
        self.flush()

    def add_scalar(self, key: str, value: float, step: int) -> None:
        self._write(summary=self._summary.scalar(key, value), step=step)

    def add_text(self, key: str, text: str, step: int = 0) -> None:
        self._write(summary=self._summary.text(key, text), step=step)

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())


def _environment_rows(environment: RankEnvironment | None) -> tuple[tuple[str, str], ...]:
    if environment is None:
        return ()
    known = (("NCCL", environment.nccl), ("driver", environment.driver), *environment.variables.items())
    return tuple([(name, value) for name, value in known if value])
