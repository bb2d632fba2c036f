"""The collectives of a window on this rank: times by operator and group, messages, single calls, and split sizes.

Runs on the reporting thread while training goes on, and releases the GIL after each step: a step may have
thousands of collectives.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.equations import size_of
from overlap_callbacks.analysis.experts import AllToAll, rank_experts
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.by_collective import CollectiveKey
from overlap_callbacks.analysis.kernels.issued import runs_on_host
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.arrivals import TimedCall, TimedCalls
from overlap_callbacks.analysis.results.experts import RankExperts
from overlap_callbacks.analysis.results.messages import NO_STAGE, RankMessages, RankRow
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.analysis.sums import grouped
from overlap_callbacks.gate.collectives import RECEIVES, Collective
from overlap_callbacks.gate.delays import CallKey
from overlap_callbacks.gate.names import names_of
from overlap_callbacks.gate.serialiser import MAX_TIMED, NotSerialised
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import clocks
from overlap_callbacks.monitor.schedule import Part
from overlap_callbacks.monitor.window import MeasuredStep, SampledStep

# How long to leave the GIL to the training thread after each step.
_PAUSE_S = 0.0005
# Collectives in which all ranks wait for the last one.
_SYNCHRONISE = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})
# Limits on the single calls that are sent: steps, calls of each kind (operator and group) in a step, and kinds.
_MAX_STEPS, _MAX_CALLS_A_STEP, _MAX_KINDS = 8, 4, 32
# Steps compared with the recorded one, and steps whose all-to-alls are examined.
_MAX_COMPARED, _MAX_EXPERT_STEPS = 64, 16
# A smaller share of a step's bytes does not matter, e.g. a heartbeat of a few bytes between pipeline stages.
_NEGLIGIBLE = 0.01

T = TypeVar("T")


def _with_pauses(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, pausing after each to release the GIL."""
    for item in items:
        yield item
        time.sleep(_PAUSE_S)


