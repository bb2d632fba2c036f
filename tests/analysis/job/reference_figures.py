"""The reference: all figures from all samples at once, without sums that can be added."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.design import NUM_COVARIATES, covariates_of
from overlap_callbacks.analysis.figures import ProfiledMeans, TimedMeans, interval_by
from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, Rhythm, TimedBlock
from overlap_callbacks.analysis.statistics import Adjusted, Moments, Sample, bounded

Matrix = npt.NDArray[np.float64]
Blocks = Sequence[TimedBlock] | Sequence[ProfiledBlock]


def timed_blocks(window: RankWindow) -> Sequence[TimedBlock]:
    """The timed blocks of a rank whose steps have a time."""
    return [block for block in window.timed if block.step_ms and min(block.step_ms) > 0]


def profiled_blocks(window: RankWindow) -> Sequence[ProfiledBlock]:
    """The profiled blocks of a rank."""
    return window.profiled


def ranks_with_most_blocks(
    windows: Sequence[RankWindow], blocks_of: Callable[[RankWindow], Blocks]
) -> tuple[RankWindow, ...]:
    """The ranks that have more than half of the blocks of each mode, of those that any rank has."""
    blocks_by_rank = [{(block.mode, block.block) for block in blocks_of(window)} for window in windows]
    total = Counter(arm for arm, _ in set().union(*blocks_by_rank))
    counts = [Counter(arm for arm, _ in blocks) for blocks in blocks_by_rank]
    return tuple(
        [
            window
            for window, count in zip(windows, counts, strict=True)
            if total and all(2 * count[arm] > number for arm, number in total.items())
        ]
    )


def ranks_left_out(windows: Sequence[RankWindow]) -> list[str]:
    """Which ranks have blocks, and too few to count, in words."""
    problems = []
    for what, blocks_of in (("kernel times", profiled_blocks), ("step times", timed_blocks)):
        counted = {window.rank for window in ranks_with_most_blocks(windows, blocks_of)}
        ranks = [window.rank for window in windows if blocks_of(window) and window.rank not in counted]
        if ranks:
            problems.append(
                f"{what} of {name_ranks(ranks)} are left out: half or more of the blocks of a mode are missing there "
                "[OC329]"
            )
    return problems


def with_whole_tables(windows: Sequence[RankWindow]) -> tuple[RankWindow, ...]:
    """The ranks whose tables of kernels may be averaged: not those whose profile lacks too much of a mode."""
    counted = {window.rank for window in ranks_with_most_blocks(windows, profiled_blocks)}
    return tuple([window for window in windows if not window.profiled or window.rank in counted])


def least_squares(blocks: Blocks, rhythms: Sequence[Rhythm], num_steps: Sequence[float]) -> Matrix:
    """The columns of a design, the first two of which are the modes; shape (blocks, columns)."""
    covariates = np.array([covariates_of(block, rhythms) for block in blocks])
    return _columns([block.mode for block in blocks], [block.block for block in blocks], covariates, num_steps)


def _columns(modes: Sequence[Mode], places: Sequence[int], covariates: Matrix, num_steps: Sequence[float]) -> Matrix:
    number, roots = len(modes), np.sqrt(num_steps)[:, None]
    columns = np.array([[mode is each for each in Mode] for mode in modes], dtype=float)
    columns = columns[:, columns.any(axis=0)]
    if columns.shape[1] < 2:
        return columns
    degree = 3 if number >= 12 else 1 if number >= 6 else 0
    place = np.array(places, dtype=float)
    place = 2 * (place - place.min()) / max(1.0, float(np.ptp(place))) - 1
    for column in (*(place**power for power in range(1, degree + 1)), *covariates.T):
        wider = np.column_stack([columns, column])
        rank = np.linalg.matrix_rank(wider * roots, tol=1e-3)
        if rank == wider.shape[1] and number - wider.shape[1] >= 2:
            columns = wider
    return columns


def mode_weights(columns: Matrix, num_steps: Sequence[float], modes: Sequence[Mode]) -> npt.NDArray[np.float64]:
    """The weight of each block in the mean of its mode: those of the least squares' difference between the modes."""
    steps = np.array(num_steps, dtype=float)
    if len(set(modes)) < 2:
        return steps / steps.sum()
    inverse = np.linalg.inv(columns.T @ (columns * steps[:, None]))
    solution = inverse @ (columns * steps[:, None]).T
    signs = np.array([1.0 if mode is next(iter(Mode)) else -1.0 for mode in modes])
    return np.asarray(signs * (solution[0] - solution[1]))


def figures_of(windows: Sequence[RankWindow]) -> dict[str, Estimate]:
    """All figures over the given ranks; figures that were not measured are left out."""
    samples = (*_samples(windows, timed_blocks, _timed_row, TimedMeans, 1),
               *_samples(windows, profiled_blocks, _profiled_row, ProfiledMeans, 3))  # fmt: skip
    found = {}
    for figure in FIGURES:
        if figure.name in ("p2p_ms", "bubble_ms") and not _sends(windows):
            continue
        if figure.name == "exposed_on_host_ms" and not _waits_on_host(windows):
            continue
        interval = interval_by(figure, samples)
        if interval is not None:
            found[figure.name] = bounded(interval.estimate(), figure.bounds)
    return found


