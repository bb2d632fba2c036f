"""How evenly tokens were spread over expert ranks, from the split sizes that the gate saw."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from overlap_callbacks.analysis.experts import AllToAll, rank_experts
from overlap_callbacks.analysis.results.experts import RankExperts
from overlap_callbacks.gate.collectives import Collective
from overlap_callbacks.monitor.window import MeasuredStep, SampledStep

# Steps of a window that are looked at: each may have thousands of all-to-alls, and training goes on meanwhile.
_MAX_STEPS = 16
# The interpreter is given to others for so long after each of them.
_PAUSE_S = 0.0005


def experts_of(
    first_step: int, steps: Sequence[MeasuredStep], sampled: Sequence[SampledStep], rank: int, stage: int
) -> RankExperts | None:
    """What the steps of a window, and those sampled before it, say; None without all-to-alls that have split sizes.

    Args:
        first_step: number of the window's first step.
        steps: of the window.
        sampled: between the window before and this one.
        rank: of this process.
        stage: of its pipeline.
    """
    whole = [step for step in steps if _is_whole(step)]
    every = max(1, -(-len(whole) // _MAX_STEPS))
    found: list[tuple[int, bool, Sequence[AllToAll]]] = []
    for step in whole[::every]:
        found.append((first_step + step.plan.offset, True, all_to_alls(step.log.collectives)))
        time.sleep(_PAUSE_S)
    found += [(one.step, False, all_to_alls(one.calls)) for one in sampled]
    return rank_experts(rank, stage, found)


def _is_whole(step: MeasuredStep) -> bool:
    log = step.log
    return not (log.dropped or log.compiled or log.captured or step.skipped)


def all_to_alls(collectives: Iterable[Collective]) -> list[AllToAll]:
    """The all-to-alls that have split sizes."""
    return [
        AllToAll(
            call.group.name, call.dimension, call.group.ranks, tuple(call.splits[1]), tuple(call.splits[0]),
            call.bytes_in, call.bytes_out,
        )
        for call in collectives
        if call.splits is not None
    ]  # fmt: skip
