"""Several runs plotted against what varies between them: the ranks, the batch, a setting of the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from overlap_callbacks.analysis.communication.bandwidths import effective_bandwidths
from overlap_callbacks.analysis.formatting import PAGE, count, page_text
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.analysis.results.step_parts import exposed_share
from overlap_callbacks.analysis.throughput import (
    WORLD_SIZE,
    RunFigures,
    ScaledRun,
    Value,
    in_order,
    is_numeric,
    run_throughput,
    scaled,
)
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import (
    RUN_COLORS,
    Block,
    Cell,
    Chart,
    Column,
    Head,
    Note,
    Section,
    Table,
    has_intervals,
    legend_of,
    line,
    table_of,
)

# Maximum length of text on an axis, and of names of dimensions.
_MAX_LABEL = 40
TOKENS, SAMPLES = "tokens", "samples"
_UNITS = {TOKENS: "tokens/s", SAMPLES: "samples/s"}
_GB = 1e9
Reader = Callable[[RunFigures], "Estimate | float | None"]


class AxisError(ValueError):
    """The runs cannot be shown against an axis; the message says why."""


class Comparison(NamedTuple):
    """Runs in the order of an axis.

    Attributes:
        work: what ``work_per_s`` counts, ``tokens`` or ``samples``; empty if it is not known of all runs.
        without: names of the runs without a value on the axis.
    """

    axis: str
    runs: tuple[RunFigures, ...]
    work: str
    without: tuple[str, ...]

    @property
    def numeric(self) -> bool:
        """Whether the axis is one of numbers."""
        return is_numeric(self.runs)


def scaling(found: Comparison) -> Section:
    """Throughput, scaling, communication and bandwidth of the runs against the axis."""
    relative = scaled(found.runs) if found.axis == WORLD_SIZE else {}
    charts = [chart for chart in _charts(found, relative) if chart is not None]
    if len(charts) % 2:  # the last has the row to itself
        charts[-1] = dataclasses.replace(charts[-1], narrow=False)
    blocks: list[Block] = [*charts, _table(found, relative)]
    if found.axis == WORLD_SIZE and not relative:
        blocks.append(
            Note(
                "Scaling factor and efficiency need tokens_per_step or samples_per_step of every run that is compared."
            )
        )
    if found.without:
        names = ", ".join(page_text(name, 80) for name in found.without)
        blocks.append(Note(f"Without {_label(found.axis)} in the record: {names}.", warning=True))
    if found.axis == WORLD_SIZE:
        return Section("How does it scale?", _answer(found.runs, relative), blocks)
    return Section(f"How does it change with {_label(found.axis)}?", "", blocks)


def _answer(runs: Sequence[RunFigures], relative: dict[str, ScaledRun]) -> str:
    largest = max((run for run in runs if run.name in relative), key=lambda run: run.ranks, default=None)
    if largest is None:
        return ""
    base, run = min(run.ranks for run in runs if run.name in relative), relative[largest.name]
    return (
        f"On {largest.ranks:,} ranks the job does {PAGE.number(run.factor, 2)} times as much in a second as on "
        f"{count(base, 'rank')}: {PAGE.percent(run.efficiency)} of the factor of the ranks."
    )


def _charts(found: Comparison, relative: dict[str, ScaledRun]) -> list[Chart | None]:
    bandwidths = [
        (page_text(name, _MAX_LABEL), color, _bandwidth(name))
        for name, color in zip(_dimensions(found), RUN_COLORS, strict=False)
    ]
    shares: list[tuple[str, str, Reader]] = [
        ("communication", "communication", lambda run: run.comm_ratio),
        ("exposed", "sequential", lambda run: run.exposed),
    ]
    base = min((run.ranks for run in found.runs if run.name in relative), default=0)
    return [
        _chart(found, "Throughput", _UNITS.get(found.work, ""), [("throughput", "ink", lambda run: run.work_per_s)]),
        _chart(found, "Step time, overlapped", "ms", [("step", "overlapped", lambda run: run.step_ms)]),
        _chart(
            found, "Scaling factor", "times", [("scaling factor", "ink", _of_scaled(relative, "factor"))], ideal=base
        ),
        _chart(found, "Scaling efficiency", "fraction", [("efficiency", "ink", _of_scaled(relative, "efficiency"))]),
        _chart(found, "Communication as a share of the step", "fraction", shares),
        _chart(found, "Effective bandwidth", "GB/s", bandwidths),
        _chart(found, "Model FLOP utilisation", "fraction", [("MFU", "ink", lambda run: run.mfu)]),
    ]


def _dimensions(found: Comparison) -> list[str]:
    """Dimensions of parallelism with a bandwidth in any run."""
    return sorted({name for run in found.runs for name in run.bandwidths})


def _of_scaled(relative: dict[str, ScaledRun], name: str) -> Reader:
    return lambda run: getattr(relative[run.name], name) if run.name in relative else None


def _bandwidth(dimension: str) -> Reader:
    return lambda run: run.bandwidths.get(dimension)


_CAPTIONS = {
    "Scaling factor": "Throughput over that of the fewest ranks. The dashed line is as many times as there are ranks.",
    "Communication as a share of the step": "All communication, and the part of it during which no compute runs.",
    "Effective bandwidth": "Bytes on the wire of a rank over the time of transfers alone, without waiting.",
}


def _chart(
    found: Comparison, title: str, unit: str, lines: Sequence[tuple[str, str, Reader]], *, ideal: int = 0
) -> Chart | None:
    """A chart of lines, each with a name, colour and figure; None if no run has any of the figures.

    ``ideal``: ranks of the smallest job, for a line of ideal scaling; 0 for none.
    """
    series = []
    for name, color, read in lines:
        points = [
            (_place(run.value), page_text(run.name, 80), figure)
            for run in found.runs
            if (figure := read(run)) is not None
        ]
        if points:
            series.append(line(name, color, points))
    if not series:
        return None
    caption = _CAPTIONS.get(title, "")
    if has_intervals(series):
        caption = f"{caption} Whiskers are 95% intervals.".strip()
    legend = legend_of(series) if len(lines) > 1 else ()
    data = {"unit": unit, "series": series, "x_label": _label(found.axis), "numeric": found.numeric, "ideal": ideal}
    return Chart("against", title, data, caption, legend, narrow=True)


def _place(value: Value) -> Value:
    return value if not isinstance(value, str) else page_text(value, _MAX_LABEL)


def _table(found: Comparison, relative: dict[str, ScaledRun]) -> Table:
    def place(run: RunFigures) -> Cell:
        value = _place(run.value)
        return Cell(f"{value:,}" if isinstance(value, (int, float)) else value, value)

    return table_of(
        "Runs in the order of the axis",
        found.runs,
        Column("*Run", lambda run: run.name),
        Column(Head(_label(found.axis), words=not found.numeric), place),
        *([] if found.axis == WORLD_SIZE else [Column[RunFigures]("Ranks", lambda run: run.ranks, "whole")]),
        Column("Step, ms", lambda run: run.step_ms),
        Column(f"{found.work.capitalize()} a second" if found.work else "Throughput", lambda run: run.work_per_s),
        Column("Scaling factor", _of_scaled(relative, "factor")),
        Column("Efficiency", _of_scaled(relative, "efficiency"), "percent"),
        Column("Communication ratio", lambda run: run.comm_ratio, "percent"),
        Column("Exposed", lambda run: run.exposed, "percent"),
        Column("MFU", lambda run: run.mfu, "percent"),
        *[
            Column[RunFigures](f"GB/s, {page_text(name, _MAX_LABEL)}", _bandwidth(name))
            for name in _dimensions(found)[: len(RUN_COLORS)]
        ],
        caption="Over the windows that count. Communication ratio and exposed communication are shares of a profiled "
        "step, which is longer than others.",
        drop_empty=True,
    )


def _label(axis: str) -> str:
    return page_text({WORLD_SIZE: "ranks"}.get(axis, axis.replace("_", " ")), _MAX_LABEL)


# -- data from the records


def compared(names: Sequence[str], records: Sequence[Record], axis: str | None) -> Comparison | None:
    """The runs against an axis, by default the world size.

    Returns:
        None if no axis was requested and all runs have the same number of ranks, or there is only one.

    Raises:
        AxisError: no run has a value on the axis.
    """
    values = [axis_value(record, axis or WORLD_SIZE) for record in records]
    told = [value for value in values if value is not None]
    if axis is None and len(set(told)) < 2:
        return None
    if not told:
        raise AxisError(
            f"axis must be something that the records have: {', '.join(known_axes(records))}, or one of their "
            f"environment variables; got {axis!r}"
        )
    work = common_work(records)
    runs = [
        run_figures(name, record, value, work)
        for name, record, value in zip(names, records, values, strict=True)
        if value is not None
    ]
    without = tuple([name for name, value in zip(names, values, strict=True) if value is None])
    return Comparison(axis or WORLD_SIZE, tuple(in_order(runs)), work, without)


def axis_value(record: Record, axis: str) -> Value | None:
    """A run's value on an axis; None if it has none."""
    settings, configuration, facts = _settings(record), record.info.configuration, _facts(record)
    if axis in settings:
        return _as_value(settings[axis])
    if axis in facts:
        return facts[axis]
    size = _group_sizes(record).get(axis)
    if size is not None:
        return size
    if axis in configuration:
        return _as_value(configuration[axis])
    own = record.environment
    return None if own is None else own.variables.get(axis)


