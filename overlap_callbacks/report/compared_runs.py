"""Which of several records is of the faster run, as far as they can be compared: in a sentence, with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.faster import Fastest, RunSpeed, fastest
from overlap_callbacks.analysis.formatting import PLAIN, listed
from overlap_callbacks.analysis.headline import Headline
from overlap_callbacks.report.axis import axis_value, common_work, run_figures
from overlap_callbacks.report.record import Record

_MOST_NAMED = 3


def fastest_of(names: Sequence[str], records: Sequence[Record]) -> Fastest:
    """Which run is the fastest.

    Steps are compared, or where those of some runs do more, tokens or samples a second. Runs without a window that
    counts, and of different models, are not compared.

    Args:
        names: of the runs.
        records: of the runs, two or more.
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
    speeds = []
    for name, record in known:
        figures = run_figures(name, record, record.runs[-1].world_size, work)
        if figures.step_ms is not None:
            speeds.append(RunSpeed(name, figures.step_ms, figures.work_per_s))
    alike = len({axis_value(record, f"{work}_per_step") for record in records}) == 1
    if alike or any(speed.work_per_s is None for speed in speeds):
        work = ""  # of steps that do as much, and of those of which nobody knows what they do, the time is told
    return fastest(speeds, work)


def _of_different_models(known: Sequence[tuple[str, Record]]) -> Fastest | None:
    """Step times without a verdict, where all records tell the shapes of their model and they differ; else None."""
    shapes = [record.runs[-1].configuration.get("shapes") for _, record in known]
    if None in shapes or len(set(shapes)) == 1:
        return None
    times = []
    for name, record in known:
        step_ms = _step_ms(record)
        if step_ms is not None:
            times.append(f"{PLAIN.quantity(step_ms, 'ms')} in {name}")
    sentence = "These runs train different models, so their step times do not say which is faster."
    return Fastest(Headline(sentence, f"A step takes {listed(times)}."))


def _step_ms(record: Record) -> float | None:
    found = record.pooled().get("e2e_overlapped_ms")
    return None if found is None else found.value
