"""Single calls of kernels for charts: the longest of a step by name and stream, and how long calls of a kernel take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import CallTimes, DrawnCall, DrawnName, StepTimeline

# A chart that is a thousand pixels wide shows few more, and a record has many charts.
MAX_CALLS = 400
MAX_KERNELS = 40
MAX_NAME_LENGTH = 200


def with_calls(picture: StepTimeline, kernels: KernelTable, step: int, steps: Sequence[int]) -> StepTimeline:
    """A timeline with the names of what ran in it.

    Args:
        picture: of the step, without calls.
        kernels: the whole profile.
        step: index of the step.
        steps: of the profiled steps of its mode, over which the times of calls are.
    """
    rows = np.flatnonzero(_is_shown(kernels) & (kernels.step == step))
    start_ns = int(kernels.intervals.start_ns[rows].min(initial=np.iinfo(np.int64).max))
    longest = rows[np.argsort(-kernels.intervals.durations_ns[rows], kind="stable")[:MAX_CALLS]]
    drawn = longest[np.argsort(kernels.intervals.start_ns[longest], kind="stable")]
    # A name may be that of a collective here and of compute there, so its kind belongs to it.
    kinds = kernels.kind[drawn] == Kind.COMMUNICATION
    keys = dict.fromkeys(zip(kernels.name[drawn].tolist(), kinds.tolist(), strict=True))
    place = {key: number for number, key in enumerate(keys)}
    columns = (
        kernels.name[drawn].tolist(), kinds.tolist(), kernels.lane[drawn].tolist(),
        (kernels.intervals.start_ns[drawn] - start_ns).tolist(), kernels.intervals.durations_ns[drawn].tolist(),
    )  # fmt: skip
    return msgspec.structs.replace(
        picture,
        names=tuple([DrawnName(kernels.names[name][:MAX_NAME_LENGTH], communicates) for name, communicates in keys]),
        calls=tuple(
            [
                DrawnCall(place[name, communicates], lane, start / 1e6, length / 1e6)
                for name, communicates, lane, start, length in zip(*columns, strict=True)
            ]
        ),
        num_calls=len(rows),
        call_times=call_times(kernels, steps),
    )


def timelines_with_calls(
    pictures: Sequence[tuple[StepTimeline, int]], kernels: KernelTable, by_arm: dict[Mode, list[int]]
) -> tuple[StepTimeline, ...]:
    """Timelines with the names of what ran in them; each with the index of its step."""
    return tuple([with_calls(picture, kernels, step, by_arm[picture.arm]) for picture, step in pictures])


def call_times(kernels: KernelTable, steps: Sequence[int]) -> tuple[CallTimes, ...]:
    """How long calls of each kernel took in these steps, those with the most time first.

    A call that has several pieces, as operators on CPU have, takes as long as they do together.
    """
    rows = np.flatnonzero(_is_shown(kernels) & np.isin(kernels.step, np.asarray(steps, dtype=np.int64)))
    _, first, call = np.unique(kernels.call[rows], return_index=True, return_inverse=True)
    length_ns = np.bincount(call, weights=kernels.intervals.durations_ns[rows])
    name, communicates = kernels.name[rows[first]], kernels.kind[rows[first]] == Kind.COMMUNICATION
    key = 2 * name + communicates
    found: list[CallTimes] = []
    totals = np.bincount(key, weights=length_ns)
    for number in np.argsort(-totals, kind="stable")[:MAX_KERNELS].tolist():
        lengths = length_ns[key == number] / 1e6
        if not len(lengths):
            break  # the rest have no calls either
        text = kernels.names[number // 2][:MAX_NAME_LENGTH]
        found.append(
            CallTimes(
                text, bool(number % 2), len(lengths), float(lengths.min()), float(np.median(lengths)),
                float(lengths.max()),
            )
        )  # fmt: skip
    return tuple(found)


def _is_shown(kernels: KernelTable) -> Indices:
    shown: Indices = (kernels.kind == Kind.COMPUTE) | (kernels.kind == Kind.COMMUNICATION)
    return shown
