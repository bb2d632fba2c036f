"""Times of a profile's kernels: compute, communication, and their overlap.

Compute and communication time are the terms of the equations in ``overlap_callbacks.analysis.equations``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals, distinct_values, sums_by
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind, copies_of
from overlap_callbacks.analysis.results.kernel_times import OTHER_KERNELS, KernelTime
from overlap_callbacks.analysis.results.mode import Mode

if TYPE_CHECKING:
    from overlap_callbacks.analysis.results.window import ProfiledBlock


class KernelFigures(msgspec.Struct, frozen=True):
    """Times of a set of kernels, in nanoseconds.

    Attributes:
        compute_ns, comm_ns: sums of the kernels' times (T_comp of the equations, and communication).
        compute_busy_ns, comm_busy_ns: length of the union of their intervals.
        hidden_comm_ns: the part of ``comm_busy_ns`` during which compute ran.
        covered_compute_ns, covered_compute_busy_ns: the parts of compute during which communication was in flight.
        copy_ns: sum of the device's memory copies and fills.
        p2p_busy_ns: the part of ``comm_busy_ns`` during which sends and receives were in flight.
        idle_ns: time between the first start and the last end during which nothing ran and nothing was in flight.
        bubble_ns: the same, plus time when receives waited for their sender and nothing else was in flight: the
            bubble of a stage of a pipeline. None if unknown.
        exposed_on_host_ns: the part of ``idle_ns`` in which the host waited for its own communication.
        num_kernels: compute and communication kernels; on CPU, calls.
    """

    compute_ns: int = 0
    compute_busy_ns: int = 0
    comm_ns: int = 0
    comm_busy_ns: int = 0
    hidden_comm_ns: int = 0
    covered_compute_ns: int = 0
    covered_compute_busy_ns: int = 0
    copy_ns: int = 0
    p2p_busy_ns: int = 0
    idle_ns: int = 0
    exposed_on_host_ns: int = 0
    num_kernels: int = 0
    bubble_ns: int | None = None

    def __add__(self, other: KernelFigures) -> KernelFigures:
        """Times of two sets of kernels that never ran at once; the time between is neither idle nor bubble."""
        mine, theirs = (msgspec.structs.astuple(part)[:-1] for part in (self, other))
        return KernelFigures(*[a + b for a, b in zip(mine, theirs, strict=True)])


class KernelSums:
    """Computes the times of any steps or rows of a profile.

    Overlap is computed against the whole profile: communication may run during the compute of the next step.

    Args:
        kernels: the whole profile.
        work_start_ns: when each row began to work, see ``receives.Transfers``; None if unknown.
        waited: when the host waited for its own communication; None if it has none.
    """

    def __init__(
        self, kernels: KernelTable, work_start_ns: Indices | None = None, waited: Intervals | None = None
    ) -> None:
        self._kernels = kernels
        self._compute, self._comm = (kernels.of(kind).union() for kind in (Kind.COMPUTE, Kind.COMMUNICATION))
        busy = kernels.busy
        end_ns = kernels.intervals.end_ns[busy]
        self._any = Intervals(kernels.intervals.start_ns[busy], end_ns).union()
        self._with_waits = self._any if waited is None else self._any.with_others(waited).union()
        self._working = None if work_start_ns is None else Intervals(work_start_ns[busy], end_ns).union()
        self._is_p2p = kernels.runs("send_recv")
        self._by_step = np.argsort(kernels.step, kind="stable")
        self._steps = kernels.step[self._by_step]

    @property
    def steps(self) -> list[int]:
        """Indices of the steps that have kernels, ascending."""
        return [step for step in distinct_values(self._steps).tolist() if step >= 0]

    def of_steps(self, steps: Sequence[int]) -> KernelFigures:
        """Total times of several steps, by their indices."""
        return self.of_rows(self._rows_of(steps)[0])

    def of_each_step(self, steps: Sequence[int]) -> list[KernelFigures]:
        """Times of each of several steps, by their indices."""
        return self._of_groups(*self._rows_of(steps), len(steps))

    def of_rows(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> KernelFigures:
        """Times of the selected rows: a boolean mask, or indices."""
        wanted = np.arange(len(self._kernels))[rows]
        return self._of_groups(wanted, np.zeros(len(wanted), dtype=np.int64), 1)[0]

    def _rows_of(self, steps: Sequence[int]) -> tuple[Indices, Indices]:
        """The rows of steps, and for each row the position of its step in ``steps``."""
        bounds = np.searchsorted(self._steps, [(step, step + 1) for step in steps]).reshape(-1, 2)
        rows = np.concatenate([self._by_step[:0], *[self._by_step[first:last] for first, last in bounds.tolist()]])
        return rows, np.repeat(np.arange(len(steps)), bounds[:, 1] - bounds[:, 0])

    def _of_groups(self, rows: Indices, group: Indices, num_groups: int) -> list[KernelFigures]:
        """Times of each group of rows, all at once: a trace may have hundreds of steps.

        ``group`` is the group's number for each row; groups may be empty.
        """
        table = self._kernels
        intervals, kind, is_p2p = table.intervals[rows], table.kind[rows], self._is_p2p[rows]
        is_compute, is_comm, is_copy = (kind == part for part in (Kind.COMPUTE, Kind.COMMUNICATION, Kind.COPY))
        compute, of_compute = intervals[is_compute], group[is_compute]
        comm, of_comm = intervals[is_comm], group[is_comm]
        copies = intervals[is_copy]
        compute_busy, of_compute_busy = compute.union_by(of_compute)
        comm_busy, of_comm_busy = comm.union_by(of_comm)
        p2p_busy, of_p2p_busy = intervals[is_p2p].union_by(group[is_p2p])
        spans = _spans((compute_busy, of_compute_busy), (comm_busy, of_comm_busy), num_groups)
        sums = [
            sums_by(of_group, values_ns, num_groups)
            for of_group, values_ns in (
                (of_compute, compute.durations_ns),
                (of_compute_busy, compute_busy.durations_ns),
                (of_comm, comm.durations_ns),
                (of_comm_busy, comm_busy.durations_ns),
                (of_comm_busy, comm_busy.covered_ns(self._compute)),
                (of_compute, compute.covered_ns(self._comm)),
                (of_compute_busy, compute_busy.covered_ns(self._comm)),
                (group[is_copy], copies.durations_ns),
                (of_p2p_busy, p2p_busy.durations_ns),
            )
        ]
        any_ns, with_waits_ns = spans.covered_ns(self._any), spans.covered_ns(self._with_waits)
        idle_ns, on_host_ns = (spans.durations_ns - any_ns).tolist(), (with_waits_ns - any_ns).tolist()
        num_kernels = self._num_calls(rows, group, is_compute | is_comm, num_groups)
        bubbles_ns: list[int | None] = [None] * num_groups
        if self._working is not None:
            bubbles_ns = (spans.durations_ns - spans.covered_ns(self._working)).tolist()
        return [
            KernelFigures(*parts) for parts in zip(*sums, idle_ns, on_host_ns, num_kernels, bubbles_ns, strict=True)
        ]

    def _num_calls(self, rows: Indices, group: Indices, wanted: npt.NDArray[np.bool_], num_groups: int) -> list[int]:
        group = group[wanted]
        if not self._kernels.one_row_a_call:
            call = self._kernels.call[rows[wanted]]
            size = int(call.max(initial=0)) + 1
            group = distinct_values(group * size + call) // size
        return np.bincount(group, minlength=num_groups).tolist()  # type: ignore[no-any-return]


def _spans(compute: tuple[Intervals, Indices], comm: tuple[Intervals, Indices], num_groups: int) -> Intervals:
    """From the start of each group's first interval to the end of its last one; empty for an empty group."""
    never = np.iinfo(np.int64)
    start_ns, end_ns = np.full(num_groups, never.max), np.full(num_groups, never.min)
    for intervals, group in (compute, comm):
        np.minimum.at(start_ns, group, intervals.start_ns)
        np.maximum.at(end_ns, group, intervals.end_ns)
    ran = end_ns > start_ns
    return Intervals(np.where(ran, start_ns, 0), np.where(ran, end_ns, 0))


