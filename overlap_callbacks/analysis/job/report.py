"""From the part of all ranks heard to the report."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.aggregate import aggregate_windows
from overlap_callbacks.analysis.job.part import JobPart
from overlap_callbacks.analysis.results.report import OverlapReport


def report_of(
    part: JobPart,
    *,
    world_size: int,
    every_n_steps: int,
    control: bool = False,
    problems: Sequence[str] = (),
    tokens_per_step: int | None = None,
) -> OverlapReport:
    """The report of the ranks of a part. The arguments are those of ``aggregate_windows``."""
    return aggregate_windows(
        part.windows,
        world_size=world_size,
        every_n_steps=every_n_steps,
        control=control,
        problems=problems,
        tokens_per_step=tokens_per_step,
    )
