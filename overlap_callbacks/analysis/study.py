"""What ``overlap study`` measures, and its configurations together: means, extremes, pairs that differ in one factor.

The configurations are those that somebody chose, and not a sample of more. So the interval of a mean over them says how
well the mean of these is known, and not what further ones would give. Each configuration is one run, and the runs are
independent of each other.
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

# -- the lines of its result file: a ``StudyStart``, then a configuration that was trained once in each, so that a crash
# costs the one that was under way, and no more

# Name of the file in the folder of results.
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
    """Figures of one configuration, over all its counted windows and ranks. What was not measured is None.

    ``values`` are by the keys of the catalogue, e.g. ``power/overlapped_avg_w``; ``num_steps`` is that of each mode.
    """

    values: dict[str, Estimate]
    num_windows: int
    num_steps: int


class StudyStart(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="line"):
    """What a study was asked for, and where it ran.

    Attributes:
        scale: by which the presets' sizes are shrunk; 1 for the models as published.
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
    """One configuration, trained once, with the time that this took.

    Attributes:
        failure: why it failed, in a line; None where it did not, and has ``figures``.
        record: path of the job's record, relative to the folder of results.
        model: sizes of the model as trained, e.g. layers, hidden, parameters.
    """

    configuration: Configuration
    seconds: float
    figures: StudyFigures | None = None
    failure: str | None = None
    record: str | None = None
    model: dict[str, int | float | str] = {}


# -- configurations together

# Keys of the figures that a study is about.
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
    """What arXiv 2507.03114 found over its own configurations, as fractions: mean (if it gives one) and largest."""

    mean: float | None
    most: float


PUBLISHED: Mapping[str, Published] = {
    SLOWDOWN: Published(0.189, 0.400),
    LONGER: Published(0.102, 0.266),
    PEAK: Published(None, 0.25),
}

# Factors of a configuration, by their fields.
BATCH, PRECISION, POWER_CAP, CLOCK_CAP = "batch", "precision", "power_cap_w", "clock_cap_mhz"
# Precisions from the one that is compared with: without tensor cores first.
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
# Figures that are shares or changes themselves: of two such, the difference is what changes.
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

    ``changes`` are from base to other, by the key of the figure: of figures that are changes themselves the difference,
    of all others the relative change, as fractions.
    """

    base: Configuration
    other: Configuration
    changes: dict[str, Estimate]


def last_rows(start: StudyStart, rows: Sequence[StudyRow]) -> list[StudyRow]:
    """One row of each configuration, in the order of the study: the last that was measured, else the last that failed.

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
    """A figure of a configuration; None where it was not measured or is not finite."""
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
    """Measured configurations that differ in this factor (a field of ``Configuration``) only, two or more of each kind.

    Each begins with the one that the others are compared with: the smallest batch, the first precision of fp32, tf32,
    fp16 and bf16, a device without a cap and then with the largest.
    """

    def others(row: StudyRow) -> tuple[object, ...]:
        return tuple([value for name, value in _fields(row.configuration).items() if name != factor])

    alike = grouped([row for row in rows if row.figures is not None], others)
    found = [sorted(family, key=lambda row: _place(row.configuration, factor)) for family in alike.values()]
    return [family for family in found if len({_fields(row.configuration)[factor] for row in family}) > 1]


def pairs(rows: Iterable[StudyRow], factor: str) -> list[Pair]:
    """The first of each family against each of the others."""
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
