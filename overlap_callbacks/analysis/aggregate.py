"""Makes an ``OverlapReport`` of what all ranks measured in one window, and judges windows that were cut short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from overlap_callbacks.analysis.design import MIN_BLOCKS_OF_TREND
from overlap_callbacks.analysis.job.part import merge, part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.results.catalogue import FIGURES, SEQ, STEP
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, TimedBlock

# Kernels that a rank keeps, those with the most time. Enough for the tables; messages and record stay bounded.
MAX_KERNELS = 50


def aggregate_windows(
    windows: Iterable[RankWindow],
    *,
    world_size: int,
    every_n_steps: int,
    control: bool = False,
    problems: Sequence[str] = (),
    tokens_per_step: int | None = None,
    work: Workload | None = None,
) -> OverlapReport:
    """Make the report of one window from what its ranks measured, one entry for each rank that reported.

    See ``report_of`` for the other arguments. Live, what ranks measured is added level by level instead.
    """
    return report_of(
        merge([part_of(window) for window in windows]),
        world_size=world_size,
        every_n_steps=every_n_steps,
        control=control,
        problems=problems,
        tokens_per_step=tokens_per_step,
        work=work,
    )


def drop_incomparable_figures(window: OverlapReport) -> OverlapReport:
    """The report of a window that was cut short, without the figures that too few of its blocks support.

    Where drift may make a difference between the modes, the figures that compare them are dropped; where it may between
    profiled blocks, all figures of the profile are.
    """
    sample = window.samples[0]
    dropped = []
    if not are_comparable(sample.timed):
        dropped += [figure.name for figure in FIGURES if figure.unit != "ms"]
    if not are_comparable(sample.profiled):
        dropped += [figure.name for figure in FIGURES if not {STEP, SEQ}.issuperset(figure.defined.samples)]
    return msgspec.structs.replace(window, **dict.fromkeys(dropped))


def are_comparable(blocks: Iterable[TimedBlock | ProfiledBlock]) -> bool:
    """Whether drift does not make a difference between the modes of these blocks.

    It does not where the blocks of both lie around the same place, as in ``OSSO``, or where they are enough to tell it.
    """
    places: dict[Mode, list[int]] = {mode: [] for mode in Mode}
    for block in blocks:
        places[block.mode].append(block.block)
    overlapped, sequential = places.values()
    if min(len(overlapped), len(sequential)) < 2:
        return False
    balanced = fmean(overlapped) == fmean(sequential)
    return balanced or len(overlapped) + len(sequential) >= MIN_BLOCKS_OF_TREND
