"""Measurements of ``overlap study``, and statistics over its configurations: means, extremes, pairs that differ in one
factor.

The configurations were chosen by the user, and are not a sample. So the interval of a mean over them is the uncertainty
of the mean of these, not a prediction for further ones. Each configuration is one run, and the runs are independent of
each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from overlap_callbacks.analysis.results.catalogue import PEAK_RISE, figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.statistics import difference, mean_of, relative_change
from overlap_callbacks.analysis.sums import grouped

# -- the lines of its result file: a ``StudyStart``, then one configuration trained once per line, so that a crash costs
# only the current one

# File name in the results folder.
FILE_NAME = "study.jsonl"
SCHEMA = 1


class Configuration(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One training job of the study.

    Attributes:
        model: name of a preset, e.g. ``gpt3-xl``.
        strategy: ``ddp``, ``fsdp2``, ``zero3``, ``tp`` or ``pp``.
        batch: sequences or images of a micro-batch on each rank.
        precision: ``fp32``, ``tf32``, ``fp16`` or ``bf16``.
        power_cap_w, clock_cap_mhz: limits of each device; None for its own.
    """

    model: str
    strategy: str
    batch: int
    precision: str
    power_cap_w: float | None = None
    clock_cap_mhz: float | None = None


class StudyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one configuration, over all its counted windows and ranks. Unmeasured values are None.

    ``values`` are by catalogue key, e.g. ``power/overlapped_avg_w``; ``num_steps`` is that of each mode.
    """

    values: dict[str, Estimate]
    num_windows: int
    num_steps: int


class StudyStart(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="line"):
    """The options of a study, and the machine it ran on.

    Attributes:
        scale: factor by which the presets' sizes are shrunk; 1 for the models as published.
        steps: measured steps of each mode.
        device: name of the ranks' device, such as ``NVIDIA H100 80GB HBM3``, or of the CPU.
        link: ``gloo``, ``nccl`` or ``loopback``.
        options: everything else that must be the same in a resumed study.
    """

    configurations: tuple[Configuration, ...]
    ranks: int
    scale: float
    steps: int
    device: str
    link: str
    versions: dict[str, str]
    started_at: str
    options: dict[str, Any] = {}
    schema: int = SCHEMA


class StudyRow(msgspec.Struct, frozen=True, kw_only=True, tag="row", tag_field="line"):
    """One configuration, trained once, and the time it took.

    Attributes:
        failure: why it failed; None if it did not, and has ``figures``.
        record: path of the job's record, relative to the folder of results.
        model: sizes of the model as trained, e.g. layers, hidden, parameters.
    """

    configuration: Configuration
    seconds: float
    figures: StudyFigures | None = None
    failure: str | None = None
    record: str | None = None
    model: dict[str, int | float | str] = {}


# -- statistics over configurations

# Keys of the study's main figures.
SLOWDOWN = figure_named("compute_slowdown").key
LONGER = figure_named("speedup_vs_sequential").key  # how much longer sequential steps take
RATIO = figure_named("overlap_ratio").key
GAP = figure_named("gap_to_ideal").key
STEP = figure_named("e2e_overlapped_ms").key
IDEAL = figure_named("e2e_ideal_ms").key
SEQUENTIAL = figure_named("e2e_sequential_ms").key
PEAK = PEAK_RISE.key


def power_key(mode: Mode, name: str) -> str:
    return f"power/{mode.value}_{name}"


POWER = power_key(Mode.OVERLAPPED, "avg_w")
ENERGY = power_key(Mode.OVERLAPPED, "energy_per_step_j")


class Published(NamedTuple):
    """Results of arXiv 2507.03114 over its own configurations, as fractions: mean (if it gives one) and largest."""

    mean: float | None
    most: float


PUBLISHED: Mapping[str, Published] = {
    SLOWDOWN: Published(0.189, 0.400),
    LONGER: Published(0.102, 0.266),
    PEAK: Published(None, 0.25),
}

# Factors of a configuration, by their fields.
BATCH, PRECISION, POWER_CAP, CLOCK_CAP = "batch", "precision", "power_cap_w", "clock_cap_mhz"
# Precisions, in order of comparison: without tensor cores first.
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
# Figures that are shares or changes: two of them are compared by their difference.
_IN_POINTS = frozenset({SLOWDOWN, LONGER, PEAK})
_COMPARED = (STEP, SLOWDOWN, LONGER, POWER, ENERGY)


@dataclass(frozen=True)
class Extreme:
    """The configuration that has the largest or smallest figure."""

    configuration: Configuration
    estimate: Estimate


@dataclass(frozen=True)
class Overall:
    """One figure over the configurations that have it. The mean has an interval if each of them has one."""

    key: str
    number: int
    mean: Estimate
    most: Extreme
    least: Extreme


@dataclass(frozen=True)
class Pair:
    """Two configurations that differ in one factor only.

    ``changes`` are from base to other, by the figure's key: the difference for figures that are changes themselves,
    otherwise the relative change, as fractions.
    """

    base: Configuration
    other: Configuration
    changes: dict[str, Estimate]


def last_rows(start: StudyStart, rows: Sequence[StudyRow]) -> list[StudyRow]:
    """One row per configuration, in the study's order: the last measured one, otherwise the last failed one.

    Rows of configurations that the study does not name come last.
    """
    kept: dict[Configuration, StudyRow] = {}
    for row in rows:
        before = kept.get(row.configuration)
        if before is None or before.figures is None or row.figures is not None:
            kept[row.configuration] = row
    order = {configuration: place for place, configuration in enumerate(start.configurations)}
    return sorted(kept.values(), key=lambda row: order.get(row.configuration, len(order)))


def value_of(row: StudyRow, key: str) -> Estimate | None:
    """A figure of a configuration; None if it was not measured or is not finite."""
    estimate = None if row.figures is None else row.figures.values.get(key)
    return estimate if estimate is not None and math.isfinite(estimate.value) else None


def overall(rows: Iterable[StudyRow], key: str) -> Overall | None:
    """A figure over all configurations that have it; None if none has."""
    known = [Extreme(row.configuration, value) for row in rows if (value := value_of(row, key)) is not None]
    if not known:
        return None
    ordered = sorted(known, key=lambda one: one.estimate.value)
    return Overall(key, len(known), mean_of([one.estimate for one in known]), ordered[-1], ordered[0])


# -- pairs


def families(rows: Iterable[StudyRow], factor: str) -> list[list[StudyRow]]:
    """Groups of at least two measured configurations that differ only in this factor (a field of ``Configuration``).

    Each begins with the one that the others are compared with: the smallest batch, the first precision of fp32, tf32,
    fp16 and bf16, a device without a cap and then with the largest.
    """

    def others(row: StudyRow) -> tuple[object, ...]:
        return tuple([value for name, value in _fields(row.configuration).items() if name != factor])

    alike = grouped([row for row in rows if row.figures is not None], others)
    found = [sorted(family, key=lambda row: _place(row.configuration, factor)) for family in alike.values()]
    return [family for family in found if len({_fields(row.configuration)[factor] for row in family}) > 1]


def pairs(rows: Iterable[StudyRow], factor: str) -> list[Pair]:
    """The first of each group with each of the others."""
    return [pair_of(family[0], other) for family in families(rows, factor) for other in family[1:]]


def pair_of(base: StudyRow, other: StudyRow) -> Pair:
    changes = {}
    for key in _COMPARED:
        one, two = value_of(base, key), value_of(other, key)
        if one is not None and two is not None:
            change = difference(one, two) if key in _IN_POINTS else relative_change(one, two)
            if change is not None:
                changes[key] = change
    return Pair(base.configuration, other.configuration, changes)


def _fields(configuration: Configuration) -> dict[str, object]:
    return msgspec.structs.asdict(configuration)


def _place(configuration: Configuration, factor: str) -> tuple[float, str]:
    value = _fields(configuration)[factor]
    if factor == PRECISION:
        place = _PRECISIONS.index(str(value)) if value in _PRECISIONS else len(_PRECISIONS)
        return place, str(value)
    if value is None:
        return -math.inf, ""
    if isinstance(value, (int, float)):
        return (-value if factor in (POWER_CAP, CLOCK_CAP) else value), ""
    return 0.0, str(value)
