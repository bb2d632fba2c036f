"""All figures of a window over a set of ranks, as estimates with intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.design import NUM_COVARIATES, covariates_of
from overlap_callbacks.analysis.job.blocks import Block, BlockSums, ModeSums, add_blocks, block_sums, design_over_ranks
from overlap_callbacks.analysis.job.stages import message_scale
from overlap_callbacks.analysis.job.tables import tables_of
from overlap_callbacks.analysis.job.waiting import WaitingSums, add_waiting, reported_waiting, waiting_of
from overlap_callbacks.analysis.results.catalogue import FIGURES, figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Figure, Formula
from overlap_callbacks.analysis.results.messages import NO_STAGE
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, TimedBlock
from overlap_callbacks.analysis.statistics import (
    CHANGE,
    LOG,
    MIN_BLOCKS,
    PLAIN,
    Adjusted,
    Floats,
    Interval,
    Moments,
    Sample,
    Scale,
    interval_of,
)
from overlap_callbacks.analysis.sums import struct_sum

# A collective never waits all of its time, though sums of ranks that differ may suggest so.
_MOST_WAITING = 0.999

# More blocks than any window has.
NO_INTERVAL = 2**31


class TimedMeans(NamedTuple):
    step_ms: float


class ProfiledMeans(NamedTuple):
    """The measured means of profiled steps.

    Attributes:
        comm_ms: sum of the communication kernels' times, without waiting if that is known.
        waiting_ms: ``comm_busy_ms`` times the share of the kernels' summed times in which collectives wait for the last
            rank, and messages for their peer; NaN if unknown.
        slowest_compute_ms: ``compute_busy_ms`` of the rank with the most in sequential steps.
    """

    compute_ms: float
    comm_ms: float
    step_ms: float
    compute_busy_ms: float
    comm_busy_ms: float
    hidden_comm_ms: float
    covered_compute_ms: float
    p2p_ms: float
    idle_ms: float
    exposed_on_host_ms: float
    bubble_ms: float
    waiting_ms: float
    slowest_compute_ms: float

    @classmethod
    def of(cls, block: ProfiledBlock) -> ProfiledMeans:
        values = [getattr(block, name, None) for name in cls._fields]
        means = cls(*[math.nan if value is None else value for value in values])
        return means._replace(slowest_compute_ms=block.compute_busy_ms)


# The times whose ratio between the modes is a figure come first, and also appear as logarithms: the interval of a ratio
# is symmetric on that scale.
_TIMED_LOGS, _PROFILED_LOGS = 1, 3
_COMM, _BUSY, _COMM_BUSY, _HIDDEN, _IDLE, _BUBBLE, _WAITING, _SLOWEST = map(
    ProfiledMeans._fields.index,
    (
        "comm_ms", "compute_busy_ms", "comm_busy_ms", "hidden_comm_ms", "idle_ms", "bubble_ms", "waiting_ms",
        "slowest_compute_ms",
    ),
)  # fmt: skip
# Values that only all ranks together give, and the values that they are part of.
_ACROSS_RANKS, _PART_OF = [_COMM, _BUBBLE, _WAITING, _SLOWEST], [_COMM, _BUBBLE, _COMM_BUSY, _BUSY]


def _log(value: float) -> float:
    # Values that were not measured have no logarithm; the intervals that need it use the times.
    return math.log(value) if value > 0 else math.nan


class FigureSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sums behind the figures of a set of ranks.

    Attributes:
        timed, profiled: sums over the ranks' blocks.
        sends: whether any rank uses point-to-point messages.
        on_host: whether any rank's device waits for communication on the host.
        waiting: for the last rank, within collectives.
    """

    timed: Annotated[BlockSums, add_blocks]
    profiled: Annotated[BlockSums, add_blocks]
    sends: Annotated[bool, any]
    on_host: Annotated[bool, any]
    waiting: Annotated[WaitingSums, add_waiting]


add_figure_sums = struct_sum(FigureSums)


