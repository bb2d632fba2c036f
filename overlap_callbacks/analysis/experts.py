"""How evenly a mixture of experts spreads its tokens, from the split sizes of all-to-alls. Pure.

There are two views. The **splits** are what one rank sends to each expert rank in one all-to-all: every layer and
micro-batch counts separately. The **load** is what an expert rank receives in a step, from all ranks and in all layers:
the work that it has to do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Annotated, NamedTuple

import msgspec

from overlap_callbacks.analysis.results.experts import (
    ExpertDetails,
    ExpertLoads,
    ExpertStep,
    RankExperts,
    StepExperts,
)
from overlap_callbacks.analysis.sums import each_sum, first, grouped, named_sum, struct_sum, table_sum

# Maximum steps that a part keeps, of a window and sampled before it. The same on every rank, so that they match.
MAX_STEPS = 64
# Maximum positions in a group, and stages times steps, that a part distinguishes.
MAX_POSITIONS = 256
MAX_ROWS = 1024
_ALL_STAGES = -2
# The dimension of expert groups; others are used only if there are none.
EXPERT = "expert"


class AllToAll(NamedTuple):
    """One all-to-all with split sizes, on one rank; ``ranks`` are in the group's order.

    Attributes:
        sent, received: rows sent to each of them, and received from each.
        bytes_in, bytes_out: of the rows sent, and received.
    """

    group: str
    dimension: str
    ranks: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    bytes_in: int
    bytes_out: int


def dispatches(calls: Iterable[AllToAll]) -> list[AllToAll]:
    """The all-to-alls that dispatch tokens to the experts; each is followed by a combine with transposed splits.

    The backward pass dispatches gradients with the same splits.
    """
    open_ones: Counter[tuple[str, tuple[int, ...], tuple[int, ...]]] = Counter()
    found = []
    for call in calls:
        returned = (call.group, call.received, call.sent)
        if open_ones.get(returned):
            open_ones[returned] -= 1
        else:
            open_ones[call.group, call.sent, call.received] += 1
            found.append(call)
    return found


def max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)


def variation(values: Sequence[float]) -> float:
    """The coefficient of variation: standard deviation over mean."""
    mean = sum(values) / len(values)
    return math.sqrt(sum([(value - mean) ** 2 for value in values]) / len(values)) / mean


def step_experts(step: int, calls: Sequence[AllToAll], *, in_window: bool) -> StepExperts | None:
    """One rank's step, from its all-to-alls of one kind of group, in order of issue; None if none carries anything."""
    found = dispatches(calls)
    splits = [call.sent for call in found if sum(call.sent) > 0]
    if not splits:
        return None
    return StepExperts(
        step=step,
        in_window=in_window,
        all_to_alls=len(found),
        sent_bytes=sum([call.bytes_in for call in found]),
        received_bytes=sum([call.bytes_out for call in found]),
        split_max_over_mean=sum([max_over_mean(sent) for sent in splits]) / len(splits),
        split_cv=sum([variation(sent) for sent in splits]) / len(splits),
    )


def rank_experts(rank: int, stage: int, steps: Sequence[tuple[int, bool, Sequence[AllToAll]]]) -> RankExperts | None:
    """One rank's result; None without an all-to-all that has split sizes.

    If there are several kinds of groups, expert groups count, else those with most bytes. ``steps`` have each step's
    number, whether it is a window's, and its all-to-alls.
    """
    sizes: Counter[tuple[bool, str, int]] = Counter()
    for _, _, calls in steps:
        for call in calls:
            sizes[call.dimension == EXPERT, call.dimension, len(call.sent)] += call.bytes_in + call.bytes_out
    if not sizes:
        return None
    kind = max(sizes, key=lambda one: (one[0], sizes[one], one))
    _, dimension, group_size = kind
    of_kind: list[tuple[int, bool, list[AllToAll]]] = [
        (step, in_window, [call for call in calls if (call.dimension, len(call.sent)) == (dimension, group_size)])
        for step, in_window, calls in steps
    ]
    ranks = next(call.ranks for _, _, calls in of_kind for call in calls)
    found = [one for step, in_window, calls in of_kind if (one := step_experts(step, calls, in_window=in_window))]
    if not found:
        return None
    position = ranks.index(rank) if rank in ranks else -1
    return RankExperts(dimension, group_size, position, stage, tuple(_some(found)))


def _some(steps: Sequence[StepExperts]) -> list[StepExperts]:
    """At most ``MAX_STEPS``, evenly spaced; the same on all ranks with the same steps."""
    in_order = sorted(steps, key=lambda one: one.step)
    if len(in_order) <= MAX_STEPS:
        return in_order
    return [in_order[round(place * (len(in_order) - 1) / (MAX_STEPS - 1))] for place in range(MAX_STEPS)]


# -- over the ranks


