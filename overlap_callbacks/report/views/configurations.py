"""Where the configurations of several runs differ, and what their records do not tell of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from overlap_callbacks.analysis.formatting import DASH, count, listed, page_text
from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views import tables
from overlap_callbacks.report.views.elements import Block, Head, Note, Table
from overlap_callbacks.report.views.environment import environment_facts
from overlap_callbacks.report.views.quality import SCHEMA, SETTING, STARTED, run_facts
from overlap_callbacks.report.views.run import RunView

# These differ between any two runs.
_NO_SETTINGS = (STARTED,)
_SCHEDULE, _COLLECTIVES, _TOLD = "Schedule: ", "Collectives of a step: ", "Configuration: "
# What says how was measured and recorded, and nothing of the job.
_NOT_OF_THE_JOB = (_SCHEDULE, SCHEMA, "overlap-callbacks", "Hosts named", "Host of rank 0")
_MOST_NAMED = 3
_MAX_VALUE = 40
_MAX_VALUES = 8

# A setting and its value in each run.
Difference = tuple[str, tuple[str, ...]]


def differences(views: Sequence[RunView]) -> list[Difference]:
    """What differs as far as the records tell, with its value in each run; what says most of the job comes first."""
    facts = [_facts(view) for view in views]
    found = []
    for label in dict.fromkeys(label for of_run in facts for label in of_run):
        values = tuple([of_run.get(label, DASH) for of_run in facts])
        if label not in _NO_SETTINGS and len(set(values)) > 1:
            found.append((label, values))
    return sorted(found, key=lambda row: _place(row[0]))


def of_the_job(rows: Sequence[Difference]) -> list[Difference]:
    """Those that may make one job faster than another."""
    return [row for row in rows if not row[0].startswith(_NOT_OF_THE_JOB)]


def difference_table(names: Sequence[str], views: Sequence[RunView]) -> Block:
    """A table of what differs; a note where nothing does that the records know."""
    rows = differences(views)
    untold = not_told([view.record for view in views])
    if not rows:
        return Note(f"The records know of no difference between the configurations. {untold}")
    cells = [tuple([tables.name_cell(text) for text in (label, *values)]) for label, values in rows]
    columns = tuple(Head(text, words=True) for text in ("Setting", *names))
    return Table("Where their configurations differ", columns, tuple(cells), untold, sorts=False)


def differences_in_words(names: Sequence[str], views: Sequence[RunView]) -> str:
    """What differs between the jobs, in a line. What may differ too stands with the table.

    Where settings that somebody chose differ, they are named, and the rest, which often follows from them, is counted.
    """
    rows = of_the_job(differences(views))
    chosen = [row for row in rows if _place(row[0]) == 0] or rows
    texts = [f"{_short(label)} ({_of_each(names, values)})" for label, values in chosen[:_MOST_NAMED]]
    left = len(rows) - len(texts)
    known = listed([*texts, *([f"{left:,} more"] if left else [])]) if texts else "nothing that the records know"
    return f"What differs: {known}. What the records do not tell may differ too: see below."


def _of_each(names: Sequence[str], values: Sequence[str]) -> str:
    """A value for each run: with its name where they are few."""
    shown = list(map(_cut, values))
    if len(names) > _MOST_NAMED:
        return f"{', '.join(shown[:_MAX_VALUES])}{', …' if len(shown) > _MAX_VALUES else ''}, in the order below"
    return ", ".join([f"{value} in {name}" for value, name in zip(shown, names, strict=True)])


def _short(label: str) -> str:
    for begin in (_TOLD, _COLLECTIVES, f"{SETTING}: "):
        label = label.removeprefix(begin)
    return label


def _cut(value: str) -> str:
    return page_text(value, _MAX_VALUE)


def _place(label: str) -> int:
    """Settings that somebody chose come first, then the rest, and last what is not of the job."""
    if label.startswith((f"{SETTING}: ", _TOLD)):
        return 0
    return 2 if label.startswith(_NOT_OF_THE_JOB) else 1


def _facts(view: RunView) -> dict[str, str]:
    sent = {
        f"{_COLLECTIVES}{page_text(name, 80)}": f"{count(messages, 'message')}, {size / 1e6:,.2f} MB"
        for name, (messages, size) in collectives_of_a_step(view.record).items()
    }
    return {
        **dict(run_facts(view.info)),
        **dict(environment_facts(view)),
        **{f"{_SCHEDULE}{name}": str(value) for name, value in view.info.schedule.items()},
        **sent,
    }


# -- what records tell


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
