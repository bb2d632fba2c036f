"""Power of the ranks' devices as sums; a device that several ranks share counts once.

A device's figures are one row of numbers, so that rows of many devices are one array. Rows are kept as long as they are
few: two ranks of a host may share a device and be heard through different leaders. Of many devices, sums and extremes
are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.identities import DIGEST_BYTES, digest
from overlap_callbacks.analysis.rank_problems import too_many
from overlap_callbacks.analysis.rank_set import RankSet, union_of
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, JobModePower, JobPower, SourceInfo, UnitUtilisation

# Devices whose rows are kept: a leader has up to 64 members.
MAX_DEVICES = 64
# Sentences that are kept.
MAX_PROBLEMS = 40
# Ranks that a report names one by one.
MAX_RANKS = 64

Floats = npt.NDArray[np.float64]

_NUMBERS = (
    "avg_w", "peak_w", "p99_w", "avg_tdp_fraction", "peak_tdp_fraction", "energy_per_step_j", "sm_clock_mhz",
    "throttle_fraction", "avg_w_ci_low", "avg_w_ci_high", "energy_per_step_j_ci_low", "energy_per_step_j_ci_high",
)  # fmt: skip
_PARTS = ("sm", "sm_occupancy", "tensor", "dram", "nvlink_rx_gb_s", "nvlink_tx_gb_s")


class Said(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sentence, and the rank and place at which it first stands."""

    first: tuple[int, int]
    text: str


class PowerSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Power of the devices of some ranks. Arrays are 64-bit floats, row by row; NaN for what was not measured.

    Attributes:
        ranks: that have power.
        without: that have none.
        unread: of these, the ranks whose device no other rank reads either.
        columns: what the numbers of a device are, e.g. ``overlapped.avg_w``; C of them.
        devices: digest of the identity of each device that has a row, one after the other; n of them.
        owners: for each, the rank whose figures these are.
        measured: for each, whether it has power figures.
        rows: their numbers; shape (n, C).
        num_sums: devices of which only sums are kept.
        sums: of these devices, for each column the number of devices that have it, the sum, the least and the most;
            shape (4, C).
        problems: of the devices.
        num_more: sentences that are not kept.
        source: where the figures of the lowest rank come from.
    """

    ranks: RankSet = RankSet()
    without: RankSet = RankSet()
    unread: RankSet = RankSet()
    columns: tuple[str, ...] = ()
    devices: bytes = b""
    owners: tuple[int, ...] = ()
    measured: tuple[bool, ...] = ()
    rows: bytes = b""
    num_sums: int = 0
    sums: bytes = b""
    problems: tuple[Said, ...] = ()
    num_more: int = 0
    source: SourceInfo | None = None


def power_of(rank: int, power: Sequence[DevicePower], *, elsewhere: bool = False) -> PowerSums:
    """Power of the devices that one rank reads.

    Args:
        rank: the rank.
        power: of its devices; empty without a source.
        elsewhere: whether another rank of the node reads this one's device.
    """
    own = RankSet.of(rank)
    if not power:
        return PowerSums(without=own, unread=RankSet() if elsewhere else own)
    numbers = [_numbers(device) for device in power]
    columns = tuple(sorted(set().union(*numbers)))
    rows = np.array([[row.get(column, math.nan) for column in columns] for row in numbers], dtype=np.float64)
    texts = dict.fromkeys(text for device in power for text in (*device.problems, *_missing(device)))
    known: dict[bytes, int] = {}  # place of each device; of one that stands twice, that with figures
    measured = [any(mode.avg_w is not None for mode in device.modes) for device in power]
    for place, device in enumerate(power):
        identity = digest(device.source.device_id)
        if identity not in known or (not measured[known[identity]] and measured[place]):
            known[identity] = place
    return PowerSums(
        ranks=own,
        columns=columns,
        devices=b"".join(known),
        owners=(rank,) * len(known),
        measured=tuple([measured[place] for place in known.values()]),
        rows=rows[list(known.values())].tobytes(),
        problems=tuple([Said((rank, place), text) for place, text in enumerate(texts)][:MAX_PROBLEMS]),
        num_more=max(0, len(texts) - MAX_PROBLEMS),
        source=power[0].source,
    )


def _missing(power: DevicePower) -> list[str]:
    return [f"power of {m.mode.value} steps was not measured: {m.missing}" for m in power.modes if m.missing]


def _numbers(device: DevicePower) -> dict[str, float]:
    """What the device measured, by column; also whether it has a mode, reasons and counters at all."""
    numbers: dict[str, float] = {}
    # Else the clock of one mode would be of other devices than that of the other.
    has_clocks = all((of := device.of(mode)) is not None and of.compute_clock_mhz is not None for mode in Mode)
    for power in reversed(device.modes):  # the first of a mode counts
        name = power.mode.value
        found: dict[str, float | None] = {field: getattr(power, field) for field in _NUMBERS}
        found["present"] = 1.0
        if power.energy_method:
            found[f"method.{power.energy_method}"] = 1.0
        if has_clocks:
            found["compute_clock_mhz"] = power.compute_clock_mhz
            found["compute_clock_readings"] = power.compute_clock_readings
        if power.reasons is not None:
            found["reasons"] = 1.0
            found |= {f"reason.{word}": fraction for word, fraction in power.reasons.items()}
        if power.parts is not None:
            found["parts"] = power.parts.measured_s
            found |= {f"part.{part}": getattr(power.parts, part) for part in _PARTS}
        numbers = {column: value for column, value in numbers.items() if not column.startswith(f"{name}.")}
        numbers |= {f"{name}.{column}": float(value) for column, value in found.items() if value is not None}
    return numbers


def add_power(parts: Sequence[PowerSums]) -> PowerSums:
    """Power of the devices of all parts. If ranks share a device, the lowest that has power figures speaks for it."""
    if len(parts) == 1:
        return parts[0]
    with_columns = [part for part in parts if part.columns]
    columns = tuple(sorted(set().union(*[part.columns for part in with_columns])))
    problems: dict[str, tuple[int, int]] = {}
    for said in [said for part in parts for said in part.problems]:
        problems[said.text] = min(said.first, problems.get(said.text, said.first))
    ordered = sorted([Said(first, text) for text, first in problems.items()], key=lambda said: said.first)
    lowest = min((part for part in parts if part.source is not None), key=lambda part: part.ranks.lowest, default=None)
    common = PowerSums(
        ranks=union_of(part.ranks for part in parts),
        without=union_of(part.without for part in parts),
        unread=union_of(part.unread for part in parts),
        columns=columns,
        num_sums=sum(part.num_sums for part in parts),
        problems=tuple(ordered[:MAX_PROBLEMS]),
        num_more=sum(part.num_more for part in parts) + max(0, len(ordered) - MAX_PROBLEMS),
        source=None if lowest is None else lowest.source,
    )
    if not columns:
        return common
    summed = [part for part in with_columns if part.num_sums]
    sums = _add_sums([_aligned(_array(part.sums, 4), part.columns, columns) for part in summed], len(columns))
    devices, owners, measured, rows = _distinct(with_columns, columns)
    if len(owners) > MAX_DEVICES:
        sums, num_sums = _add_sums([sums, _sums(rows)], len(columns)), common.num_sums + len(owners)
        return msgspec.structs.replace(common, num_sums=num_sums, sums=sums.tobytes())
    return msgspec.structs.replace(
        common, devices=devices, owners=owners, measured=measured, rows=rows.tobytes(),
        sums=sums.tobytes() if common.num_sums else b"",
    )  # fmt: skip


def _distinct(
    parts: Sequence[PowerSums], columns: tuple[str, ...]
) -> tuple[bytes, tuple[int, ...], tuple[bool, ...], Floats]:
    """The rows of all parts, of each device the one that counts."""
    rows = np.concatenate([_aligned(_array(part.rows, len(part.owners)), part.columns, columns) for part in parts])
    content = b"".join([part.devices for part in parts])
    owners = [owner for part in parts for owner in part.owners]
    measured = [has for part in parts for has in part.measured]
    kept: dict[bytes, int] = {}
    for place in sorted(range(len(owners)), key=lambda place: (not measured[place], owners[place])):
        kept.setdefault(content[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES], place)
    places = list(kept.values())
    return (
        b"".join(kept), tuple([owners[place] for place in places]), tuple([measured[place] for place in places]),
        rows[places],
    )  # fmt: skip


def _array(content: bytes, rows: int) -> Floats:
    return np.frombuffer(content).reshape(rows, -1) if content else np.empty((rows, 0))


def _aligned(table: Floats, columns: tuple[str, ...], to: tuple[str, ...]) -> Floats:
    """A table with other columns; NaN in those that it lacks."""
    if columns == to:
        return table
    place = {column: number for number, column in enumerate(to)}
    aligned = np.full((len(table), len(to)), math.nan)
    if table.size:
        aligned[:, [place[column] for column in columns]] = table
    return aligned


def _sums(rows: Floats) -> Floats:
    """Of each column the number of rows that have it, the sum, the least and the most; shape (4, C)."""
    known = ~np.isnan(rows)
    return np.stack(
        [
            known.sum(axis=0, dtype=np.float64),
            np.where(known, rows, 0.0).sum(axis=0),
            np.where(known, rows, math.inf).min(axis=0, initial=math.inf),
            np.where(known, rows, -math.inf).max(axis=0, initial=-math.inf),
        ]
    )


def _add_sums(parts: Sequence[Floats], num_columns: int) -> Floats:
    total = _sums(np.empty((0, num_columns)))
    for part in parts:
        known = np.nan_to_num(part[0])  # a column that a part lacks is NaN
        total[0] += known
        total[1] += np.where(known > 0, part[1], 0.0)
        total[2] = np.fmin(total[2], np.where(known > 0, part[2], math.inf))
        total[3] = np.fmax(total[3], np.where(known > 0, part[3], -math.inf))
    return total


# -- the job's power


class _Column(NamedTuple):
    number: int
    total: float
    least: float
    most: float


def pooled_power(sums: PowerSums, *, whole: bool) -> JobPower:
    """Power over all ranks of a part.

    Args:
        sums: of the ranks.
        whole: whether these are the devices of all ranks of the job. If not, there are no sums.
    """
    num_devices = sums.num_sums + len(sums.owners)
    columns: dict[str, _Column] = {}
    if sums.columns:
        rows = _array(sums.rows, len(sums.owners))
        tables = [_sums(rows)] if rows.size else []
        table = _add_sums([*tables, *([_array(sums.sums, 4)] if sums.num_sums else [])], len(sums.columns))
        for name, (number, total, least, most) in zip(sums.columns, table.T.tolist(), strict=True):
            columns[name] = _Column(int(number), total, least, most)
    modes = []
    for mode in Mode:
        prefix = f"{mode.value}."
        of_mode = {
            name.removeprefix(prefix): column
            for name, column in columns.items()
            if column.number and name.startswith(prefix)
        }
        if of_mode:
            modes.append(_of_mode(mode, of_mode, num_devices if whole else None))
    problems = [said.text for said in sums.problems]
    if sums.num_more:
        problems.append(too_many(count(sums.num_more, "more problem")))
    return JobPower(
        num_devices=num_devices,
        ranks=sums.ranks.first(MAX_RANKS),
        without=sums.without.first(MAX_RANKS),
        modes=tuple(modes),
        problems=tuple(problems),
        source=sums.source,
        num_without=sums.without.count if sums.without.count > MAX_RANKS else msgspec.UNSET,
    )


def _of_mode(mode: Mode, columns: dict[str, _Column], num_devices: int | None) -> JobModePower:
    def total(name: str) -> float | None:
        return columns[name].total if name in columns and columns[name].number == num_devices else None

    def mean(name: str) -> float | None:
        return columns[name].total / columns[name].number if name in columns else None

    def least(name: str) -> float | None:
        return columns[name].least if name in columns else None

    def most(name: str) -> float | None:
        return columns[name].most if name in columns else None

    def mean_of_all(name: str, whose: str) -> float | None:
        """The mean, if every device that has the figure has this bound of it too."""
        return mean(name) if name in columns and columns[name].number == columns[whose].number else None

    methods = [name.removeprefix("method.") for name in columns if name.startswith("method.")]
    reasons = None
    if "reasons" in columns:
        words = sorted(name for name in columns if name.startswith("reason."))
        reasons = {word.removeprefix("reason."): columns[word].total / columns["reasons"].number for word in words}
    parts = None
    if "parts" in columns:
        parts = UnitUtilisation(**{part: mean(f"part.{part}") for part in _PARTS}, measured_s=columns["parts"].total)
    return JobModePower(
        mode=mode,
        num_devices=columns["avg_w"].number if "avg_w" in columns else 0,
        total_avg_w=total("avg_w"),
        mean_avg_w=mean("avg_w"),
        peak_w=most("peak_w"),
        energy_per_step_j=total("energy_per_step_j"),
        energy_method="mixed" if len(methods) > 1 else "".join(methods),
        avg_tdp_fraction=mean("avg_tdp_fraction"),
        sm_clock_mhz=mean("sm_clock_mhz"),
        min_sm_clock_mhz=least("sm_clock_mhz"),
        throttle_fraction=mean("throttle_fraction"),
        max_throttle_fraction=most("throttle_fraction"),
        p99_w=most("p99_w"),
        peak_tdp_fraction=most("peak_tdp_fraction"),
        reasons=reasons,
        parts=parts,
        compute_clock_mhz=mean("compute_clock_mhz"),
        compute_clock_readings=round(columns["compute_clock_readings"].total) if "compute_clock_readings" in columns
        else 0,
        mean_avg_w_ci_low=mean_of_all("avg_w_ci_low", "avg_w"),
        mean_avg_w_ci_high=mean_of_all("avg_w_ci_high", "avg_w"),
        energy_per_step_j_ci_low=total("energy_per_step_j_ci_low"),
        energy_per_step_j_ci_high=total("energy_per_step_j_ci_high"),
    )  # fmt: skip