def _as_value(told: Any) -> Value:
    value: Value = str(told) if isinstance(told, bool) else told
    return value


def _settings(record: Record) -> Mapping[str, Any]:
    return (record.info.workload or Workload()).settings


def _facts(record: Record) -> dict[str, Value | None]:
    """Every run's facts that can be an axis, and those of its work."""
    run, work, job = record.info, record.info.workload or Workload(), record.job_environment
    # An adapter may know the tokens of a step, and reports them with each window.
    told = [w.tokens_per_step for w in reversed(record.valid_windows) if w.tokens_per_step is not None]
    return {
        WORLD_SIZE: run.world_size,
        "hosts": None if job is None else job.num_hosts,
        "backend": run.backend or None,
        "device": run.device or None,
        "framework": run.framework or None,
        "torch": run.torch_version or None,
        "tokens_per_step": next(iter(told), None) if work.tokens_per_step is None else work.tokens_per_step,
        "samples_per_step": work.samples_per_step,
        "precision": work.precision,
        "model": work.model_preset or work.model_parameters,
    }


def known_axes(records: Sequence[Record]) -> list[str]:
    """The axes available for these runs, without environment variables."""
    settings = {name for record in records for name in (*_settings(record), *record.info.configuration)}
    dimensions = {name for record in records for name in _group_sizes(record)}
    return [*dict.fromkeys([*_facts(records[0]), *sorted(dimensions), *sorted(settings)])]


