"""What records know of a job's configuration, and what they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from overlap_callbacks.analysis.formatting import listed
from overlap_callbacks.analysis.results.workload import Workload
from overlap_callbacks.report.record import Record

# Names of ``RunInfo.configuration`` by what they tell; a name may have more words after these.
_MODEL = ("shapes",)
_BUCKETS = ("ddp_bucket", "fsdp_units", "zero_reduce_bucket_size")


def collectives_of_a_step(record: Record) -> dict[str, tuple[int, int]]:
    """Messages and bytes of the recorded step, by operator and dimension; empty where none was recorded."""
    window = record.latest("collectives")
    found: dict[str, tuple[int, int]] = {}
    for row in () if window is None else window.collectives:
        name = f"{row.operator.strip('_')}, {row.dimension or row.group or 'other'}, {row.group_size} ranks"
        messages, size = found.get(name, (0, 0))
        found[name] = (messages + row.messages, size + row.bytes_in)
    return found


def not_told(records: Sequence[Record]) -> str:
    """A sentence on what the records do not tell of the configurations, so that it may differ."""
    lacking = [what for what, told in _PARTS if not all(map(told, records))]
    if not lacking:
        return "What no record tells, e.g. the data and the code of the job, may differ."
    return (
        f"Not every record tells {listed(lacking)}, and none tells the data and the code of the job: these may differ."
    )


def _tells(record: Record, begins: tuple[str, ...]) -> bool:
    return any(name.startswith(begins) for name in record.runs[-1].configuration)


def _tells_work(record: Record) -> bool:
    work = record.runs[-1].workload or Workload()
    if work.tokens_per_step is not None or work.samples_per_step is not None:
        return True
    return any(window.tokens_per_step is not None for window in record.windows)


_PARTS: tuple[tuple[str, Callable[[Record], bool]], ...] = (
    ("the model", lambda record: _tells(record, _MODEL)),
    ("the buckets of communication", lambda record: _tells(record, _BUCKETS)),
    ("the collectives of a step", lambda record: bool(collectives_of_a_step(record))),
    ("the size of the batch", _tells_work),
)
