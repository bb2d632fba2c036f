"""Exposed and hidden time of the collectives of a profile, by size and by place in the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.exposure import MAX_SIZES, add_rows
from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.exposure import (
    FIRST,
    LAST,
    MIDDLE,
    NOWHERE,
    SEVERAL,
    UNKNOWN_SIZE,
    ExposedSum,
    ExposureSums,
    Label,
)

_Marks = npt.NDArray[np.bool_]
_PLACES = (FIRST, MIDDLE, LAST, NOWHERE)
_FIRST, _MIDDLE, _LAST, _NOWHERE = range(4)
# Messages up to this size (a loss, a norm, a flag) are no bucket: others come first or last without regard to them.
_FLAG_BYTES = 1024
# A queue of collectives begins or ends a step as one: less than this share of the step's compute runs between them,
# and at least the other share of each is exposed.
_NO_COMPUTE, _EXPOSED = 0.01, 0.1
_LONG_AGO, _NEVER = -(2**62), 2**62


def exposure_of(
    kernels: KernelTable,
    compute: Intervals,
    rows: Indices,
    label: Indices,
    labels: Sequence[Label],
    num_bytes: Indices,
    numbers: Mapping[int, int],
    names: Sequence[str] = (),
    path_ns: Indices | None = None,
) -> ExposureSums:
    """The exposed and the hidden time of some collectives.

    Args:
        kernels: a profile, or a piece of it at whose bounds nothing runs.
        compute: the union of its compute.
        rows: collectives, all of some steps; shape (n,).
        label: index into ``labels`` of each; shape (n,).
        labels: kinds and groups.
        num_bytes: size of each, ``UNKNOWN_SIZE`` if not known; shape (n,).
        numbers: the number of each of the steps by its index in the profile; empty where steps are not known.
        names: of what each is for, n of them; empty if none is known.
        path_ns: of each, on the steps' critical paths; shape (n,). None if these are not known.
    """
    steps = tuple(sorted(set(numbers.values())))
    if not len(rows):
        return ExposureSums(steps)
    step = kernels.step[rows]
    own = kernels.intervals[rows].after_earlier(step)
    hidden_ns = own.covered_ns(compute)
    exposed_ns = own.durations_ns - hidden_ns
    place, beyond = np.full(len(rows), _NOWHERE), np.zeros(len(rows))
    if numbers:
        place, beyond = _places(kernels, compute, rows, exposed_ns, num_bytes)
    family = label * len(_PLACES) + place
    on_path_ns = np.zeros(len(rows), dtype=np.int64) if path_ns is None else path_ns
    queued_ns = _queued_ns(own, step, compute, exposed_ns, hidden_ns)
    of_each = numbers, step, num_bytes, exposed_ns, hidden_ns, beyond, on_path_ns, queued_ns
    found = _sums(labels, _PLACES, family, _with_ranges(family, num_bytes), *of_each)
    known: dict[str, int] = {}
    name = np.array([known.setdefault(text, len(known)) for text in names], dtype=np.int64)
    texts = tuple(known)
    named = _sums(labels, texts, label * len(texts) + name, np.full(len(rows), SEVERAL), *of_each) if any(known) else []
    return ExposureSums(steps, rows=add_rows([found]), names=add_rows([named]), paths=int(path_ns is not None))


def _sums(
    labels: Sequence[Label],
    places: Sequence[str],
    family: Indices,
    size: Indices,
    numbers: Mapping[int, int],
    step: Indices,
    num_bytes: Indices,
    exposed_ns: Indices,
    hidden_ns: Indices,
    beyond: npt.NDArray[np.float64],
    path_ns: Indices,
    queued_ns: npt.NDArray[np.float64],
) -> list[ExposedSum]:
    """The sums of each family and size; a family is a label times the number of places, plus a place."""
    order = np.lexsort((step, size, family))
    family, size, step, num_bytes = family[order], size[order], step[order], num_bytes[order]
    exposed_ns = exposed_ns[order].astype(float)
    is_new = _changes(family) | _changes(size)
    of_row, of_step = np.flatnonzero(is_new), np.flatnonzero(is_new | _changes(step))
    by_step: dict[int, dict[int, float]] = defaultdict(dict)
    rows_of_steps = np.searchsorted(of_row, of_step, side="right") - 1
    in_steps = zip(rows_of_steps.tolist(), step[of_step].tolist(), np.add.reduceat(exposed_ns, of_step), strict=True)
    for row, of, time_ns in in_steps:
        if of in numbers and time_ns > 0:
            by_step[row][numbers[of]] = float(time_ns)
    columns = (
        size[of_row],
        np.minimum.reduceat(num_bytes, of_row),
        np.maximum.reduceat(num_bytes, of_row),
        np.diff(np.append(of_row, len(order))),
        np.add.reduceat(exposed_ns, of_row),
        np.add.reduceat(hidden_ns[order].astype(float), of_row),
        np.add.reduceat(np.rint(exposed_ns * beyond[order]), of_row),  # whole: any order of sums gives the same
    )
    on_path_ns = np.add.reduceat(path_ns[order].astype(float), of_row).tolist()
    queued = np.add.reduceat(np.rint(queued_ns[order]), of_row).tolist()
    kinds = [divmod(code, len(places)) for code in family[of_row].tolist()]
    values: Any = zip(*[column.tolist() for column in columns], strict=True)
    return [
        ExposedSum(*(*labels[kind], places[at], *of_columns, by_step[row], {}, on_path_ns[row], queued[row]))
        for row, ((kind, at), of_columns) in enumerate(zip(kinds, values, strict=True))
    ]


def _queued_ns(
    own: Intervals, step: Indices, compute: Intervals, exposed_ns: Indices, hidden_ns: Indices
) -> npt.NDArray[np.float64]:
    """The exposed time that each collective answers for: a long one that is hidden exposes those behind it.

    Collectives without compute between them are a queue. Each exposed time is divided among it and those before it in
    the queue, by their lengths. Where compute goes on after an exposed one, a new queue begins: what came before has
    been waited for.
    """
    order = np.lexsort((own.start_ns, step))
    order = order[own.durations_ns[order] > 0]
    found = np.zeros(len(own))
    if not len(order):
        return found
    length, exposed, hidden = own.durations_ns[order], exposed_ns[order], hidden_ns[order]
    between = Intervals(own.end_ns[order][:-1], np.maximum(own.start_ns[order][1:], own.end_ns[order][:-1]))
    computed = between.covered_ns(compute)
    waited = exposed[:-1] >= _EXPOSED * length[:-1]
    goes_on = computed + hidden[1:] >= _EXPOSED * length[1:]
    apart = (computed >= _EXPOSED * (length[:-1] + length[1:])) | (waited & goes_on)
    is_first = np.concatenate(([True], (np.diff(step[order]) != 0) | apart))
    queue = np.cumsum(is_first) - 1
    so_far = np.cumsum(length)
    so_far -= (so_far - length)[is_first][queue]
    shares = np.cumsum((exposed / so_far)[::-1])[::-1]
    ends = np.append(np.flatnonzero(is_first)[1:], len(order))[queue]
    found[order] = length * np.maximum(shares - np.append(shares, 0.0)[ends], 0.0)
    return found


def _with_ranges(family: Indices, num_bytes: Indices) -> Indices:
    """The sizes, ``SEVERAL`` where those of a family are too many: tokens of experts have another size each time."""
    sizes, of_size = np.unique(num_bytes, return_inverse=True)
    families = distinct_values(family * len(sizes) + of_size.reshape(-1)) // len(sizes)
    many, counts = np.unique(families, return_counts=True)
    has_many = np.isin(family, many[counts > MAX_SIZES]) & (num_bytes != UNKNOWN_SIZE)
    return np.where(has_many, SEVERAL, num_bytes)


def _changes(column: Indices) -> _Marks:
    return np.concatenate(([True], column[1:] != column[:-1]))


def _places(
    kernels: KernelTable, compute: Intervals, rows: Indices, exposed_ns: Indices, num_bytes: Indices
) -> tuple[Indices, npt.NDArray[np.float64]]:
    """The place of each collective in its step, and the share of the step's compute before or after it."""
    ran, step = kernels.intervals[rows], kernels.step[rows]
    num_steps = int(step.max(initial=-1)) + 1
    begin_ns, end_ns = _spans(kernels, num_steps)
    begin_ns, end_ns = begin_ns[step], end_ns[step]

    def computed(since_ns: Indices, until_ns: Indices) -> Indices:
        """The compute of the step between two times, zero where the second is not later."""
        return Intervals(np.maximum(since_ns, begin_ns), np.minimum(until_ns, end_ns)).covered_ns(compute)

    before, after = computed(begin_ns, ran.start_ns), computed(ran.end_ns, end_ns)
    whole_ns = np.maximum(computed(begin_ns, end_ns), 1)
    # The first and the last bucket of each step; of a step of flags alone, of these.
    is_flag = (num_bytes != UNKNOWN_SIZE) & (num_bytes <= _FLAG_BYTES)
    has_others = np.zeros(num_steps, dtype=bool)
    has_others[step[~is_flag]] = True
    counts = np.flatnonzero(~is_flag | ~has_others[step])
    first, last = (np.zeros(num_steps, dtype=np.int64) for _ in range(2))
    by_start = counts[np.argsort(ran.start_ns[counts], kind="stable")]
    first[step[by_start[::-1]]] = by_start[::-1]  # of equal indices the last counts
    by_end = counts[np.argsort(ran.end_ns[counts], kind="stable")]
    last[step[by_end]] = by_end
    first, last = first[step], last[step]
    in_queue = exposed_ns >= _EXPOSED * np.maximum(ran.durations_ns, 1)
    is_first = (ran.start_ns <= ran.start_ns[first]) | (
        in_queue & (computed(ran.end_ns[first], ran.start_ns) <= _NO_COMPUTE * whole_ns)
    )
    is_last = (ran.start_ns >= ran.start_ns[last]) | (
        in_queue & (computed(ran.end_ns, ran.start_ns[last]) <= _NO_COMPUTE * whole_ns)
    )
    is_first &= ~is_last | (before < after)
    place = np.where(is_first, _FIRST, np.where(is_last, _LAST, _MIDDLE))
    return place, np.where(is_first, before, np.where(is_last, after, 0)) / whole_ns


def _spans(kernels: KernelTable, num_steps: int) -> tuple[Indices, Indices]:
    """When the compute of each step begins and ends; shape (steps,) each. Of a step without, it ends before it begins.

    Steps beyond ``num_steps`` are left out.
    """
    begin_ns, end_ns = np.full(num_steps, _NEVER), np.full(num_steps, _LONG_AGO)
    rows = np.flatnonzero((kernels.kind == Kind.COMPUTE) & (kernels.step >= 0) & (kernels.step < num_steps))
    np.minimum.at(begin_ns, kernels.step[rows], kernels.intervals.start_ns[rows])
    np.maximum.at(end_ns, kernels.step[rows], kernels.intervals.end_ns[rows])
    return begin_ns, end_ns