class Loads(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step over ranks of one stage.

    Attributes:
        total, squares, most: sums over the ranks of bytes received, and of their squares; the maximum.
        split_max_over_mean, split_cv: sums over the ranks.
    """

    step: int
    stage: int
    in_window: bool
    num_ranks: int
    total: float
    squares: float
    most: Annotated[float, max]
    split_max_over_mean: float
    split_cv: float


class ExpertSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Results of a set of ranks; empty if none has any.

    Attributes:
        num_ranks: ranks included; those in another kind of group are left out.
        num_steps, all_to_alls, sent_bytes: sums over ranks and steps.
        steps: by step and stage.
        positions: by position in the group, the bytes received, and number of steps of ranks; empty for large groups.
        highest: the most that any rank received per step, as the mean over its steps; and minus that rank, so that the
            lowest of equal ones counts.
    """

    dimension: Annotated[str, first] = ""
    group_size: Annotated[int, first] = 0
    num_ranks: int = 0
    num_steps: int = 0
    all_to_alls: int = 0
    sent_bytes: int = 0
    steps: Annotated[tuple[Loads, ...], _steps] = ()
    positions: Annotated[dict[int, tuple[int, int]], named_sum(each_sum)] = {}
    highest: Annotated[tuple[float, int], max] = (0.0, -1)


_rows = table_sum(Loads, 3)


def _steps(tables: Iterable[Iterable[Loads]]) -> tuple[Loads, ...]:
    rows = _rows(tables)
    if len(rows) > MAX_ROWS:  # in a pipeline with many stages, stages share rows
        rows = _rows([[msgspec.structs.replace(row, stage=_ALL_STAGES) for row in rows]])
    return rows[-MAX_ROWS:]


_add = struct_sum(ExpertSums)


def sums_of(rank: int, experts: RankExperts | None) -> ExpertSums:
    if experts is None:
        return ExpertSums()
    received = sum([one.received_bytes for one in experts.steps])
    number = len(experts.steps)
    fits = experts.position >= 0 and experts.group_size <= MAX_POSITIONS
    return ExpertSums(
        dimension=experts.dimension,
        group_size=experts.group_size,
        num_ranks=1,
        num_steps=number,
        all_to_alls=sum([one.all_to_alls for one in experts.steps]),
        sent_bytes=sum([one.sent_bytes for one in experts.steps]),
        steps=tuple([_loads(one, experts.stage) for one in experts.steps]),
        positions={experts.position: (received, number)} if fits else {},
        highest=(received / number, -rank),
    )  # fmt: skip


def _loads(one: StepExperts, stage: int) -> Loads:
    received = float(one.received_bytes)
    return Loads(
        one.step, stage, one.in_window, 1, received, received**2, received, one.split_max_over_mean, one.split_cv
    )


def add_experts(parts: Sequence[ExpertSums]) -> ExpertSums:
    """The results of all parts' ranks. If there are several kinds of groups, those with most bytes stay."""
    kinds = grouped([part for part in parts if part.num_ranks], lambda part: (part.dimension, part.group_size))
    if not kinds:
        return ExpertSums()
    sent = {kind: sum([part.sent_bytes for part in of_kind]) for kind, of_kind in kinds.items()}
    return _add(kinds[max(kinds, key=lambda kind: (kind[0] == EXPERT, sent[kind], kind))])


def pooled_experts(sums: ExpertSums) -> tuple[ExpertLoads | None, ExpertDetails | None]:
    by_step = grouped(sums.steps, lambda row: row.step).values()
    steps = [found for rows in by_step if (found := _expert_step(rows)) is not None][-MAX_STEPS:]
    if not steps:
        return None, None
    whole = len(sums.positions) == sums.group_size
    loads = ExpertLoads(
        dimension=sums.dimension,
        group_size=sums.group_size,
        num_ranks=sums.num_ranks,
        num_steps=len(steps),
        num_sampled=sum([not one.in_window for one in steps]),
        all_to_alls=sums.all_to_alls / sums.num_steps,
        dispatched_bytes=sums.sent_bytes / sums.num_steps,
        load_max_over_mean=fmean([one.load_max_over_mean for one in steps]),
        load_cv=fmean([one.load_cv for one in steps]),
        split_max_over_mean=fmean([one.split_max_over_mean for one in steps]),
        split_cv=fmean([one.split_cv for one in steps]),
        highest_rank=-sums.highest[1],
        highest_bytes=sums.highest[0],
    )
    by_rank = tuple([received / number for _, (received, number) in sorted(sums.positions.items())]) if whole else ()
    return loads, ExpertDetails(tuple(steps), by_rank)


def _expert_step(stages: Sequence[Loads]) -> ExpertStep | None:
    """One step; the stages of a pipeline, which have different layers, count separately."""
    loaded = [row for row in stages if row.total > 0]
    if not loaded:
        return None
    num_ranks = sum([row.num_ranks for row in loaded])
    variances = [
        row.num_ranks * max(0.0, row.squares * row.num_ranks / row.total**2 - 1.0) for row in loaded
    ]  # of each stage, (standard deviation / mean)^2
    return ExpertStep(
        step=stages[0].step,
        in_window=stages[0].in_window,
        load_max_over_mean=max([row.most * row.num_ranks / row.total for row in loaded]),
        load_cv=math.sqrt(math.fsum(variances) / num_ranks),
        split_max_over_mean=math.fsum([row.split_max_over_mean for row in loaded]) / num_ranks,
        split_cv=math.fsum([row.split_cv for row in loaded]) / num_ranks,
    )