_BLOCK_TIMES = ("compute", "compute_busy", "comm", "comm_busy", "hidden_comm", "covered_compute", "copy")


def profiled_block(
    arm: Mode, block: int, sums: KernelSums, steps: Sequence[int], step_ms: float | None = None
) -> ProfiledBlock:
    """Kernel times of one profiled block, as means over its steps; ``step_ms`` is from mark to mark."""
    from overlap_callbacks.analysis.results.window import ProfiledBlock

    num_steps = len(steps)
    figures = sums.of_steps(steps)

    def per_step_ms(time_ns: int) -> float:
        return time_ns / num_steps / 1e6

    each = sums.of_each_step(steps)
    bubbles_ns = [step.bubble_ns for step in each if step.bubble_ns is not None]
    times_ms: dict[str, Any] = {f"{name}_ms": per_step_ms(getattr(figures, f"{name}_ns")) for name in _BLOCK_TIMES}
    return ProfiledBlock(
        mode=arm,
        block=block,
        num_steps=num_steps,
        **times_ms,
        p2p_ms=per_step_ms(figures.p2p_busy_ns),
        idle_ms=per_step_ms(sum(step.idle_ns for step in each)),
        exposed_on_host_ms=per_step_ms(sum(step.exposed_on_host_ns for step in each)),
        step_ms=step_ms,
        bubble_ms=per_step_ms(sum(bubbles_ns)) if len(bubbles_ns) == num_steps else None,
    )