def _evenly_spaced(items: Sequence[T], max_items: int) -> Sequence[T]:
    """At most ``max_items`` of the items."""
    return items[:: max(1, -(-len(items) // max_items))]


def _size_of(call: Collective) -> int:
    return max(call.bytes_in, call.bytes_out)


def _time_ms(call: Collective) -> float | None:
    """Time from issue to end; None if the call was not serialised."""
    return None if call.start is None or call.end is None else clocks.elapsed_ms(call.start, call.end)


# -- times, by operator and group


def collective_times(
    recorded: StepLog | None, timed: Sequence[StepLog], kernels_ms: Mapping[CollectiveKey, float]
) -> tuple[CollectiveTime, ...]:
    """Time per step of each operator on each group that occurs in the recorded step, which ran without a profiler.

    ``timed``: the counted sequential steps that the device has passed. Only serialised collectives have a time, and
    only their bytes may be divided by it. ``kernels_ms``: kernel time per sequential step, where known.
    """
    if recorded is None:
        return ()
    sums: dict[CollectiveKey, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # ms, bytes in, bytes out
    for log in _with_pauses(timed):
        marked = [call for call in log.collectives if call.end is not None]
        # If there were more calls than could be timed, those left out count like the timed ones.
        every = Counter([call.key for call in log.collectives]) if len(marked) >= MAX_TIMED else None
        for key, calls in grouped(marked, lambda call: call.key).items():
            weight = (1.0 if every is None else every[key] / len(calls)) / len(timed)
            sums[key][0] += weight * sum([_time_ms(call) or 0.0 for call in calls])
            sums[key][1] += weight * sum([call.bytes_in for call in calls])
            sums[key][2] += weight * sum([call.bytes_out for call in calls])
    found = []
    for key, calls in grouped(recorded.collectives, lambda call: call.key).items():
        group, of_key = calls[0].group, sums.get(key)
        found.append(
            CollectiveTime(
                operator=key[0],
                group=group.label,
                group_size=group.num_ranks,
                backend=group.backend,
                messages=len(calls),
                bytes_in=sum([call.bytes_in for call in calls]),
                bytes_out=sum([call.bytes_out for call in calls]),
                isolated_ms=None if of_key is None else of_key[0],
                dimension=group.dimension,
                timed_bytes=None if of_key is None else size_of(collective_of(key[0]), group.num_ranks, *of_key[1:]),
                kernels_ms=kernels_ms.get(key),
                first_rank=min(group.ranks, default=msgspec.UNSET),
            )
        )
    return tuple(found)


# -- single calls: compared with other ranks' times they show which rank came last


def timed_calls(steps: Sequence[tuple[int, StepLog | None]]) -> tuple[TimedCalls, ...]:
    """A sample of calls of each operator on each group; all ranks of a group choose the same ones.

    Taken from the sequential steps that the window planned to time, each with its place; None for a step that does not
    count on this rank.
    """
    found: dict[CollectiveKey, tuple[Collective, list[TimedCall]]] = {}
    for place, log in _with_pauses(_evenly_spaced(steps, _MAX_STEPS)):
        if log is None:
            continue
        for key, issued in grouped(log.collectives, lambda call: call.key).items():
            one = issued[0]
            if one.group_size < 2 or not one.group.ranks or collective_of(one.operator) not in _SYNCHRONISE:
                continue
            if key not in found and len(found) == _MAX_KINDS:
                continue
            _, timed = found.setdefault(key, (one, []))
            for number in _chosen(issued):
                time_ms = _time_ms(issued[number])
                if time_ms is not None:
                    call, time_us = issued[number], max(0, round(time_ms * 1e3))
                    dtype = "" if call.dtype is None else str(call.dtype).removeprefix("torch.")
                    timed.append(TimedCall(place, number, _size_of(call), time_us, dtype))
    return tuple(
        [
            TimedCalls(one.operator, one.group.name, min(one.group.ranks), one.group_size, one.dimension, tuple(timed))
            for one, timed in found.values()
            if timed
        ]
    )


def _chosen(issued: Sequence[Collective]) -> list[int]:
    """Indices of the calls to send: one of each size first, largest size first, then more of each."""
    if collective_of(issued[0].operator) == "all_to_all":  # its sizes differ between ranks
        return list(range(min(_MAX_CALLS_A_STEP, len(issued))))
    by_size = grouped(range(len(issued)), lambda number: _size_of(issued[number]))
    # Sort by the round in which each call's size comes up, then by size.
    in_turn = sorted((turn, -size, number) for size, numbers in by_size.items() for turn, number in enumerate(numbers))
    return sorted([number for *_, number in in_turn[:_MAX_CALLS_A_STEP]])


# -- names


def name_calls(steps: Sequence[MeasuredStep]) -> None:
    """Name the collectives of profiled steps: as those at their places in a recorded step of the same sequence.

    Others are named by the place of their kind in the step; see ``names_of``.
    """
    recorded = {step.log.signature: step.log.collectives for step in steps if step.plan.part is Part.RECORDED}
    for step in _with_pauses([step for step in steps if step.profile_index >= 0]):
        for call, known in zip(step.log.collectives, recorded.get(step.log.signature, ()), strict=False):
            if call.splits or (call.bytes_in, call.bytes_out) == (known.bytes_in, known.bytes_out):
                call.name = known.name
        for call, name in zip(step.log.collectives, names_of(step.log.collectives), strict=True):
            call.name = name


def name_delayed(steps: Sequence[MeasuredStep], names: Mapping[CallKey, str]) -> None:
    """Name those collectives of profiled steps that a causal window delays in others, and no other ones."""
    for step in _with_pauses([step for step in steps if step.profile_index >= 0]):
        places = Counter[CollectiveKey]()
        for call in step.log.collectives:
            call.name = names.get((*call.key, places[call.key]), "")
            places[call.key] += 1


# -- collectives of a host library (Gloo) in a job on a device, which its profile does not show


def calls_on_host(
    steps: Sequence[MeasuredStep], bounds: Sequence[tuple[int, int]]
) -> tuple[Intervals, npt.NDArray[np.bool_]]:
    """The profiled steps' host collectives from issue to end, on the clock of ``bounds``; which are of device tensors.

    Only serialised ones have an end; others are assumed to last as long as the same call in sequential steps.
    Steps that the device has not passed are left out: their marks have no times.
    """
    usual_ms: dict[tuple[CollectiveKey, int], list[float]] = defaultdict(list)
    profiled: list[tuple[int, tuple[CollectiveKey, int], Collective]] = []
    for step in _with_pauses([step for step in steps if step.ms is not None]):
        found: Counter[CollectiveKey] = Counter()
        for call in step.log.collectives:
            if call.group_size == 1 or not runs_on_host(call):
                continue
            place = call.key, found[call.key]
            found[call.key] += 1
            time_ms = _time_ms(call)
            if time_ms is not None:
                usual_ms[place].append(time_ms)
            if 0 <= step.profile_index < len(bounds):
                profiled.append((step.profile_index, place, call))
    offset_ns, spans = time.time_ns() - clocks.now(), []
    for index, place, call in profiled:
        time_ms, start_ns = _time_ms(call), offset_ns + call.issued_ns
        if time_ms is None and usual_ms[place]:
            time_ms = median(usual_ms[place])
        if time_ms is not None and bounds[index][0] <= start_ns <= bounds[index][1]:  # otherwise the clock was changed
            spans.append((start_ns, start_ns + round(1e6 * time_ms), call.on_device))
    start, end, on_device = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    return Intervals(start, end), on_device > 0


# -- messages: what the rank sends in the recorded step, and whether its other steps send the same


def messages_of(
    recorded: StepLog | None, counted: Sequence[StepLog], rank: int, chunks: int = 1
) -> RankMessages | None:
    """The messages of the recorded step, and how many counted steps sent the same; None if that is incomplete."""
    if recorded is None or not recorded.is_whole:
        return None
    # Group by name first: groups of thousands of ranks are slow as dictionary keys.
    rows: dict[tuple[str, str, tuple[int, ...], int], list[Collective]] = defaultdict(list)
    for calls in grouped(recorded.collectives, lambda call: (call.operator, call.group.name, call.peer)).values():
        group = calls[0].group
        rows[calls[0].operator, group.dimension, _ranks_of(calls[0], rank), group.num_ranks] += calls
    found = []
    for (operator, dimension, ranks, group_size), calls in rows.items():
        sizes = grouped([_size_of(call) for call in calls], lambda size: size.bit_length() - 1)
        of_sizes = tuple([(size, len(same), sum(same)) for size, same in sorted(sizes.items())])
        bytes_in = sum([call.bytes_in for call in calls])
        total = sum([of_size for *_, of_size in of_sizes])
        found.append(RankRow(operator, dimension, group_size, ranks, len(calls), total, bytes_in, of_sizes))
    compared, expected = counted[:_MAX_COMPARED], _contents(recorded)
    num_alike = sum([_same_calls(_contents(log), expected) for log in _with_pauses(compared)])
    return RankMessages(tuple(found), _stage(recorded, rank), len(compared), num_alike, chunks)


def _ranks_of(call: Collective, rank: int) -> tuple[int, ...]:
    """The ranks of the call's group. For a send or receive: sender and receiver, or none if not known."""
    ranks = call.group.ranks
    if not call.point_to_point:
        return ranks
    if not 0 <= call.peer < len(ranks):
        return ()
    peer = ranks[call.peer]
    return (peer, rank) if call.operator in RECEIVES else (rank, peer)


def _contents(log: StepLog) -> list[tuple[str, str, int, int, int]]:
    return [(c.operator, c.group.name, c.peer, c.bytes_in, c.bytes_out) for c in log.collectives]


def _same_calls(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two steps issued the same calls; threads may issue them in a different order."""
    return one == other or Counter(one) == Counter(other)


def _stage(recorded: StepLog, rank: int) -> int:
    """The rank's place in its pipeline, taken from the largest pipeline group."""
    groups = {call.group.name: call.group for call in recorded.collectives if call.group.dimension == "pipeline"}
    pipelines = [group.ranks for group in groups.values() if len(group.ranks) > 1 and rank in group.ranks]
    return max(pipelines, key=len).index(rank) if pipelines else NO_STAGE


# -- experts: how evenly tokens were spread, by the split sizes


def experts_of(
    steps: Sequence[MeasuredStep], sampled: Sequence[SampledStep], rank: int, stage: int
) -> RankExperts | None:
    """Token counts from the steps of a window and from those sampled before it; None without split sizes."""
    whole = [step for step in steps if step.log.is_whole and not step.skipped]
    found = [
        (step.number, True, _all_to_alls(step.log.collectives))
        for step in _with_pauses(_evenly_spaced(whole, _MAX_EXPERT_STEPS))
    ]
    found += [(step.step, False, _all_to_alls(step.calls)) for step in sampled]
    return rank_experts(rank, stage, found)


def _all_to_alls(collectives: Iterable[Collective]) -> Sequence[AllToAll]:
    """The all-to-alls that have split sizes."""
    return [
        AllToAll(
            call.group.name, call.dimension, call.group.ranks, tuple(call.splits[1]), tuple(call.splits[0]),
            call.bytes_in, call.bytes_out,
        )
        for call in collectives
        if call.splits is not None
    ]  # fmt: skip


# -- what sequential steps did not serialise


def unserialised_notes(steps: Sequence[MeasuredStep]) -> tuple[str, ...]:
    """One sentence for each reason why counted sequential steps did not serialise collectives."""
    logs = _sequential(steps)
    total: Counter[NotSerialised] = Counter()
    for log in logs:
        total.update(log.not_serialised)
    return tuple(
        [
            f"{round(number / len(logs), 1):g} "
            f"{'messages' if reason is NotSerialised.SINGLE_MESSAGE else 'collectives'} a step were not serialised: "
            f"{reason.value} [OC323]"
            for reason, number in sorted(total.items(), key=lambda item: item[0].name)
        ]
    )


def is_negligible(steps: Sequence[MeasuredStep]) -> bool:
    """Whether the bytes that counted sequential steps did not serialise are too few to matter."""
    logs = _sequential(steps)
    # A group of one rank sends nothing.
    issued = sum([_size_of(call) for log in logs for call in log.collectives if call.group_size != 1])
    unserialised = sum([log.not_serialised_bytes for log in logs])
    return not unserialised or unserialised < _NEGLIGIBLE * issued


def _sequential(steps: Sequence[MeasuredStep]) -> list[StepLog]:
    return [step.log for step in steps if step.counted and step.plan.mode is Mode.SEQUENTIAL]
