"""``overlap predict --ledger``: what advice and ``--what-if`` predicted, and what came of it.

A change is made by an arm of the same run, by ``overlap tune``, or by a later run whose job differs in it alone.

A prediction and what came of it are kept in the folder of what tried it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from scipy.special import bdtr

from overlap_callbacks.analysis.apart import change, level
from overlap_callbacks.analysis.arms import arm_summaries
from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.formatting import DASH, PLAIN, count, one_line
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.prediction import Prediction, topic_of, word_in
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.analysis.statistics import CONFIDENCE, LOG, Pooling, inverted_change
from overlap_callbacks.experiments.against import incomparable
from overlap_callbacks.experiments.tune.combinations import in_words
from overlap_callbacks.experiments.tune.ranking import Ranking, ranked
from overlap_callbacks.experiments.tune.sweep import Tune
from overlap_callbacks.experiments.what_if import (
    file_beside,
    is_after,
    is_layout,
    is_of_layout,
    keep,
    predicted_layouts,
    sends,
)
from overlap_callbacks.report.record import Record, RecordError, read, runs_in
from overlap_callbacks.report.views.comparison import COLLECTIVES, differences, facts_of, of_the_job, steps_of, unlike
from overlap_callbacks.report.views.elements import Column, Document, Note, RunPage, Section, table_of

_DEFERRED = "defer-reductions"
# Predictions of a kind are bad if that few would hold by chance in at most this share of ledgers.
_BY_CHANCE = 0.05
# Of the runs next to one that is shown, the newest are read, in less than a second: so many, of so many bytes in all.
_MOST_RUNS, _MOST_BYTES = 20, 64 * 2**20
# A setting so near to one that the advice names is that one: those named are further apart.
_NEAR = 1.25
_SWITCHES = {"no": 0.0, "yes": 1.0, "False": 0.0, "True": 1.0}
_NUMBER = re.compile(r"([+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?: ([KMGT])iB)?")


class Entry(NamedTuple):
    """A prediction, and what came of it.

    Attributes:
        run: the folder of the run that predicted.
        tried_by: an arm, settings of ``overlap tune`` or a run; empty if nothing made the change.
        saved_ms: by the change, of the predicted step, with a 95% interval; None if nothing made it.
        tried_in: the folder of that run or tuning; empty if nothing made it.
    """

    run: str
    prediction: Prediction
    tried_by: str = ""
    saved_ms: Estimate | None = None
    tried_in: str = ""

    @property
    def held(self) -> bool | None:
        """Whether the interval of what was saved overlaps the predicted one; None if it is not known well enough.

        An interval wider than the predicted one would overlap almost any prediction.
        """
        found, said = self.saved_ms, self.prediction
        if found is None or found.ci_low is None or found.ci_high is None:
            return None
        if found.ci_high - found.ci_low > said.high_ms - said.low_ms:
            return None
        return found.ci_low <= said.high_ms and found.ci_high >= said.low_ms


class Tally(NamedTuple):
    """How many predictions held, of those that were tried with an interval."""

    held: int
    tried: int

    @property
    def is_bad(self) -> bool:
        """Whether fewer held than could be by chance, if each held with 95 % probability."""
        return self.tried > 0 and float(bdtr(self.held, self.tried, CONFIDENCE)) < _BY_CHANCE

    def in_words(self) -> str:
        return f"{self.held} of {self.tried:,} such predictions held"


def tally(entries: Iterable[Entry]) -> Tally:
    known = [entry.held for entry in entries if entry.held is not None]
    return Tally(sum(known), len(known))


def by_topic(entries: Sequence[Entry]) -> dict[str, Tally]:
    """The same of each kind of predictions that was tried."""
    topics = dict.fromkeys([entry.prediction.topic for entry in entries if entry.held is not None])
    return {topic: tally([one for one in entries if one.prediction.topic == topic]) for topic in topics}


def ledger(records: Sequence[Record], tunes: Sequence[Tune] = ()) -> list[Entry]:
    """Each prediction of the runs with its trial; without one, alone.

    Trials are independent: a prediction has one, which is that of no other. It is an arm of the run, else settings of a
    tuning, else a later run: of several that nearest to what the advice names, or else to the present setting, and then
    the first. Where several runs predicted the same, the last one before the trial has it. Control runs predict
    nothing, and try nothing.
    """
    runs = sorted([record for record in records if not record.control], key=lambda record: record.info.started_at)
    rows = of_the_job(differences(runs))
    found, taken = list[Entry](), set[tuple[str, ...]]()
    for place, record in reversed(list(enumerate(runs))):
        rankings, later = list(_rankings(record, tunes)), list(_later(runs, place, rows))
        entries = []
        for said in _predictions(record):
            others = list(_in_layout(runs, place, rows, said)) if said.job else later
            kinds = (_by_arms(record, said), _by_tunes(rankings, said), _by_runs(record, said, others))
            free = ([trial for trial in trials if (said.topic, *trial.key) not in taken] for trials in kinds)
            best = min(next(filter(None, free), ()), key=lambda trial: trial.distance, default=None)
            run = str(record.path.parent)
            if best is None:
                entries.append(Entry(run, said))
            else:
                taken.add((said.topic, *best.key))
                entries.append(Entry(run, said, best.name, _saved(best.change, said), best.folder))
        found[:0] = entries
    return found


def _predictions(record: Record) -> list[Prediction]:
    """The last of each kind; in records of earlier versions, those of the advice on the run."""
    beside = predicted_layouts(record)
    if record.predictions:
        return list({(one.topic, one.rises): one for one in record.predictions}.values()) + beside
    found = record.bottleneck()
    return beside if found is None else found.predictions + beside


def _saved(moved: Estimate, said: Prediction) -> Estimate:
    """A relative change of the step time, as what it saves of the predicted step."""
    low, high = (None if end is None else -end * said.step_ms for end in (moved.ci_high, moved.ci_low))
    return Estimate(-moved.value * said.step_ms, low, high, moved.num_steps, moved.num_blocks)


# -- what tries a prediction


class _Trial(NamedTuple):
    """What makes a predicted change.

    Attributes:
        name: as in ``Entry.tried_by``.
        change: of the step time, relative.
        distance: of the setting from the one that the advice names.
        key: what it is the trial of, with another prediction too.
        folder: as in ``Entry.tried_in``.
    """

    name: str
    change: Estimate
    distance: float
    key: tuple[str, ...]
    folder: str


def _by_arms(record: Record, said: Prediction) -> Iterator[_Trial]:
    """Arms of the same run, in the order of their first windows."""
    rows = {row.arm.name: row for row in arm_summaries(record.summary, record.arms) if not row.control}
    for name in dict.fromkeys([report.arm.name for report in record.arms]):
        row = rows.get(name)
        if row is None or row.arm.sequential or row.speedup is None or topic_of(name) != said.topic:
            continue
        numbers = re.findall(r"\d+", name) if row.arm.setting is None else [row.arm.setting]
        turned = str(max(map(float, numbers))) if numbers else ""
        distance = _distance(_present(record, name), _value(name, turned), said)
        if distance is not None:
            key, folder = (str(record.path), name), str(record.path.parent)
            yield _Trial(f"arm {one_line(name)}", inverted_change(row.speedup), distance, key, folder)


def _rankings(record: Record, tunes: Sequence[Tune]) -> Iterator[tuple[Tune, Ranking]]:
    """The tunings of the same job that began later."""
    for tune in tunes:
        found = ranked(tune)
        if found.baseline is not None and _is_same_job(record, tune, found.baseline):
            yield tune, found


def _by_tunes(rankings: Sequence[tuple[Tune, Ranking]], said: Prediction) -> Iterator[_Trial]:
    for tune, found in rankings:
        if said.job and not is_after(tune.start.started_at, said):
            continue
        for row in sorted(found.measured, key=lambda row: row.number):
            own = tune.combinations[row.number]
            pairs = zip(tune.combinations[found.baseline or 0], own, strict=True)
            turned = [(base.axis.name, base.value, now.value) for base, now in pairs if base.value != now.value]
            distance = _distance_of(turned, said)
            if row.change is not None and distance is not None:
                key = (str(tune.folder), str(row.number))
                name = f"overlap tune, {one_line(in_words(own))}"
                yield _Trial(name, row.change, distance, key, str(tune.folder))


def _is_same_job(record: Record, tune: Tune, combination: int) -> bool:
    """Whether a run of a combination began later, and its record tells no other job."""
    folders = [run.folder for run in tune.lines if run.combination == combination and not run.failure]
    with contextlib.suppress(RecordError, IndexError):
        other = read(tune.folder / folders[0], details=False)
        # A run of overlap tune is only timed, and tells less.
        rows = [row for row in _differing(of_the_job(differences([record, other])), 0, 1) if DASH not in row]
        is_later = other.info.started_at > record.info.started_at
        return is_later and not incomparable(other, record) and not rows
    return False


def _later(
    runs: Sequence[Record], place: int, rows: Sequence[tuple[str, tuple[str, ...]]]
) -> Iterator[tuple[Record, list[tuple[str, str, str]]]]:
    """The later runs that can be compared with one, and what differs: names, and values before and after."""
    own = runs[place]
    for number, other in enumerate(runs):
        if other.info.started_at > own.info.started_at and not incomparable(other, own):
            yield other, _differing(rows, place, number)


def _by_runs(
    record: Record, said: Prediction, later: Sequence[tuple[Record, list[tuple[str, str, str]]]]
) -> Iterator[_Trial]:
    own = None
    for other, differing in later:
        turned = [row for row in differing if not row[0].startswith(COLLECTIVES)]
        distance = _distance_of(turned, said) if turned else 0.0 if said.job or _defers(differing, said) else None
        if distance is None:
            continue
        pooling = Pooling(all_looks=other.running or record.running)
        own = own or level(steps_of(record), LOG, pooling)
        then = level(steps_of(other), LOG, pooling)
        moved = None if own is None or then is None else change([own], then, LOG, pooling)
        if moved is not None:
            folder = str(other.path.parent)
            yield _Trial(folder, moved, distance, (str(other.path),), folder)


def _in_layout(
    runs: Sequence[Record], place: int, rows: Sequence[tuple[str, tuple[str, ...]]], said: Prediction
) -> Iterator[tuple[Record, list[tuple[str, str, str]]]]:
    """The runs that began after the prediction, and send what it says, byte by byte. No record tells the layout."""
    job = msgspec.convert(said.job, JobShape)
    for number, other in enumerate(runs):
        if number == place or not is_after(other.info.started_at, said):
            continue
        names = [name for name, *_ in _differing(rows, place, number)]
        settings = [name for name in names if not name.startswith(COLLECTIVES)]
        is_possible = settings != names and all(map(is_of_layout, settings))
        if is_possible and not unlike(other, runs[place], by_shapes=False) and sends(other, job):
            yield other, []


def _differing(rows: Iterable[tuple[str, tuple[str, ...]]], one: int, other: int) -> list[tuple[str, str, str]]:
    """What differs between two of several runs."""
    return [(name, values[one], values[other]) for name, values in rows if values[one] != values[other]]


# -- whether a setting changes as the advice says


class _Value(NamedTuple):
    """A setting that is a number, or on or off; whether of bytes, as its name or unit says."""

    number: float
    is_bytes: bool

    def moves(self, other: _Value, rises: bool | None) -> bool:
        return other != self and (rises is None or (other.number > self.number) is rises)


def _distance(before: _Value | None, after: _Value | None, said: Prediction) -> float | None:
    """How far a setting is from the nearest that the advice names, or else from the one before, on a log scale.

    None if it does not move as predicted, or beyond all that the advice names.
    """
    if said.rises is None:
        return 0.0
    if before is None or after is None or before.is_bytes is not after.is_bytes or not before.moves(after, said.rises):
        return None
    name, _, values = said.tries.partition("=")
    told = [value for text in values.split(",") if (value := _value(name, text)) is not None]
    named = [one for one in told if one.is_bytes is before.is_bytes and before.moves(one, said.rises)]
    if named and not min(named).number / _NEAR <= after.number <= max(named).number * _NEAR:
        return None
    return min([abs(math.log1p(after.number) - math.log1p(one.number)) for one in named or [before]])


def _distance_of(turned: Sequence[tuple[str, str, str]], said: Prediction) -> float | None:
    """The same of settings with their values before and after; None if they are not the predicted change alone."""
    if said.job:
        return 0.0 if is_layout(turned, said) else None
    found = [
        _distance(_value(name, before), _value(name, after), said) if topic_of(name) == said.topic else None
        for name, before, after in turned
    ]
    known = [one for one in found if one is not None]
    return max(known) if known and len(known) == len(found) else None


def _defers(collectives: Sequence[tuple[str, str, str]], said: Prediction) -> bool:
    """Whether gradients are reduced less often, and nothing else differs: no setting tells that."""
    reductions = [row for row in collectives if re.search(r"all_reduce|reduce_scatter", row[0])]
    values = [(_value(name, before), _value(name, after)) for name, before, after in reductions]
    falls = [before is not None and after is not None and before.moves(after, rises=False) for before, after in values]
    return said.topic == _DEFERRED and bool(reductions) and len(reductions) == len(collectives) and all(falls)


def _present(record: Record, name: str) -> _Value | None:
    """The job's own value of the setting that an arm turns; None if its record does not tell one."""
    facts = of_the_job([(label, (value,)) for label, value in facts_of(record).items()])
    told = [(word_in(label), _value(label, value)) for label, (value,) in facts]
    same = [value for words, value in told if words == word_in(name)]
    found = set(same or [value for (topic, _), value in told if topic == topic_of(name)])
    return found.pop() if len(found) == 1 else None


