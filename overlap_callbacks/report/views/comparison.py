"""Several runs side by side: which is faster, their figures, and where their configurations differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from overlap_callbacks.analysis.apart import level
from overlap_callbacks.analysis.fastest import Fastest, RunSpeed, fastest
from overlap_callbacks.analysis.formatting import DASH, PAGE, PLAIN, bytes_in_words, count, listed, page_text
from overlap_callbacks.analysis.headline import Headline, step_change
from overlap_callbacks.analysis.name_rules import collective_in_words
from overlap_callbacks.analysis.results.catalogue import SUMMARY
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.prediction import topic_of
from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.analysis.results.step_parts import exposed_share
from overlap_callbacks.analysis.statistics import LOG, Pooling
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import Block, Cell, Chart, Head, Note, Section, Table, bar, name_cell
from overlap_callbacks.report.views.environment import environment_facts
from overlap_callbacks.report.views.power import power_figures
from overlap_callbacks.report.views.quality import HOST, SCHEMA, SETTING, STARTED, run_facts
from overlap_callbacks.report.views.scaling import axis_value, common_work, work_per_s
from overlap_callbacks.report.views.step_charts import mode_bars
from overlap_callbacks.report.views.trends import slowdowns

# Title, and how the figure is computed from others.
_COMPARED: tuple[tuple[str, Callable[[dict[str, Estimate]], Estimate | None]], ...] = (
    ("Step time with overlap", step_change),
    ("Compute slowdown", lambda figures: figures.get("compute_slowdown")),
    ("Exposed communication, share of a profiled step", exposed_share),
)
# These differ between any two runs.
_NO_SETTINGS = (STARTED,)
_SCHEDULE, COLLECTIVES, _TOLD = "Schedule: ", "Collectives of a step: ", "Configuration: "
# Settings of measuring and recording, not of the job.
_NOT_OF_THE_JOB = (_SCHEDULE, SCHEMA, "overlap-callbacks", "Hosts named", HOST)
_MOST_NAMED = 3
_MAX_VALUE = 40
_MAX_VALUES = 8


def head_lines(names: Sequence[str], records: Sequence[Record]) -> list[str]:
    """The first lines of the page: which run is faster, the interval, what to try, and what differs."""
    found = fastest_of(names, records)
    lines = [found.headline.sentence, *found.headline.more]
    differing = [label for label, _ in of_the_job(differences(records))]
    if found.name and differing:
        then = records[list(names).index(found.name)].bottleneck()
        # What differs between these runs has been tried.
        untried = [
            one for one in (() if then is None else then.advice)
            if one.topic not in map(topic_of, differing)
        ]  # fmt: skip
        advice = f" Then: {untried[0].what}" if untried else ""
        lines.append(f"To try first: go on with {found.name}.{advice}")
    return [*lines, differences_in_words(names, records)]


def comparison(names: Sequence[str], records: Sequence[Record]) -> Section:
    """Step times and headline figures of all runs, and where their configurations differ."""
    blocks: list[Block] = []
    runs = [(name, record.figures) for name, record in zip(names, records, strict=True)]
    if any("e2e_overlapped_ms" in figures for _, figures in runs):
        blocks.append(mode_bars(runs))
    shares = _shares(runs)
    if shares is not None:
        blocks.append(shares)
    along = slowdowns(list(zip(names, records, strict=True)))
    if along is not None:
        blocks.append(along)
    empty = [name for name, figures in runs if not figures]
    if empty:
        blocks.append(Note(f"Without any figure: {', '.join(empty)}.", warning=True))
    blocks += [_figures(runs), *_power(names, records), difference_table(names, records)]
    return Section("Side by side", "", blocks)


def _shares(runs: Sequence[tuple[str, dict[str, Estimate]]]) -> Chart | None:
    rows = []
    for title, read in _COMPARED:
        for name, figures in runs:
            estimate = read(figures)
            if estimate is not None:
                rows.append(bar(estimate, figure=title, run=name))
    if not rows:
        return None
    return Chart("intervals", "Headline figures", {"unit": "fraction", "rows": rows}, "Bars are 95% intervals.")


def _figures(runs: Sequence[tuple[str, dict[str, Estimate]]]) -> Table:
    def shown(figure: Figure, figures: Mapping[str, Estimate]) -> str:
        most = figure.most(figures.get("e2e_overlapped_ms"))
        return PAGE.in_brackets(figures[figure.name], figure.unit, signed=figure.signed, most=most)

    by_run = [{f.label: shown(f, figures) for f in SUMMARY if f.name in figures} for _, figures in runs]
    labels = [figure.label for figure in SUMMARY]
    return _side_by_side("All figures", [name for name, _ in runs], labels, by_run, "With 95% intervals.")


def _power(names: Sequence[str], records: Sequence[Record]) -> list[Table]:
    by_run = [power_figures(record.valid_windows) for record in records]
    labels = dict.fromkeys(label for figures in by_run for label in figures)
    caption = "Means over windows, with 95% intervals."
    return [_side_by_side("Power and energy", names, list(labels), by_run, caption)] if labels else []


def _side_by_side(
    title: str, names: Sequence[str], labels: Sequence[str], by_run: Sequence[Mapping[str, str]], caption: str
) -> Table:
    """The figures of each run by label, without those that no run has."""
    rows = [
        (Cell(label), *[Cell(figures.get(label, "not measured")) for figures in by_run])
        for label in labels
        if any(label in figures for figures in by_run)
    ]
    columns = (Head("Figure", words=True), *map(Head, names))
    return Table(title, columns, tuple(rows), caption, folded=True, sorts=False)


# -- the faster run


def fastest_of(names: Sequence[str], records: Sequence[Record]) -> Fastest:
    """Which of two or more runs is fastest.

    Compares step time, or tokens or samples a second if some runs do more work per step. Runs without a window that
    counts, and runs of different models, are not compared.
    """
    known = [(name, record) for name, record in zip(names, records, strict=True) if _step_ms(record) is not None]
    if len(known) < 2:
        who = f"only {known[0][0]} has" if known else f"none of the {len(records)} runs has"
        return Fastest(Headline(f"Which run is faster is not known: {who} a window that counts."))
    left_out = [name for name in names if name not in dict(known)]
    found = _of_different_models(known) or _fastest(known)
    if not left_out:
        return found
    why = f"Not compared, as no window counts: {listed(left_out, _MOST_NAMED)}."
    headline = found.headline
    return found._replace(headline=headline._replace(interval=f"{headline.interval} {why}"))


def _fastest(known: Sequence[tuple[str, Record]]) -> Fastest:
    records = [record for _, record in known]
    work = common_work(records)
    pooling = Pooling(all_looks=any([record.running for record in records]))
    speeds = []
    for name, record in known:
        step_ms = level(steps_of(record), LOG, pooling)
        if step_ms is not None:
            speeds.append(RunSpeed(name, step_ms, work_per_s(record, work, step_ms)))
    alike = len({axis_value(record, f"{work}_per_step") for record in records}) == 1
    if alike or any(speed.work_per_s is None for speed in speeds):
        work = ""  # for equal or unknown work per step, compare time
    return fastest(speeds, work, pooling)


def steps_of(record: Record) -> list[Estimate]:
    """The overlapped step of each window that counts."""
    return [step_ms for window in record.valid_windows if (step_ms := window.e2e_overlapped_ms) is not None]


def _train_different_models(records: Sequence[Record]) -> bool:
    """Whether all records have their model's shapes and these differ."""
    shapes = [record.runs[-1].configuration.get("shapes") for record in records]
    return None not in shapes and len(set(shapes)) > 1


