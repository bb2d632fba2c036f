"""The reference: tables, problems and power from all samples at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from overlap_callbacks.analysis.formatting import count, name_ranks
from overlap_callbacks.analysis.results.kernel_times import KernelTime, PairTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, JobModePower, JobPower, ModePower, UnitUtilisation
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime, RankWindow

_Row = TypeVar("_Row")
_Key = TypeVar("_Key", bound=Hashable)


def mean_kernels(windows: Sequence[RankWindow]) -> tuple[KernelTime, ...]:
    """Means over the ranks that have kernels; those that lose most time first."""
    means = mean_by(
        (kernel for window in windows for kernel in window.kernels),
        key=lambda kernel: (kernel.name, kernel.communication),
        fields=("overlapped_calls", "sequential_calls", "overlapped_ms", "sequential_ms"),
        count=sum(bool(window.kernels) for window in windows),
    )
    num_blocks: dict[tuple[str, bool], int] = {}
    for kernel in (kernel for window in windows for kernel in window.kernels):
        key = kernel.name, kernel.communication
        num_blocks[key] = max(num_blocks.get(key, 0), kernel.num_blocks)
    kernels = (KernelTime(*key, **values, num_blocks=num_blocks[key]) for key, values in means.items())
    return tuple(sorted(kernels, key=lambda kernel: -kernel.lost_ms))


def mean_pairs(
    windows: Sequence[RankWindow], pairs_of: Callable[[RankWindow], Sequence[PairTime]]
) -> tuple[PairTime, ...]:
    """Means over the ranks that have such pairs; those that lose most time first."""
    means = mean_by(
        (pair for window in windows for pair in pairs_of(window)),
        key=lambda pair: (pair.kernel_family, pair.communication, pair.concurrent_with),
        fields=("calls", "concurrent_ms", "time_ms", "alone_ms"),
        count=sum(bool(pairs_of(window)) for window in windows),
    )
    pairs = (PairTime(*key, **values) for key, values in means.items())
    return tuple(sorted(pairs, key=lambda pair: (-pair.lost_ms, -pair.time_ms)))


def mean_dimensions(windows: Sequence[RankWindow]) -> tuple[DimensionTime, ...]:
    """Each dimension's mean over the ranks that have it: in a pipeline of data-parallel stages, not all have all."""
    means = mean_by(
        (row for window in windows for row in window.dimensions),
        key=lambda row: row.dimension,
        fields=("messages", "bytes_in", "comm_ms", "exposed_ms", "kernels_ms", "kernels_isolated_ms"),
    )
    times = (
        DimensionTime(
            dimension=dimension,
            **{**values, "messages": round(values["messages"]), "bytes_in": round(values["bytes_in"])},
        )
        for dimension, values in means.items()
    )
    return tuple(sorted(times, key=lambda row: -row.comm_ms))


# Ranks that timed the same part of a collective differ by less.
_SAME_BYTES = 0.01


def with_transfers(collectives: Sequence[CollectiveTime], windows: Sequence[RankWindow]) -> tuple[CollectiveTime, ...]:
    """The collectives of one rank, each with the time of its transfer: the least over the ranks of its group.

    A rank that comes early waits for the last one within the collective; the last one does not wait. Over the
    collectives of a step another rank may be the last each time, so the result is an upper bound.

    Args:
        collectives: of one rank.
        windows: of all ranks.
    """
    by_key: dict[tuple[str, str], list[CollectiveTime]] = {}
    for window in windows:
        for row in window.collectives:
            by_key.setdefault((row.operator, row.group), []).append(row)
    return tuple(
        [
            msgspec.structs.replace(
                row, first_rank=msgspec.UNSET, transfer_ms=_transfer_ms(row, by_key.get((row.operator, row.group), []))
            )
            for row in collectives
        ]
    )


def _transfer_ms(row: CollectiveTime, ranks: Sequence[CollectiveTime]) -> float | None:
    if row.kernels_ms is not None:
        return min(
            (other.kernels_ms for other in ranks if other.kernels_ms and _alike(other.size_bytes, row.size_bytes)),
            default=None,
        )
    if row.isolated_ms is None or row.timed_bytes is None:
        return None
    size = row.timed_bytes
    times = [
        other.isolated_ms
        for other in ranks
        if other.isolated_ms is not None and other.timed_bytes is not None and _alike(other.timed_bytes, size)
    ]
    return min(times, default=None)


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_BYTES * max(one, other)