def _value(name: str, text: str) -> _Value | None:
    if text in _SWITCHES:
        return _Value(_SWITCHES[text], False)
    found = _NUMBER.match(text)
    if found is None:
        return None
    unit = found[2] or ("M" if re.search(r"(^|[_-])mi?b($|[_-])", name.lower()) else "")
    times = 1024.0 ** " KMGT".index(unit or " ")
    return _Value(float(found[1].replace(",", "")) * times, bool(unit) or "bytes" in name)


# -- what the runs next to one say of its advice


def seldom_held(record: Record) -> dict[str, str]:
    """The kinds of predictions that held too seldom in a run and those next to it, each with how many did."""
    own, left = record.path.resolve().parent, _MOST_BYTES
    records = [record]
    for run in reversed(runs_in(own.parent)[-_MOST_RUNS:]):
        with contextlib.suppress(RecordError, OSError):
            left -= 0 if run == own else (run / FILE_NAME).stat().st_size
            if run != own and left >= 0:
                records.append(read(run, details=False))
    return {topic: f"in your runs {found.in_words()}" for topic, found in by_topic(ledger(records)).items()
            if found.is_bad}  # fmt: skip


# -- beside what tried them


def keep_outcomes(entries: Sequence[Entry]) -> list[str]:
    """Write each tried prediction and what came of it beside what tried it. Returns why some are not."""
    lines: dict[Path, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry.tried_by:
            told = {"record": "outcome", **entry._asdict(), "held": entry.held}
            lines.setdefault(file_beside(Path(entry.tried_in)), []).append(told)
    return [failed for file, told in lines.items() if (failed := keep(file, told))]


# -- in words


def headline(entries: Sequence[Entry]) -> str:
    """How often predictions held, in one sentence."""
    found = tally(entries)
    if not entries:
        return "The advice on these runs predicts nothing."
    if not found.tried:
        many = count(len(entries), "prediction")
        if any([entry.tried_by for entry in entries]):
            return f"{many}, and what those that were tried saved is known less well than they say: not enough data."
        return f"{many}, and none was tried: no arm, overlap tune or later run does that."
    bad = [f"{topic} {one.held} of {one.tried}" for topic, one in by_topic(entries).items() if one.is_bad]
    seldom = f" Fewer than could be by chance: {', '.join(bad)}." if bad else ""
    return f"{found.held} of {found.tried:,} tried predictions held.{seldom}"


def document(entries: Sequence[Entry], failed: Sequence[str] = ()) -> Document:
    """The tried predictions as a table, and how many are not."""
    tried = [entry for entry in entries if entry.tried_by]
    folder = os.path.join(os.path.commonpath([os.path.dirname(entry.run) for entry in entries] or [""]), "")
    left = len(entries) - len(tried)
    table = table_of(
        "Predicted and measured",
        tried,
        Column("*Advice", lambda entry: _advice(entry.prediction)),
        Column("*Predicted", lambda entry: _predicted(entry.prediction)),
        Column("*Saved", lambda entry: _measured(entry.saved_ms)),
        Column("*Held", lambda entry: {True: "yes", False: "no", None: "not enough data"}[entry.held]),
        Column("*Tried by", lambda entry: one_line(entry.tried_by.removeprefix(folder))),
        Column("*Predicted by", lambda entry: one_line(entry.run.removeprefix(folder))),
        caption="What the change saves of a step where it was predicted, with 95% intervals. A prediction holds if "
        "they overlap and the measured one is no wider.",
        sorts=False,
    )
    blocks: list[Any] = [table] if tried else []
    if tried:
        kept = "Each is kept with its outcome in ledger.jsonl, in the folder of what tried it"
        blocks.append(Note(f"{kept}; but {', '.join(failed)}" if failed else kept))
    if left and tried:
        blocks.append(Note(f"Not tried: {count(left, 'prediction')}."))
    section = Section("What came of the advice?", "", blocks)
    return Document("Ledger", (RunPage("ledger", "", "", headline(entries), (), (section,) if blocks else ()),), "")


def _advice(said: Prediction) -> str:
    return one_line(f"{said.topic} {said.tries}") if said.job else said.topic


def _predicted(said: Prediction) -> str:
    return PLAIN.ends(Estimate(said.high_ms, said.low_ms, said.high_ms, 0, 0), "ms")


def _measured(found: Estimate | None) -> str:
    if found is None:
        return ""
    ends = PLAIN.ends(found, "ms")
    return PLAIN.quantity(found.value, "ms") + (f" ({ends})" if ends else "")


def as_data(entries: Sequence[Entry]) -> dict[str, Any]:
    """The same as plain data."""
    return {
        **tally(entries)._asdict(),
        "topics": [{"topic": topic, **found._asdict(), "is_bad": found.is_bad} for topic, found in
                   by_topic(entries).items()],
        "predictions": [{**entry._asdict(), "held": entry.held} for entry in entries],
    }  # fmt: skip