def _of_different_models(known: Sequence[tuple[str, Record]]) -> Fastest | None:
    """Step times without a verdict if the models differ; otherwise None."""
    if not _train_different_models([record for _, record in known]):
        return None
    times = []
    for name, record in known:
        step_ms = _step_ms(record)
        if step_ms is not None:
            times.append(f"{PLAIN.quantity(step_ms, 'ms')} in {name}")
    sentence = "These runs train different models, so their step times do not say which is faster."
    return Fastest(Headline(sentence, interval=f"A step takes {listed(times)}."))


def _step_ms(record: Record) -> float | None:
    found = record.pooled().get("e2e_overlapped_ms")
    return None if found is None else found.value


# -- where configurations differ


# A setting and its value in each run.
Difference = tuple[str, tuple[str, ...]]


def differences(records: Sequence[Record]) -> list[Difference]:
    """What differs according to the records, with its value in each run; most relevant to the job first."""
    facts = [facts_of(record) for record in records]
    found = []
    for label in dict.fromkeys(label for of_run in facts for label in of_run):
        values = tuple([of_run.get(label, DASH) for of_run in facts])
        if label not in _NO_SETTINGS and len(set(values)) > 1:
            found.append((label, values))
    return sorted(found, key=lambda row: _place(row[0]))


def of_the_job(rows: Sequence[Difference]) -> list[Difference]:
    """The differences that may make one job faster than another."""
    return [row for row in rows if not row[0].startswith(_NOT_OF_THE_JOB)]


def differences_of(record: Record, others: Sequence[Record]) -> list[tuple[str, str, tuple[str, ...]]]:
    """What differs between the job of a run and those of others, and the host: with its value, and theirs."""
    rows = [row for row in differences([record, *others]) if row in of_the_job([row]) or row[0] == HOST]

    def shown(value: str) -> str:
        return "unknown" if value == DASH else _cut(value)

    return [
        (_short(label), shown(own), tuple(map(shown, theirs)))
        for label, (own, *theirs) in rows
        if any([value != own for value in theirs])
    ]


# What a step's time depends on so much that runs which differ in it are not compared, and their names.
_ALIKE = {
    "world_size": "ranks", "device": "device", "model": "model", "tokens_per_step": "tokens of a step",
    "samples_per_step": "samples of a step",
}  # fmt: skip


def unlike(record: Record, other: Record, *, by_shapes: bool = True) -> str:
    """Why the steps of two runs are not compared, e.g. ``ranks: 8, not 4``; empty if they are."""
    if by_shapes and _train_different_models([record, other]):
        return "shapes or types of the models' parameters differ"
    for axis, name in _ALIKE.items():
        own, theirs = axis_value(record, axis), axis_value(other, axis)
        if own != theirs and None not in (own, theirs):
            return f"{name}: {_cut(str(theirs))}, not {_cut(str(own))}"
    return ""


