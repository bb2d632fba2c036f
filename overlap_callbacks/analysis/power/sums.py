"""Power of the ranks' devices as sums; a device shared by several ranks counts once.

A few devices are kept one by one, because ranks that share one may report through different leaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import asdict, replace

from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.rank_problems import Sentences, add_sentences, sentences_of, too_many
from overlap_callbacks.analysis.rank_set import RankSet, union
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import (
    REASONS,
    DevicePower,
    JobModePower,
    JobPower,
    SourceInfo,
    UnitUtilisation,
)
from overlap_callbacks.analysis.sums import (
    Aggregate,
    Floats,
    add_aggregates,
    digest,
    in_a_row,
    of_lowest,
    struct_sum,
    table_sum,
)

# Maximum devices kept one by one: a leader has up to 64 members.
MAX_DEVICES = 64
# Maximum ranks that a report names one by one.
MAX_RANKS = 64

_PARTS = tuple([name for name in UnitUtilisation.__struct_fields__ if name != "measured_s"])
_METHODS = ("counter", "samples", "held samples")
# The numbers of a device in a mode. NaN if not measured, including whether there are reasons and the like.
_NUMBERS = (
    "avg_w", "peak_w", "p99_w", "avg_tdp_fraction", "peak_tdp_fraction", "energy_per_step_j", "sm_clock_mhz",
    "throttle_fraction", "avg_w_ci_low", "avg_w_ci_high", "energy_per_step_j_ci_low", "energy_per_step_j_ci_high",
)  # fmt: skip
_COLUMNS = (
    "present", *_NUMBERS, *_METHODS, "compute_clock_mhz", "compute_clock_readings", "has_reasons", *REASONS, *_PARTS,
    "measured_s",
)  # fmt: skip


def _best_known(of_ranks: Sequence[tuple[bool, int, Floats]]) -> tuple[bool, int, Floats]:
    return min(of_ranks, key=lambda known: known[:2])


class Device(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the ranks that share a device know about it.

    ``known``: whether it lacks power figures, the rank whose figures these are, and the numbers of ``_COLUMNS`` in each
    mode, from the lowest rank with power figures.
    """

    identity: bytes
    known: Annotated[tuple[bool, int, Floats], _best_known]

    def __post_init__(self) -> None:
        if self.known[2].size != len(Mode) * len(_COLUMNS):
            raise ValueError("the numbers of a device are not those of power")


class PowerSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Power of the devices of some ranks.

    Attributes:
        ranks: ranks that have power.
        without: ranks that have none.
        unread: ranks among these whose device no other rank reads.
        devices: the devices kept one by one.
        num_others, others: the other devices, and sums over them.
        problems: of the devices.
        source: the lowest rank that has power, and the source of its figures.
    """

    ranks: Annotated[RankSet, union] = RankSet()
    without: Annotated[RankSet, union] = RankSet()
    unread: Annotated[RankSet, union] = RankSet()
    devices: Annotated[tuple[Device, ...], _devices] = ()
    num_others: int = 0
    others: Annotated[tuple[Aggregate, ...], in_a_row] = ()
    problems: Annotated[Sentences, add_sentences] = Sentences()
    source: Annotated[tuple[int, SourceInfo] | None, of_lowest] = None

    def __post_init__(self) -> None:
        if any(of_all.rows.size != 7 * len(Mode) * len(_COLUMNS) for of_all in self.others):
            raise ValueError("the sums over devices are not those of power")


_devices = table_sum(Device, 1)
_add = struct_sum(PowerSums)


def power_of(rank: int, power: Sequence[DevicePower], *, elsewhere: bool = False) -> PowerSums:
    """Power of the devices that one rank reads, if any; ``elsewhere``: another rank reads this one's device."""
    own = RankSet.of((rank, rank))
    if not power:
        return PowerSums(without=own, unread=RankSet() if elsewhere else own)
    devices = [
        Device(
            digest(device.source.device_id),
            (all(mode.avg_w is None for mode in device.modes), rank, _numbers(device)),
        )
        for device in power
    ]
    texts = [text for device in power for text in (*device.problems, *_missing(device))]
    return PowerSums(
        ranks=own,
        devices=_devices([devices]),
        problems=sentences_of(rank, texts, by_words=False),
        source=(rank, power[0].source),
    )


def _missing(power: DevicePower) -> list[str]:
    missing = [f"power of {m.mode.value} steps was not measured: {m.missing} [OC413]" for m in power.modes if m.missing]
    unknown = sorted({word for mode in power.modes for word in mode.reasons or ()} - REASONS.keys())
    if unknown:
        missing.append(f"the job's power leaves out reasons that are not known: {', '.join(unknown)} [OC414]")
    return missing


def _numbers(device: DevicePower) -> Floats:
    """The device's measurements; shape (modes times columns,)."""
    # Otherwise the modes' clocks would be of different devices.
    has_clocks = all((of := device.of(mode)) is not None and of.compute_clock_mhz is not None for mode in Mode)
    rows = []
    for mode in Mode:
        power = device.of(mode)
        found: dict[str, float | None] = {}
        if power is not None:
            found = {"present": 1.0, power.energy_method: 1.0, **{name: getattr(power, name) for name in _NUMBERS}}
            if has_clocks:
                found["compute_clock_mhz"] = power.compute_clock_mhz
                found["compute_clock_readings"] = power.compute_clock_readings
            if power.reasons is not None:
                found |= {"has_reasons": 1.0, **power.reasons}
            if power.parts is not None:
                found |= asdict(power.parts)
        rows.append([found.get(column) for column in _COLUMNS])
    return np.array(rows, dtype=np.float64).ravel()