def figure_sums(window: RankWindow) -> FigureSums:
    """The sums of one rank, from what it measured."""

    # Ranks step together, so they are not independent evidence: each block is averaged over the ranks.
    def summed(block: TimedBlock | ProfiledBlock, num_steps: int, means: tuple[float, ...]) -> Block:
        return Block(block.mode, block.block, num_steps, means, covariates_of(block, window.rhythms))

    timed = [
        summed(block, len(block.step_ms), (float(np.mean(block.step_ms)), float(np.log(block.step_ms).mean())))
        for block in window.timed
        if block.step_ms and min(block.step_ms) > 0
    ]
    profiled = [
        summed(block, block.num_steps, (*(means := ProfiledMeans.of(block)), *map(_log, means[:_PROFILED_LOGS])))
        for block in window.profiled
    ]
    return FigureSums(
        block_sums(window.rank, timed),
        block_sums(window.rank, profiled, tables_of(window)),
        any(block.p2p_ms for block in window.profiled),
        any(block.exposed_on_host_ms for block in window.profiled),
        waiting_of(window.calls, NO_STAGE if window.messages is None else window.messages.stage),
    )


def figures_of(windows: Sequence[RankWindow]) -> dict[str, Estimate]:
    """All figures over the given ranks; figures that were not measured are left out."""
    return figures_from(add_figure_sums([figure_sums(window) for window in windows]))


def spread_figures(sums: FigureSums, names: Iterable[str]) -> dict[str, float]:
    """Figures by which one rank is compared with others; without intervals, which take longer."""
    found = figures_from(sums, map(figure_named, names), NO_INTERVAL)
    # Round, so that no rank is the slowest of identical ones.
    return {name: float(f"{figure.value:.12g}") for name, figure in found.items()}


_OF_SENDS, _OF_HOST = ("p2p_ms", "bubble_ms"), "exposed_on_host_ms"


def figures_from(
    sums: FigureSums, figures: Iterable[Figure] = FIGURES, min_blocks: int = MIN_BLOCKS
) -> dict[str, Estimate]:
    """Figures over the ranks of these sums, by name; those that were not measured are left out.

    ``min_blocks`` is how many blocks of each sample an interval needs.
    """
    samples = samples_of(sums)
    found = {}
    for figure in figures:
        if (sums.sends or figure.name not in _OF_SENDS) and (sums.on_host or figure.name != _OF_HOST):
            interval = interval_by(figure, samples, min_blocks)
            if interval is not None:
                found[figure.name] = interval.estimate()
    return found


def interval_by(figure: Figure, samples: Sequence[Sample], min_blocks: int = MIN_BLOCKS) -> Interval | None:
    """A figure by its formula, of ``samples_of``; None if not measured."""
    formula, scale = figure.defined, scale_of(figure)
    interval = interval_of(
        lambda *means: scale.to(formula.of(*means)),
        *[samples[place] for place in formula.samples],
        scale=scale.back,
        min_blocks=min_blocks,
    )
    return None if interval is None else dataclasses.replace(interval, bounds=figure.bounds)


def value_by(figure: Figure, means: Floats) -> float | None:
    """A figure from a row of ``run_times`` or ``run_means``; None if undefined."""
    try:
        value = figure.defined.of(*picked(figure.defined, means))
    except ZeroDivisionError:
        return None
    return value if math.isfinite(value) else None


def picked(formula: Formula, means: Floats) -> list[TimedMeans | ProfiledMeans]:
    """The means that a figure takes, from a row of ``run_times`` or ``run_means``."""
    width = len(ProfiledMeans._fields)
    ov, seq, *rest = means.tolist()
    of_each = (TimedMeans(ov), TimedMeans(seq), ProfiledMeans(*rest[:width]), ProfiledMeans(*rest[width:]))
    return [of_each[place] for place in formula.samples]


def scale_of(figure: Figure) -> Scale:
    """The scale on which the intervals of a figure are symmetric."""
    return CHANGE if figure.signed else LOG if figure.log else PLAIN


def samples_of(sums: FigureSums) -> tuple[Sample, Sample, Sample, Sample]:
    """The timed blocks of overlapped and of sequential steps, then the profiled ones, averaged over the ranks."""
    timed = _samples(TimedMeans, _TIMED_LOGS, sums.timed)
    profiled = _samples(ProfiledMeans, _PROFILED_LOGS, sums.profiled, sums.waiting)
    return timed[0], timed[1], profiled[0], profiled[1]