def scaling_data(found: Comparison) -> dict[str, Any]:
    """As plain data, for other programs."""
    relative = scaled(found.runs)
    rows = []
    for run in found.runs:
        row = run._asdict() | {"bandwidths_gb_s": dict(run.bandwidths), "run": run.name}
        del row["bandwidths"], row["name"]
        if run.name in relative:
            row |= {f"scaling_{name}": value for name, value in relative[run.name]._asdict().items()}
        rows.append(row)
    return {"axis": found.axis, "work": found.work or None, "runs": rows, "without": list(found.without)}


def run_figures(name: str, record: Record, value: Value, work: str) -> RunFigures:
    """The figures of a run at ``value`` on the axis; ``work`` as in ``common_work``."""
    figures = record.pooled()
    throughput = run_throughput(record.valid_windows)
    step, exposed = figures.get("e2e_overlapped_ms"), exposed_share(figures)
    window = record.latest_valid("collectives")
    bandwidths = {} if window is None else effective_bandwidths(window.collectives)
    return RunFigures(
        name=name,
        value=value,
        ranks=record.runs[-1].world_size,
        step_ms=step,
        work_per_s=work_per_s(record, work, step),
        comm_ratio=figures.get("comm_ratio"),
        exposed=None if exposed is None else exposed.value,
        mfu=None if throughput is None else throughput.mfu,
        bandwidths={dimension or "other": rate / _GB for dimension, rate in sorted(bandwidths.items())},
    )


def work_per_s(record: Record, work: str, step: Estimate | None) -> Estimate | None:
    """Work per second, with the inverted interval of the step time; ``work`` as in ``common_work``."""
    throughput = run_throughput(record.valid_windows)
    rate: float | None = None if throughput is None or not work else getattr(throughput, f"{work}_per_s")
    if rate is None:
        return None
    if step is None or step.ci_low is None or step.ci_high is None or step.ci_low <= 0 or step.value <= 0:
        return Estimate(rate, None, None, 0 if step is None else step.num_steps, 0 if step is None else step.num_blocks)
    return Estimate(
        rate, rate * step.value / step.ci_high, rate * step.value / step.ci_low, step.num_steps, step.num_blocks,
        step.standard_error, step.degrees_of_freedom,
    )  # fmt: skip


def common_work(records: Sequence[Record]) -> str:
    """The unit of work that all runs with a workload have; tokens before samples."""
    known = [throughput for record in records if (throughput := run_throughput(record.valid_windows)) is not None]
    for work in (TOKENS, SAMPLES):
        if known and all(getattr(throughput, f"{work}_per_s") is not None for throughput in known):
            return work
    return ""


def _group_sizes(record: Record) -> dict[str, int]:
    """Ranks of the largest group of each dimension of parallelism."""
    window = record.latest("collectives")
    sizes: dict[str, int] = {}
    for row in () if window is None else window.collectives:
        if row.dimension:
            sizes[row.dimension] = max(row.group_size, sizes.get(row.dimension, 0))
    return sizes
