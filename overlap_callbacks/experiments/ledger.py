"""``overlap predict --ledger``: what advice predicted, and what came of it.

A change is made by an arm of the same run, by ``overlap tune``, or by a later run whose job differs in it alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from scipy.special import bdtr

from overlap_callbacks.analysis.apart import change, level
from overlap_callbacks.analysis.arms import ArmSummary, arm_summaries
from overlap_callbacks.analysis.formatting import DASH, PLAIN, count, one_line
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.prediction import Prediction, topic_of
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.analysis.statistics import CONFIDENCE, LOG, Pooling, inverted_change
from overlap_callbacks.experiments.against import incomparable
from overlap_callbacks.experiments.tune.combinations import Combination, in_words
from overlap_callbacks.experiments.tune.ranking import Ranking, ranked
from overlap_callbacks.experiments.tune.sweep import Tune
from overlap_callbacks.report.record import Record, RecordError, read, runs_in
from overlap_callbacks.report.views.comparison import COLLECTIVES, differences, of_the_job, steps_of
from overlap_callbacks.report.views.elements import Column, Document, Note, RunPage, Section, table_of

_DEFERRED = "defer-reductions"
# Predictions of a kind are bad if that few would hold by chance in at most this share of ledgers.
_BY_CHANCE = 0.05
# Of the runs next to one that is shown, the newest are read, in less than a second: so many, of so many bytes in all.
_MOST_RUNS, _MOST_BYTES = 20, 64 * 2**20
_NUMBER = re.compile(r"([+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?: ([KMGT])iB)?")


class Entry(NamedTuple):
    """A prediction, and what came of it.

    Attributes:
        run: the folder of the run that predicted.
        tried_by: an arm, settings of ``overlap tune`` or a run; empty if nothing made the change.
        saved_ms: by the change, of the predicted step, with a 95% interval; None if nothing made it.
    """

    run: str
    prediction: Prediction
    tried_by: str = ""
    saved_ms: Estimate | None = None

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
    """Each prediction of the runs with each trial of it; without one, alone.

    Of two runs, the later one tries what the earlier one predicted. Control runs predict nothing, and try nothing.
    """
    runs = [record for record in records if not record.control]
    rows = of_the_job(differences(runs))
    found = []
    for place, record in enumerate(runs):
        run, later = str(record.path.parent), list(_later(runs, place, rows))
        arms, rankings = arm_summaries(record.summary, record.arms), list(_rankings(record, tunes))
        for said in _predictions(record):
            trials = [*_by_arms(arms, said), *_by_tunes(rankings, said), *_by_runs(record, said, later)]
            tried = [Entry(run, said, name, _saved(moved, said)) for name, moved in trials]
            found += tried or [Entry(run, said)]
    return found


def _predictions(record: Record) -> list[Prediction]:
    """As recorded; in records of earlier versions, those of the advice on the run."""
    if record.predictions:
        known = {(one.topic, one.rises): one for one in reversed(record.predictions)}
        return list(known.values())[::-1]
    found = record.bottleneck()
    return [] if found is None else found.predictions


def _saved(moved: Estimate, said: Prediction) -> Estimate:
    """A relative change of the step time, as what it saves of the predicted step."""
    low, high = (None if end is None else -end * said.step_ms for end in (moved.ci_high, moved.ci_low))
    return Estimate(-moved.value * said.step_ms, low, high, moved.num_steps, moved.num_blocks)


# A trial: its name, and the relative change of the step time.
_Trial = tuple[str, Estimate]


def _by_arms(rows: Sequence[ArmSummary], said: Prediction) -> Iterator[_Trial]:
    for row in rows:
        if row.arm.sequential or row.control or row.speedup is None or topic_of(row.arm.name) != said.topic:
            continue
        numbers = [float(number) for number in re.findall(r"\d+", row.arm.name)]
        if said.rises and numbers and not any(numbers):  # such as no prefetching
            continue
        yield f"arm {one_line(row.arm.name)}", inverted_change(row.speedup)


def _rankings(record: Record, tunes: Sequence[Tune]) -> Iterator[tuple[Ranking, list[Combination]]]:
    """The tunings of the same job that began later, and their combinations."""
    for tune in tunes:
        found = ranked(tune)
        if found.baseline is not None and _is_same_job(record, tune, found.baseline):
            yield found, tune.combinations


def _by_tunes(rankings: Sequence[tuple[Ranking, list[Combination]]], said: Prediction) -> Iterator[_Trial]:
    for found, settings in rankings:
        for row in found.measured:
            pairs = zip(settings[found.baseline or 0], settings[row.number], strict=True)
            turned = [(base.axis.name, base.value, own.value) for base, own in pairs if base.value != own.value]
            if row.change is not None and _makes(turned, said):
                yield f"overlap tune, {one_line(in_words(settings[row.number]))}", row.change


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
        if not (_makes(turned, said) if turned else _defers(differing, said)):
            continue
        pooling = Pooling(all_looks=other.running or record.running)
        own = own or level(steps_of(record), LOG, pooling)
        then = level(steps_of(other), LOG, pooling)
        moved = None if own is None or then is None else change([own], then, LOG, pooling)
        if moved is not None:
            yield str(other.path.parent), moved


def _differing(rows: Iterable[tuple[str, tuple[str, ...]]], one: int, other: int) -> list[tuple[str, str, str]]:
    """What differs between two of several runs."""
    return [(name, values[one], values[other]) for name, values in rows if values[one] != values[other]]


def _makes(turned: Sequence[tuple[str, str, str]], said: Prediction) -> bool:
    """Whether these settings, with their values before and after, are the predicted change, and no other."""
    return bool(turned) and all(
        [topic_of(name) == said.topic and _moves(before, after, said.rises) for name, before, after in turned]
    )


def _defers(collectives: Sequence[tuple[str, str, str]], said: Prediction) -> bool:
    """Whether gradients are reduced less often, and nothing else differs: no setting tells that."""
    reductions = [row for row in collectives if re.search(r"all_reduce|reduce_scatter", row[0])]
    falls = [_moves(before, after, rises=False) for _, before, after in reductions]
    return said.topic == _DEFERRED and bool(reductions) and len(reductions) == len(collectives) and all(falls)


def _moves(before: str, after: str, rises: bool | None) -> bool:
    """Whether a setting moves as predicted. Other values than numbers and switches are no step either way."""
    if rises is None:
        return before != after
    numbers = [_number(text) for text in (before, after)]
    return None not in numbers and numbers[0] != numbers[1] and (numbers[1] > numbers[0]) is rises  # type: ignore[operator]


def _number(text: str) -> float | None:
    if text in ("False", "True"):
        return float(text == "True")
    found = _NUMBER.match(text)
    return None if found is None else float(found[1].replace(",", "")) * 1024 ** (" KMGT".index(found[2] or " "))


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


def document(entries: Sequence[Entry]) -> Document:
    """The tried predictions as a table, and how many are not."""
    tried = [entry for entry in entries if entry.tried_by]
    folder = os.path.join(os.path.commonpath([os.path.dirname(entry.run) for entry in entries] or [""]), "")
    left = len(entries) - len(tried)
    table = table_of(
        "Predicted and measured",
        tried,
        Column("*Advice", lambda entry: entry.prediction.topic),
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
    if left and tried:
        blocks.append(Note(f"Not tried: {count(left, 'prediction')}."))
    section = Section("What came of the advice?", "", blocks)
    return Document("Ledger", (RunPage("ledger", "", "", headline(entries), (), (section,) if blocks else ()),), "")


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
