"""How long single collectives of sequential steps took on this rank: other ranks' times tell who came last."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.arrivals import TimedCall, TimedCalls
from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import clocks

# Collectives in which all ranks wait for the last one.
_SYNCHRONISE = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})
# What is sent of each operator on each group. A job has some hundreds of kinds of calls at most, a group thousands.
_MAX_STEPS, _MAX_CALLS_A_STEP = 8, 4
_MAX_ROWS = 32
# The interpreter is given to the training thread for so long after each step.
_PAUSE_S = 0.0005

_Key = tuple[str, str]


def timed_calls(
    steps: Sequence[tuple[int, StepLog | None]], await_passed: Callable[[clocks.Mark], bool]
) -> tuple[TimedCalls, ...]:
    """Some calls of each operator on each group. All ranks of a group choose the same ones.

    Args:
        steps: the sequential steps that the window planned to time, with their places in it; None for a step that does
            not count on this rank.
        await_passed: waits for the device to pass a mark; False if that takes too long.
    """
    every = -(-len(steps) // _MAX_STEPS) or 1
    first_of: dict[_Key, Collective] = {}
    calls: dict[_Key, list[TimedCall]] = defaultdict(list)
    for place, log in steps[::every]:
        if log is None:
            continue
        of_step: dict[_Key, list[Collective]] = defaultdict(list)
        for collective in log.collectives:
            of_step[collective.key].append(collective)
        for key, issued in of_step.items():
            one = issued[0]
            if one.group_size < 2 or not one.group.ranks or collective_of(one.operator) not in _SYNCHRONISE:
                continue
            if key not in first_of and len(first_of) == _MAX_ROWS:
                continue
            first_of.setdefault(key, one)
            for number in _chosen(issued):
                call = issued[number]
                if call.start is None or call.end is None or not await_passed(call.end):
                    continue
                time_us = max(0, round(clocks.elapsed_ms(call.start, call.end) * 1e3))
                calls[key].append(TimedCall(place, number, max(call.bytes_in, call.bytes_out), time_us))
        time.sleep(_PAUSE_S)
    return tuple(
        [
            TimedCalls(one.operator, one.group.name, min(one.group.ranks), one.group_size, one.dimension, tuple(timed))
            for key, timed in calls.items()
            for one in (first_of[key],)
        ]
    )


def _chosen(issued: Sequence[Collective]) -> list[int]:
    """Numbers of the calls that are sent: of each size one first, the largest size before others, then more of each."""
    if collective_of(issued[0].operator) == "all_to_all":  # its sizes are each rank's own
        return list(range(min(_MAX_CALLS_A_STEP, len(issued))))
    by_size: dict[int, list[int]] = defaultdict(list)
    for number, call in enumerate(issued):
        by_size[max(call.bytes_in, call.bytes_out)].append(number)
    found: list[int] = []
    turn = 0
    while len(found) < min(_MAX_CALLS_A_STEP, len(issued)):
        found += [by_size[size][turn] for size in sorted(by_size, reverse=True) if turn < len(by_size[size])]
        turn += 1
    return sorted(found[:_MAX_CALLS_A_STEP])