def _across_ranks(rows: Floats, arms: Sequence[ModeSums], own: npt.NDArray[np.bool_], waiting: WaitingSums) -> None:
    """Fill in the values that need all ranks together: the slowest rank's compute, and waiting.

    ``own`` says which rows are of each mode; shape (modes, rows).
    """
    if arms[1].blocks and arms[1].mean[_BUSY] > 0:
        slowest_ms = arms[1].most[_BUSY]
        rows[own[1], _SLOWEST] = rows[own[1], _BUSY] * slowest_ms / arms[1].mean[_BUSY]
    waiting = reported_waiting(waiting)
    waited = {block.block: block for block in waiting.blocks}
    having = [(mode, arm, rows_of) for mode, arm, rows_of in zip(Mode, arms, own, strict=True) if arm.blocks]
    if not all(any(block in waited for block in arm.blocks) for _, arm, _ in having):
        return
    for mode, arm, rows_of in having:
        scale = message_scale(waiting.stages, sequential=mode is Mode.SEQUENTIAL)
        of_blocks = {n: waited[n].scaled_us(scale) for n in arm.blocks if n in waited}
        usual = tuple(np.mean([*of_blocks.values()], axis=0).tolist())
        waited_ms, bubble_ms = np.array([of_blocks.get(n, usual) for n in arm.blocks]).T / (1e3 * arm.num_ranks)
        part = rows[rows_of]
        most_ms = np.maximum(part[:, _BUBBLE], part[:, _IDLE] + part[:, _COMM_BUSY] - part[:, _HIDDEN])
        part[:, _BUBBLE] = np.minimum(part[:, _BUBBLE] + bubble_ms, most_ms)
        with np.errstate(all="ignore"):
            share = np.where(part[:, _COMM] > 0, 1 - np.minimum(waited_ms / part[:, _COMM], _MOST_WAITING), 1.0)
        part[:, _COMM] *= share
        part[:, len(ProfiledMeans._fields) + _COMM] += np.log(share)
        part[:, _WAITING] = part[:, _COMM_BUSY] * (1 - share)
        rows[rows_of] = part


def _samples(
    columns: Callable[..., tuple[float, ...]],
    num_logs: int,
    sums: BlockSums,
    waiting: WaitingSums | None = None,
) -> list[Sample]:
    """The blocks of each mode; profiled blocks include the ranks' waiting."""
    arms = sums.modes()
    if not any(arm.blocks for arm in arms):
        return [Sample(np.empty((0, 0)), 0, columns) for _ in arms]
    design, rows = design_over_ranks(arms, NUM_COVARIATES)
    width = rows.shape[1] - NUM_COVARIATES - 1 - num_logs
    as_times = np.arange(width)
    as_logs = np.concatenate([np.arange(width, width + num_logs), as_times[num_logs:]])
    is_log = as_times < num_logs
    of_each = rows.copy()
    if waiting is not None:
        _across_ranks(rows, arms, design.of_mode, waiting)
    with np.errstate(all="ignore"):
        before, means, covariances = design.means(of_each), design.means(rows), design.covariances(rows)
    samples = []
    for place, arm in enumerate(arms):
        if not arm.blocks:
            samples.append(Sample(np.empty((0, width)), 0, columns))
            continue
        degrees = float(design.degrees[place])
        covariance = covariances[place]
        # The mean over the ranks that have a value, as in the tables of kernels.
        mean = arm.mean[as_times].copy()
        if waiting is not None:
            whole, changed = before[place][_PART_OF], means[place][_ACROSS_RANKS]
            with np.errstate(all="ignore"):
                mean[_ACROSS_RANKS] = np.where(whole > 0, mean[_PART_OF] * changed / whole, changed)
        own = design.of_mode[place]
        samples.append(
            Sample(
                rows[own][:, as_times],
                sum(arm.num_steps),
                columns,
                Adjusted(
                    Moments(mean, covariance[np.ix_(as_times, as_times)], degrees),
                    Moments(means[place][as_logs], covariance[np.ix_(as_logs, as_logs)], degrees),
                    is_log,
                ),
            )
        )
    return samples
