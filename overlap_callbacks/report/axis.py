"""Several records against what varies between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from overlap_callbacks.analysis.communication.bandwidths import effective_bandwidths
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.analysis.results.step_parts import exposed_share
from overlap_callbacks.analysis.scaling import WORLD_SIZE, RunFigures, Value, in_order, is_numeric, scaled
from overlap_callbacks.analysis.throughput import run_throughput
from overlap_callbacks.report.environment_words import environment_of, job_environment_of
from overlap_callbacks.report.record import Record

_GB = 1e9
# What a record tells of every run.
_FACTS = ("world_size", "hosts", "backend", "device", "framework", "torch")
_WORK = ("tokens_per_step", "samples_per_step", "precision", "model")
TOKENS, SAMPLES = "tokens", "samples"


class AxisError(ValueError):
    """Why runs cannot be shown against an axis."""


class Comparison(NamedTuple):
    """Runs against an axis.

    Attributes:
        axis: name of what varies.
        runs: those that tell it, in its order.
        work: what ``work_per_s`` counts, ``tokens`` or ``samples``; empty if it is not known of all runs.
        without: names of the runs that do not tell.
    """

    axis: str
    runs: tuple[RunFigures, ...]
    work: str
    without: tuple[str, ...]

    @property
    def numeric(self) -> bool:
        """Whether the axis is one of numbers."""
        return is_numeric(self.runs)


def compared(names: Sequence[str], records: Sequence[Record], axis: str | None) -> Comparison | None:
    """The runs against an axis.

    Args:
        names: of the runs.
        records: of the runs.
        axis: what varies; None for the world size, if it does.

    Returns:
        None where no axis was asked for and all runs have as many ranks, or there is one alone.

    Raises:
        AxisError: no run tells what was asked for.
    """
    values = [axis_value(record, axis or WORLD_SIZE) for record in records]
    told = [value for value in values if value is not None]
    if axis is None and len(set(told)) < 2:
        return None
    if not told:
        raise AxisError(
            f"axis must be something that the runs tell: {', '.join(known_axes(records))}, or an environment variable "
            f"of their records; got {axis!r}"
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
    """Where a run stands on an axis; None if it does not tell."""
    run = record.runs[-1]
    work = run.workload or Workload()
    if axis in work.settings:
        value = work.settings[axis]
        return str(value) if isinstance(value, bool) else value
    if axis == "world_size":
        return run.world_size
    if axis == "hosts":
        job = job_environment_of(record)
        return None if job is None else job.num_hosts
    if axis in ("backend", "device", "framework"):
        text: str = getattr(run, axis)
        return text or None
    if axis == "torch":
        return run.torch_version or None
    if axis == "model":
        return work.model_preset or work.model_parameters
    if axis in _WORK:
        known: Value | None = getattr(work, axis)
        return known if known is not None or axis != "tokens_per_step" else _tokens_of_windows(record)
    size = _group_sizes(record).get(axis)
    if size is not None:
        return size
    if axis in run.configuration:
        told = run.configuration[axis]
        return str(told) if isinstance(told, bool) else told
    own = environment_of(record)
    return None if own is None else own.variables.get(axis)


def known_axes(records: Sequence[Record]) -> list[str]:
    """The axes that there are for these runs, without environment variables."""
    settings = {name for record in records for name in (record.runs[-1].workload or Workload()).settings}
    settings |= {name for record in records for name in record.runs[-1].configuration}
    dimensions = {name for record in records for name in _group_sizes(record)}
    return [*dict.fromkeys([*_FACTS, *_WORK, *sorted(dimensions), *sorted(settings)])]


def as_plain(found: Comparison) -> dict[str, Any]:
    """For programs."""
    relative = scaled(found.runs)
    rows = []
    for run in found.runs:
        row = run._asdict() | {"bandwidths_gb_s": dict(run.bandwidths), "run": run.name}
        del row["bandwidths"], row["name"]
        if run.name in relative:
            row |= {
                "scaling_factor": relative[run.name].factor,
                "scaling_efficiency": relative[run.name].efficiency,
            }
        rows.append(row)
    return {"axis": found.axis, "work": found.work or None, "runs": rows, "without": list(found.without)}


def run_figures(name: str, record: Record, value: Value, work: str) -> RunFigures:
    """What a run shows against others.

    Args:
        name: of the run.
        record: of the run.
        value: where it stands on the axis.
        work: what ``work_per_s`` counts: see ``common_work``.
    """
    figures = record.pooled()
    throughput = run_throughput(record.valid_windows)
    step, exposed = figures.get("e2e_overlapped_ms"), exposed_share(figures)
    rate = None if throughput is None or not work else getattr(throughput, f"{work}_per_s")
    window = record.latest_valid("collectives")
    bandwidths = {} if window is None else effective_bandwidths(window.collectives)
    return RunFigures(
        name=name,
        value=value,
        ranks=record.runs[-1].world_size,
        step_ms=step,
        work_per_s=None if rate is None else _rate(rate, step),
        comm_ratio=figures.get("comm_ratio"),
        exposed=None if exposed is None else exposed.value,
        mfu=None if throughput is None else throughput.mfu,
        bandwidths={dimension or "other": rate / _GB for dimension, rate in sorted(bandwidths.items())},
    )


def _rate(rate: float, step: Estimate | None) -> Estimate:
    """Work a second, with the interval of the step's time turned round."""
    if step is None or step.ci_low is None or step.ci_high is None or step.ci_low <= 0 or step.value <= 0:
        return Estimate(rate, None, None, 0 if step is None else step.num_steps, 0 if step is None else step.num_blocks)
    return Estimate(
        rate, rate * step.value / step.ci_high, rate * step.value / step.ci_low, step.num_steps, step.num_blocks
    )


def common_work(records: Sequence[Record]) -> str:
    """What all runs count that count anything; tokens before samples."""
    known = [throughput for record in records if (throughput := run_throughput(record.valid_windows)) is not None]
    for work in (TOKENS, SAMPLES):
        if known and all(getattr(throughput, f"{work}_per_s") is not None for throughput in known):
            return work
    return ""


def _tokens_of_windows(record: Record) -> int | None:
    """An adapter may know the tokens of a step, and tells them with each window."""
    return next((w.tokens_per_step for w in reversed(record.valid_windows) if w.tokens_per_step is not None), None)


def _group_sizes(record: Record) -> dict[str, int]:
    """Ranks of the largest group of each dimension of parallelism."""
    window = record.latest("collectives")
    sizes: dict[str, int] = {}
    for row in () if window is None else window.collectives:
        if row.dimension:
            sizes[row.dimension] = max(row.group_size, sizes.get(row.dimension, 0))
    return sizes