def mean_by(
    rows: Iterable[_Row], key: Callable[[_Row], _Key], fields: Sequence[str], count: int | None = None
) -> dict[_Key, dict[str, Any]]:
    """Means of some fields over all rows that have the same key.

    Args:
        rows: the rows of all ranks.
        key: identifies rows that belong together.
        fields: names of the fields, all of them numbers.
        count: what each sum is divided by: ranks, also those that lack the row. None for the number of rows of the key.

    Returns:
        The means by key and field, in the order in which the keys first appear.
    """
    by_key: dict[_Key, list[_Row]] = {}
    for row in rows:
        by_key.setdefault(key(row), []).append(row)
    return {
        value: {
            field: sum(float(getattr(row, field)) for row in of_key) / (len(of_key) if count is None else count)
            for field in fields
        }
        for value, of_key in by_key.items()
    }


# Sentences that a report keeps. The record has those of every rank.
MAX_PROBLEMS = 30

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def by_rank(samples: Sequence[RankWindow], problems_of: Callable[[RankWindow], Sequence[str]]) -> list[str]:
    """The ranks' problems, each once, and the ranks that have it unless all do.

    Problems of several ranks that differ in their numbers alone are one: that with the largest first number, else the
    second, and so on; of equal ones that of the lowest rank. The problems of one rank are never merged with each other.
    """
    # The same problem is the first with its words on each rank, or the second, and so on.
    alike: dict[tuple[str, int], dict[int, str]] = {}
    for sample in samples:
        problems = list(dict.fromkeys(problems_of(sample)))
        number_of = {text: (_NUMBER.sub("#", text), place) for text, place in _places(problems)}
        for problem in problems:
            alike.setdefault(number_of[problem], {})[sample.rank] = problem
    return list(dict.fromkeys(_merged(problem_of, len(samples)) for problem_of in alike.values()))


def _places(problems: Sequence[str]) -> list[tuple[str, int]]:
    """The place of each problem of a rank among those that differ from it in numbers alone, the largest first."""
    seen: dict[str, int] = {}
    places = []
    for problem in sorted(problems, key=_numbers, reverse=True):
        words = _NUMBER.sub("#", problem)
        places.append((problem, seen.get(words, 0)))
        seen[words] = seen.get(words, 0) + 1
    return places


def _merged(problem_of: dict[int, str], num_ranks: int) -> str:
    """One sentence for like problems of several ranks."""
    shown = max(problem_of.values(), key=_numbers)  # the first of equal ones
    ranks = [rank for rank, problem in problem_of.items() if problem == shown]
    if len(ranks) == num_ranks:
        return shown
    others = len(problem_of) - len(ranks)
    more = f" (and like ones on {count(others, 'more rank')})" if others else ""
    return f"{name_ranks(ranks)}: {shown}{more}"


def _numbers(text: str) -> tuple[float, ...]:
    """The numbers of a text, in order."""
    return tuple([_value(found) for found in _NUMBER.findall(text)])


