"""What ``overlap predict --what-if`` says of a run's job in other layouts, and the file that keeps it.

A record is its job's own file, which may be open. So this is in ``ledger.jsonl`` beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.predicted import check_window
from overlap_callbacks.analysis.communication.step_time import Choice, in_layout
from overlap_callbacks.analysis.results.prediction import Prediction
from overlap_callbacks.experiments.sweep import BusyError, LinesFile
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.record_lines import UNREADABLE

_LAYOUT = "layout"
# Sizes of a layout, in the order of ``Choice``, and names of settings that are them.
_SIZES = {
    "pp": ("pp", "pipeline_model_parallel_size"), "tp": ("tp", "tensor_model_parallel_size"), "dp": ("dp",),
}  # fmt: skip
# What may differ between a job and the same in another layout, besides what it sends.
_OF_LAYOUT = ("shapes", "parameters", "trained_parameters", "model_chunks", "micro_batches", "sequence_parallel")


def layouts(record: Record, job: JobShape, choices: Sequence[Choice]) -> list[Prediction] | None:
    """What ``overlap predict --what-if`` says of a run's job, without what it said since the run's start.

    None if the run sends other messages than the job, or has no step time.
    """
    step_ms = record.pooled().get("e2e_overlapped_ms")
    if step_ms is None or record.control or not sends(record, job):
        return None
    own, known, found = (job.p, job.t, job.d), {one.tries for one in predicted_layouts(record)}, list[Prediction]()
    for one in choices:
        sizes = (one.p, one.t, one.d)
        turned = {name: size for name, size, before in zip(_SIZES, sizes, own, strict=True) if size != before}
        tries = ",".join([f"{name}={size}" for name, size in turned.items()])
        if one.saves_ms is not None and tries not in known:
            found.append(
                Prediction(
                    topic=_LAYOUT, settings=tuple(turned), tries=tries, step_ms=step_ms.value, low_ms=one.saves_ms[0],
                    high_ms=one.saves_ms[1], assumes="either job may hide its communication or not", at=_now(),
                    job=msgspec.to_builtins(in_layout(job, sizes)),
                )
            )  # fmt: skip
    return found


def predicted_layouts(record: Record) -> list[Prediction]:
    """What ``--what-if`` said since the run's last start, the first of each layout."""
    found: dict[str, Prediction] = {}
    for line in _lines(file_beside(record.path)):
        with contextlib.suppress(msgspec.ValidationError, ValueError, TypeError):
            said = msgspec.convert(line, Prediction)
            said_at, started_at = [datetime.fromisoformat(text) for text in (said.at, record.info.started_at)]
            msgspec.convert(said.job, JobShape).check()
            _wanted(said)
            if line.get("record") == "prediction" and said.topic == _LAYOUT and said_at >= started_at:
                found.setdefault(said.tries, said)
    return list(found.values())


def is_layout(turned: Sequence[tuple[str, str, str]], said: Prediction) -> bool:
    """Whether settings become those of the layout. The data-parallel ranks follow from the others."""
    named = {_size_of(name): after for name, _, after in turned}
    wanted = _wanted(said)
    return wanted.keys() - {"dp"} <= named.keys() and all([wanted.get(name) == size for name, size in named.items()])


def _wanted(said: Prediction) -> dict[str, str]:
    return dict(part.split("=") for part in said.tries.split(","))


def is_of_layout(label: str) -> bool:
    """Whether a setting may differ between a job and the same in another layout."""
    name = _size_of(label.rpartition(": ")[2])
    return name in _SIZES or name in _OF_LAYOUT


def _size_of(name: str) -> str:
    name = name.lower().replace("-", "_")
    return next((size for size, names in _SIZES.items() if name in names), name)


def sends(record: Record, job: JobShape) -> bool:
    """Whether a run's job sends these messages, byte by byte."""
    window = record.latest("collectives")
    if window is None or window.world_size != job.world_size:
        return False
    with contextlib.suppress(ValueError, IndexError, KeyError):  # ranks that no such job has
        return all([row.equal for row in check_window(job, window)])
    return False


def is_after(started_at: str, said: Prediction) -> bool:
    with contextlib.suppress(ValueError, TypeError):
        return datetime.fromisoformat(started_at) > datetime.fromisoformat(said.at)
    return False


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def file_beside(path: Path) -> Path:
    """The file of a run's or a tuning's folder, or of a record in it."""
    return (path if path.is_dir() else path.parent) / "ledger.jsonl"


def keep(file: Path, lines: Sequence[dict[str, Any]]) -> str:
    """Append the lines that the file does not have. Returns why it cannot; empty if it can."""
    known = _lines(file)
    new = [line for line in lines if msgspec.json.decode(msgspec.json.encode(line)) not in known]
    try:
        if new:
            with contextlib.closing(LinesFile(file, "predict")) as opened:
                for line in new:
                    opened.write(line)
    except (OSError, BusyError) as error:
        return f"{file} cannot be written: {getattr(error, 'strerror', None) or error}"
    return ""


def _lines(file: Path) -> list[dict[str, Any]]:
    """The readable lines of a file; none without it."""
    found = []
    with contextlib.suppress(OSError):
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            with contextlib.suppress(*UNREADABLE):
                found.append(msgspec.json.decode(line, type=dict[str, Any]))
    return found