def difference_table(names: Sequence[str], records: Sequence[Record]) -> Block:
    """A table of the differences; a note if the records show none."""
    rows = differences(records)
    untold = missing_from_records(records)
    if not rows:
        return Note(f"The records know of no difference between the configurations. {untold}")
    cells = tuple([tuple(map(name_cell, (label, *values))) for label, values in rows])
    columns = tuple(Head(text, words=True) for text in ("Setting", *names))
    return Table("Where their configurations differ", columns, cells, untold, sorts=False)


def differences_in_words(names: Sequence[str], records: Sequence[Record]) -> str:
    """The differences between the jobs, in one line. Unknown differences are listed with the table.

    If settings that the user chose differ, they are named, and the rest, which often follows from them, is counted.
    """
    rows = of_the_job(differences(records))
    chosen = [row for row in rows if _place(row[0]) == 0] or rows
    texts = [f"{_short(label)} ({_of_each(names, values)})" for label, values in chosen[:_MOST_NAMED]]
    left = len(rows) - len(texts)
    known = listed([*texts, *([f"{left:,} more"] if left else [])]) if texts else "nothing that the records know"
    return f"What differs: {known}. What the records lack may differ too."


def _of_each(names: Sequence[str], values: Sequence[str]) -> str:
    """A value per run: with the run's name if there are few."""
    shown = list(map(_cut, values))
    if len(names) > _MOST_NAMED:
        return f"{', '.join(shown[:_MAX_VALUES])}{', …' if len(shown) > _MAX_VALUES else ''}, in the order below"
    return ", ".join([f"{value} in {name}" for value, name in zip(shown, names, strict=True)])


def _short(label: str) -> str:
    for begin in (_TOLD, COLLECTIVES, f"{SETTING}: "):
        label = label.removeprefix(begin)
    return label


def _cut(value: str) -> str:
    return page_text(value, _MAX_VALUE)


def _place(label: str) -> int:
    """Sort key: the user's settings first, then the rest, and last what is not of the job."""
    if label.startswith((f"{SETTING}: ", _TOLD)):
        return 0
    return 2 if label.startswith(_NOT_OF_THE_JOB) else 1


def facts_of(record: Record) -> dict[str, str]:
    """What a record knows of its job and how it was measured, by name."""
    sources = [window.power.source for window in record.valid_windows if window.power is not None]
    limits_w = [source.limit_w for source in sources if source is not None and source.limit_w is not None]
    sent = {
        f"{COLLECTIVES}{page_text(name, 80)}": f"{count(messages, 'message')}, {bytes_in_words(size)}"
        for name, (messages, size) in collectives_of_a_step(record).items()
    }
    return {
        **dict(run_facts(record.info)),
        **dict(environment_facts(record)),
        **({f"{_TOLD}power_limit_w": f"{limits_w[-1]:.0f}"} if limits_w else {}),
        **{f"{_SCHEDULE}{name}": str(value) for name, value in record.info.schedule.items()},
        **sent,
    }


# -- what records contain


# Names in ``RunInfo.configuration``, by subject; a name may continue after these words.
_MODEL = ("shapes",)
_BUCKETS = ("ddp_bucket", "fsdp_units", "zero_reduce_bucket_size")


def collectives_of_a_step(record: Record) -> dict[str, tuple[int, int]]:
    """Messages and bytes of the recorded step, by operator and dimension; empty if none was recorded."""
    window = record.latest("collectives")
    found: dict[str, tuple[int, int]] = {}
    for row in () if window is None else window.collectives:
        name = f"{collective_in_words(row.operator)}, {row.dimension or row.group or 'other'}, {row.group_size} ranks"
        messages, size = found.get(name, (0, 0))
        found[name] = (messages + row.messages, size + row.bytes_in)
    return found


def missing_from_records(records: Sequence[Record]) -> str:
    """A sentence on parts of the configuration missing from the records, which may therefore differ."""
    lacking = [what for what, told in _PARTS if not all(map(told, records))]
    if not lacking:
        return "What no record has, e.g. the data and the code of the job, may differ."
    return f"Not every record has {listed(lacking)}, and none has the data and the code of the job: these may differ."


def _has_configuration(record: Record, begins: tuple[str, ...]) -> bool:
    return any(name.startswith(begins) for name in record.runs[-1].configuration)


def _has_work(record: Record) -> bool:
    work = record.runs[-1].workload or Workload()
    if work.tokens_per_step is not None or work.samples_per_step is not None:
        return True
    return any(window.tokens_per_step is not None for window in record.windows)


_PARTS: tuple[tuple[str, Callable[[Record], bool]], ...] = (
    ("the model", lambda record: _has_configuration(record, _MODEL)),
    ("the buckets of communication", lambda record: _has_configuration(record, _BUCKETS)),
    ("the collectives of a step", lambda record: bool(collectives_of_a_step(record))),
    ("the size of the batch", _has_work),
)