def _value(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0  # a version or an address


def pool(by_rank: Mapping[int, Sequence[DevicePower]], *, whole: bool = True) -> JobPower:
    """Power over all ranks. If ranks share a device, the figures of the lowest rank that has power figures count.

    Args:
        by_rank: power of each rank's devices; empty for a rank without a source.
        whole: whether these are the devices of all ranks of the job. If not, there are no sums.
    """
    with_power = {rank: of_rank for rank, of_rank in sorted(by_rank.items()) if of_rank}
    all_power = [power for of_rank in with_power.values() for power in of_rank]
    devices: dict[str, DevicePower] = {}
    for power in all_power:
        known = devices.get(power.source.device_id)
        if known is None or (not _measured(known) and _measured(power)):
            devices[power.source.device_id] = power
    modes = []
    for mode in Mode:
        of_mode = [in_mode for power in devices.values() if (in_mode := power.of(mode)) is not None]
        if of_mode:
            pooled = _pool_mode(mode, of_mode, all_devices=len(devices) if whole else None)
            modes.append(_with_compute_clock(pooled, devices.values()))
    problems = dict.fromkeys(problem for power in all_power for problem in (*power.problems, *_missing(power)))
    return JobPower(
        num_devices=len(devices),
        ranks=tuple(with_power),
        without=tuple([rank for rank in sorted(by_rank) if not by_rank[rank]]),
        modes=tuple(modes),
        problems=tuple(problems),
        source=all_power[0].source if all_power else None,
    )


def _missing(power: DevicePower) -> list[str]:
    return [f"power of {m.mode.value} steps was not measured: {m.missing} [OC413]" for m in power.modes if m.missing]


def _measured(power: DevicePower) -> bool:
    return any(mode.avg_w is not None for mode in power.modes)


def _pool_mode(mode: Mode, devices: list[ModePower], all_devices: int | None) -> JobModePower:
    def column(value: Callable[[ModePower], float | None]) -> list[float]:
        return [known for device in devices if (known := value(device)) is not None]

    def total(values: list[float]) -> float | None:
        return sum(values) if values and len(values) == all_devices else None

    avg_w, energies_j = column(lambda d: d.avg_w), column(lambda d: d.energy_per_step_j)
    clocks, throttled = column(lambda d: d.sm_clock_mhz), column(lambda d: d.throttle_fraction)
    methods = {device.energy_method for device in devices if device.energy_method}
    return JobModePower(
        mode=mode,
        num_devices=len(avg_w),
        total_avg_w=total(avg_w),
        mean_avg_w=_mean(avg_w),
        peak_w=max(column(lambda d: d.peak_w), default=None),
        energy_per_step_j=total(energies_j),
        energy_method="mixed" if len(methods) > 1 else "".join(methods),
        avg_tdp_fraction=_mean(column(lambda d: d.avg_tdp_fraction)),
        sm_clock_mhz=_mean(clocks),
        min_sm_clock_mhz=min(clocks, default=None),
        throttle_fraction=_mean(throttled),
        max_throttle_fraction=max(throttled, default=None),
        p99_w=max(column(lambda d: d.p99_w), default=None),
        peak_tdp_fraction=max(column(lambda d: d.peak_tdp_fraction), default=None),
        reasons=_mean_reasons([device.reasons for device in devices if device.reasons is not None]),
        parts=_mean_parts([device.parts for device in devices if device.parts is not None]),
        mean_avg_w_ci_low=_mean_of_all(column(lambda d: d.avg_w_ci_low), avg_w),
        mean_avg_w_ci_high=_mean_of_all(column(lambda d: d.avg_w_ci_high), avg_w),
        energy_per_step_j_ci_low=total(column(lambda d: d.energy_per_step_j_ci_low)),
        energy_per_step_j_ci_high=total(column(lambda d: d.energy_per_step_j_ci_high)),
    )


def _mean_of_all(bounds: list[float], of: list[float]) -> float | None:
    return _mean(bounds) if len(bounds) == len(of) else None


def _with_compute_clock(pooled: JobModePower, devices: Iterable[DevicePower]) -> JobModePower:
    """With the mean over the devices that have it in both modes: else one mode's would be of other devices."""
    in_both = [
        of_mode
        for device in devices
        if (of_mode := device.of(pooled.mode)) is not None
        and all((of := device.of(mode)) is not None and of.compute_clock_mhz is not None for mode in Mode)
    ]
    return msgspec.structs.replace(
        pooled,
        compute_clock_mhz=_mean([of.compute_clock_mhz for of in in_both if of.compute_clock_mhz is not None]),
        compute_clock_readings=sum(of.compute_clock_readings for of in in_both),
    )


def _mean_reasons(devices: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """Mean over devices of the fraction of time for each reason."""
    if not devices:
        return None
    words = sorted({word for reasons in devices for word in reasons})
    return {word: sum(reasons.get(word, 0.0) for reasons in devices) / len(devices) for word in words}


def _mean_parts(devices: Sequence[UnitUtilisation]) -> UnitUtilisation | None:
    """Means over the devices that have each counter."""
    if not devices:
        return None
    names = [name for name in UnitUtilisation.__struct_fields__ if name != "measured_s"]
    means = {name: _mean([v for parts in devices if (v := getattr(parts, name)) is not None]) for name in names}
    return UnitUtilisation(measured_s=sum(parts.measured_s for parts in devices), **means)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