def add_power(parts: Sequence[PowerSums]) -> PowerSums:
    """Power of the devices of all parts. If ranks share a device, the lowest with power figures counts."""
    added = _add(parts)
    if len(added.devices) > MAX_DEVICES:
        return replace(added, devices=(), num_others=_num_devices(added), others=tuple(_summed(added)))
    return replace(added, others=added.others and (add_aggregates(added.others),))


def _num_devices(sums: PowerSums) -> int:
    return sums.num_others + len(sums.devices)


def _summed(sums: PowerSums) -> list[Aggregate]:
    """Totals over all devices; empty if there are none."""
    aggregates = list(sums.others)
    if sums.devices:
        _, owners, numbers = zip(*[device.known for device in sums.devices], strict=True)
        aggregates.append(Aggregate.of(owners, np.stack(numbers)))
    return [add_aggregates(aggregates)] if aggregates else []


# -- the job's power


class _Column(NamedTuple):
    """One quantity over the devices that have it."""

    number: int = 0
    total: float | None = None
    mean: float | None = None
    least: float | None = None
    most: float | None = None

    def of_all(self, num_devices: int | None) -> float | None:
        """The sum, if all devices have it."""
        return self.total if self.number == num_devices else None


def pooled_power(sums: PowerSums, *, whole: bool) -> JobPower:
    """Power over all ranks of a part. Unless ``whole`` (all ranks of the job), there are no sums over devices."""
    num_devices = _num_devices(sums)
    columns = [
        _Column(int(number), total, total / number, low, high) if number else _Column()
        for of_all in _summed(sums)
        for number, total, _, low, _, high, _ in of_all.columns
    ]
    of_modes = [dict(zip(_COLUMNS, columns[at * len(_COLUMNS) :], strict=False)) for at, _ in enumerate(Mode)]
    modes = [
        _of_mode(mode, of_mode, num_devices if whole else None)
        for mode, of_mode in zip(Mode, of_modes, strict=True)
        if any(column.number for column in of_mode.values())
    ]
    problems = [row.text for row in sums.problems.rows]
    if sums.problems.num_more:
        problems.append(too_many(count(sums.problems.num_more, "more problem")))
    return JobPower(
        num_devices=num_devices,
        ranks=sums.ranks.first(MAX_RANKS),
        without=sums.without.first(MAX_RANKS),
        modes=tuple(modes),
        problems=tuple(problems),
        source=None if sums.source is None else sums.source[1],
        num_without=sums.without.count if sums.without.count > MAX_RANKS else msgspec.UNSET,
    )


def _of_mode(mode: Mode, of: dict[str, _Column], num_devices: int | None) -> JobModePower:
    def mean_of_all(name: str) -> float | None:
        """The mean, if every device with mean power also has this bound of it."""
        return of[name].mean if of[name].number == of["avg_w"].number else None

    methods = [name for name in _METHODS if of[name].number]
    reasons, parts = None, None
    if of["has_reasons"].number:
        sums = {word: of[word].total for word in sorted(REASONS)}
        reasons = {word: total / of["has_reasons"].number for word, total in sums.items() if total is not None}
    if of["measured_s"].total is not None:
        parts = UnitUtilisation(**{part: of[part].mean for part in _PARTS}, measured_s=of["measured_s"].total)
    return JobModePower(
        mode=mode,
        num_devices=of["avg_w"].number,
        total_avg_w=of["avg_w"].of_all(num_devices),
        mean_avg_w=of["avg_w"].mean,
        peak_w=of["peak_w"].most,
        energy_per_step_j=of["energy_per_step_j"].of_all(num_devices),
        energy_method="mixed" if len(methods) > 1 else "".join(methods),
        avg_tdp_fraction=of["avg_tdp_fraction"].mean,
        sm_clock_mhz=of["sm_clock_mhz"].mean,
        min_sm_clock_mhz=of["sm_clock_mhz"].least,
        throttle_fraction=of["throttle_fraction"].mean,
        max_throttle_fraction=of["throttle_fraction"].most,
        p99_w=of["p99_w"].most,
        peak_tdp_fraction=of["peak_tdp_fraction"].most,
        reasons=reasons,
        parts=parts,
        compute_clock_mhz=of["compute_clock_mhz"].mean,
        compute_clock_readings=round(of["compute_clock_readings"].total or 0),
        mean_avg_w_ci_low=mean_of_all("avg_w_ci_low"),
        mean_avg_w_ci_high=mean_of_all("avg_w_ci_high"),
        energy_per_step_j_ci_low=of["energy_per_step_j_ci_low"].of_all(num_devices),
        energy_per_step_j_ci_high=of["energy_per_step_j_ci_high"].of_all(num_devices),
    )