def kernel_times(
    kernels: KernelTable,
    overlapped: Indices,
    sequential: Indices,
    max_kernels: int,
    weights: npt.NDArray[np.float64] | None = None,
) -> tuple[KernelTime, ...]:
    """Time and calls per step of each kernel in both modes, the most time first.

    The rest of compute and of communication get a row each, so that the rows add up. ``weights`` are each profiled
    step's weight in the mean of its mode, by index, relative to a plain mean.
    """
    size = len(kernels.names)
    counts = np.zeros(len(kernels), dtype=np.int64)
    counts[np.unique(kernels.call, return_index=True)[1]] = 1  # a call of several pieces counts once

    def totals(values: Indices) -> list[npt.NDArray[np.float64]]:
        """Totals per step of each name's values, overlapped and sequential."""
        found = []
        for steps in (overlapped, sequential):
            rows = np.isin(kernels.step, steps)
            weight = 1.0 if weights is None else weights[kernels.step[rows]]
            sums = np.bincount(kernels.name[rows], weights=weight * values[rows], minlength=size)
            found.append(sums / max(len(steps), 1))
        return found

    parts = np.stack([*totals(counts), *totals(kernels.intervals.durations_ns)])
    parts[2:] /= 1e6
    kind = np.full(size, Kind.OTHER)
    kind[kernels.name] = kernels.kind
    num_blocks = _most_blocks(kernels, np.concatenate((overlapped, sequential)))
    wanted = np.flatnonzero(((kind == Kind.COMPUTE) | (kind == Kind.COMMUNICATION)) & (parts[:2].sum(axis=0) > 0))
    wanted = wanted[np.argsort(-parts[2:, wanted].sum(axis=0), kind="stable")]

    def row(name: str, of: Indices, blocks: int) -> KernelTime:
        calls_ov, calls_seq, ov_ms, seq_ms = parts[:, of].sum(axis=1).tolist()
        return KernelTime(name, bool(kind[of[0]] == Kind.COMMUNICATION), calls_ov, calls_seq, ov_ms, seq_ms, blocks)

    rest = wanted[max_kernels:]
    return (
        *[row(kernels.names[i], np.array([i]), int(num_blocks[i])) for i in wanted[:max_kernels].tolist()],
        *[row(OTHER_KERNELS, of, 0) for each in (Kind.COMPUTE, Kind.COMMUNICATION)
          if len(of := rest[kind[rest] == each])],
    )  # fmt: skip


def _most_blocks(kernels: KernelTable, steps: Indices) -> Indices:
    """Thread blocks of each name's largest launch in the given steps, 0 if unknown; shape (names,)."""
    of_shape = np.array(
        [0 if launch is None else min(launch.num_blocks, 2**62) for launch in kernels.launches], dtype=np.int64
    )
    most = np.zeros(len(kernels.names), dtype=np.int64)
    rows = np.isin(kernels.step, steps)
    np.maximum.at(most, kernels.name[rows], of_shape[kernels.shape[rows]])
    return most


def num_streams(kernels: KernelTable) -> int:
    """Most streams on which any step ran kernels; copies have their own engines."""
    rows = (kernels.step >= 0) & (kernels.kind != Kind.OTHER) & ~copies_of(kernels)
    size = int(kernels.lane.max(initial=0)) + 1
    used = distinct_values(kernels.step[rows] * size + kernels.lane[rows]) // size
    return int(np.bincount(used).max(initial=0))


def num_sms(kernels: KernelTable) -> int:
    """SMs of the device, by most of the kernels' launches; 0 if unknown."""
    told = Counter(launch.num_sms for launch in kernels.launches if launch is not None and launch.num_sms > 0)
    return told.most_common(1)[0][0] if told else 0
