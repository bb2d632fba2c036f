"""The collectives of a window: counts and bytes of its recorded step, times of its sequential steps."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from overlap_callbacks.analysis.bus_bandwidth import size_of
from overlap_callbacks.analysis.kernels.by_collective import CollectiveKey
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.gate.collectives import Group
from overlap_callbacks.gate.serialiser import MAX_TIMED
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.instruments import clocks

# The interpreter is given to the training thread for so long after each step.
_PAUSE_S = 0.0005


@dataclass
class _Total:
    """Sums over the collectives of one operator on one group."""

    group: Group
    messages: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


def collective_times(
    recorded: StepLog | None,
    timed: Sequence[StepLog],
    kernels_ms: Mapping[CollectiveKey, float],
    await_passed: Callable[[clocks.Mark], bool],
) -> tuple[CollectiveTime, ...]:
    """Each operator on each group, per step.

    Args:
        recorded: the recorded step; None if it did not run. All steps are recorded, this one without a profiler.
        timed: the counted sequential steps. Only collectives that were serialised have marks, hence times; only their
            bytes may be divided by these times.
        kernels_ms: time of the kernels per sequential step, where it is known.
        await_passed: waits for the device to pass a mark; False if that takes too long.
    """
    if recorded is None:
        return ()
    isolated_ms: dict[CollectiveKey, float] = defaultdict(float)
    timed_bytes: dict[CollectiveKey, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))  # read, written
    # Serialised collectives run one after the other: once the device has passed the last one, it has passed all.
    marked = [(log, [c for c in log.collectives if c.start is not None and c.end is not None]) for log in timed]
    passed = [(log, of_step) for log, of_step in marked if not of_step or await_passed(of_step[-1].end or 0)]
    for log, of_step in passed:
        weights: dict[CollectiveKey, float] = {}
        if len(of_step) >= MAX_TIMED:  # what came after these stands for no other time than they do
            every = Counter(collective.key for collective in log.collectives)
            weights = {key: every[key] / count for key, count in Counter(c.key for c in of_step).items()}
        for collective in of_step:
            assert collective.start is not None
            assert collective.end is not None
            key = collective.key
            weight = weights.get(key, 1.0) / len(passed)
            isolated_ms[key] += weight * clocks.elapsed_ms(collective.start, collective.end)
            bytes_in, bytes_out = timed_bytes[key]
            timed_bytes[key] = bytes_in + weight * collective.bytes_in, bytes_out + weight * collective.bytes_out
        time.sleep(_PAUSE_S)
    totals: dict[CollectiveKey, _Total] = {}
    for collective in recorded.collectives:
        total = totals.setdefault(collective.key, _Total(collective.group))
        total.messages += 1
        total.bytes_in += collective.bytes_in
        total.bytes_out += collective.bytes_out
    return tuple(
        [
            CollectiveTime(
                operator=key[0],
                group=total.group.label,
                group_size=total.group.num_ranks,
                backend=total.group.backend,
                messages=total.messages,
                bytes_in=total.bytes_in,
                bytes_out=total.bytes_out,
                isolated_ms=isolated_ms.get(key),
                dimension=total.group.dimension,
                timed_bytes=(
                    size_of(collective_of(key[0]), total.group.num_ranks, *timed_bytes[key])
                    if key in timed_bytes
                    else None
                ),
                kernels_ms=kernels_ms.get(key),
                first_rank=min(total.group.ranks, default=msgspec.UNSET),
            )
            for key, total in totals.items()
        ]
    )