def _timed_row(block: TimedBlock) -> tuple[int, list[float]]:
    return len(block.step_ms), [float(np.mean(block.step_ms)), float(np.log(block.step_ms).mean())]


def _profiled_row(block: ProfiledBlock) -> tuple[int, list[float]]:
    means = ProfiledMeans.of(block)
    return block.num_steps, [*means, *[math.log(value) if value > 0 else math.nan for value in means[:3]]]


def _samples(
    windows: Sequence[RankWindow],
    blocks_of: Callable[[RankWindow], Blocks],
    row_of: Callable[..., tuple[int, list[float]]],
    names: Callable[..., tuple[float, ...]],
    num_logs: int,
) -> list[Sample]:
    """The blocks of each mode. Each is first averaged over the ranks, which step together: they are no evidence of
    their own. What a rank lacks is taken to be its own mean of the mode.
    """
    ranks = ranks_with_most_blocks(windows, blocks_of)
    numbers = {mode: sorted({b.block for w in ranks for b in blocks_of(w) if b.mode is mode}) for mode in Mode}
    keys = [(mode, number) for mode in Mode for number in numbers[mode]]
    if not keys:
        return [Sample(np.empty((0, 0)), 0, names) for _ in Mode]
    own_means: dict[Mode, list[Matrix]] = {mode: [] for mode in Mode}
    filled, has, steps = [], [], []
    for window in ranks:
        blocks = blocks_of(window)
        num_steps, rows = zip(*[row_of(block) for block in blocks], strict=True)
        covariates = np.array([covariates_of(block, window.rhythms) for block in blocks])
        table = np.column_stack([np.array(rows), covariates])
        modes = [block.mode for block in blocks]
        weights = mode_weights(least_squares(blocks, window.rhythms, num_steps), num_steps, modes)
        means = {mode: sum((weights[i] * table[i] for i, m in enumerate(modes) if m is mode)) for mode in set(modes)}
        for mode, mean in means.items():
            own_means[mode].append(mean)
        by_key = {(block.mode, block.block): i for i, block in enumerate(blocks)}
        filled.append([table[by_key[key]] if key in by_key else means[key[0]] for key in keys])
        has.append([key in by_key for key in keys])
        steps.append([num_steps[by_key[key]] if key in by_key else 0 for key in keys])
    table, weight = np.mean(filled, axis=0), np.mean(steps, axis=0)
    if names is ProfiledMeans and own_means[Mode.SEQUENTIAL]:
        busy, slowest = (ProfiledMeans._fields.index(name) for name in ("compute_busy_ms", "slowest_compute_ms"))
        most = max(mean[busy] for mean in own_means[Mode.SEQUENTIAL])
        usual = np.mean([mean[busy] for mean in own_means[Mode.SEQUENTIAL]])
        for i, (mode, _) in enumerate(keys):
            if mode is Mode.SEQUENTIAL:
                table[i, slowest] = table[i, busy] * most / usual
        for mean in own_means[Mode.SEQUENTIAL]:
            mean[slowest] = most
    width = table.shape[1] - NUM_COVARIATES
    modes, places = [mode for mode, _ in keys], [number for _, number in keys]
    columns = _columns(modes, places, table[:, width:], weight)
    root = np.sqrt(weight)[:, None]
    hat = (columns * root) @ np.linalg.pinv(columns * root)
    with np.errstate(all="ignore"):
        left = root * table - hat @ (root * table)
        left[np.abs(left) <= 1e-12 * np.abs(root * table).max(axis=0)] = 0.0
    weights = mode_weights(columns, weight, modes)
    samples = []
    for mode in Mode:
        rows_of = [i for i, key in enumerate(keys) if key[0] is mode]
        if not rows_of:
            samples.append(Sample(np.empty((0, 0)), 0, names))
            continue
        degrees = float(sum(1 - hat[i, i] for i in rows_of))
        spread = float(sum(weights[i] ** 2 / weight[i] for i in rows_of))
        covariance = (
            left[rows_of].T @ left[rows_of] / degrees * spread if degrees > 1e-12 else np.full((width,) * 2, np.nan)
        )
        mean = sum(weights[i] * table[i] for i in rows_of)
        sums = list(range(width - num_logs))
        logs = [*range(width - num_logs, width), *sums[num_logs:]]
        counted = int(np.max([[s[i] for i in rows_of] for s in steps], axis=0).sum())
        samples.append(
            Sample(
                table[rows_of][:, sums], counted, names,
                Adjusted(
                    Moments(np.mean(own_means[mode], axis=0)[sums], covariance[np.ix_(sums, sums)], degrees),
                    Moments(mean[logs], covariance[np.ix_(logs, logs)], degrees),
                    np.arange(len(sums)) < num_logs,
                ),
            )
        )  # fmt: skip
    return samples


def _sends(samples: Sequence[RankWindow]) -> bool:
    return any(block.p2p_ms for sample in samples for block in sample.profiled)


def _waits_on_host(samples: Sequence[RankWindow]) -> bool:
    return any(block.exposed_on_host_ms for sample in samples for block in sample.profiled)
