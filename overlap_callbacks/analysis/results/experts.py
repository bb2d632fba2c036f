"""How evenly a mixture of experts spreads its tokens over the expert ranks: plain data."""

from __future__ import annotations

import msgspec


class StepExperts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The all-to-alls of one rank's step that dispatch tokens to the experts, and what it sends and receives in them.

    Attributes:
        in_window: whether it was a step of a window; otherwise sampled between windows.
        all_to_alls: those that dispatch tokens, with split sizes; not those that return them.
        split_max_over_mean, split_cv: of what the rank sends to each expert rank: the largest over the mean, and the
            coefficient of variation; means over the all-to-alls.
    """

    step: int
    in_window: bool
    all_to_alls: int
    sent_bytes: int
    received_bytes: int
    split_max_over_mean: float
    split_cv: float


class RankExperts(msgspec.Struct, frozen=True):
    """One rank's view of the experts' tokens; its steps are ascending.

    ``position``: the rank's index in its group; ranks with the same index have the same experts.
    """

    dimension: str
    group_size: int
    position: int
    stage: int
    steps: tuple[StepExperts, ...]


class ExpertStep(msgspec.Struct, frozen=True):
    """How unevenly the tokens of one step were spread, over all ranks.

    Attributes:
        in_window: whether it was a step of a window; otherwise sampled between windows.
        load_max_over_mean: bytes that an expert rank receives in the step, maximum over mean; for the stages of a
            pipeline, the highest.
        load_cv: coefficient of variation of the same.
        split_max_over_mean, split_cv: of what one rank sends to each expert rank in one all-to-all; means.
    """

    step: int
    in_window: bool
    load_max_over_mean: float
    load_cv: float
    split_max_over_mean: float
    split_cv: float


class ExpertDetails(msgspec.Struct, frozen=True):
    """How evenly the tokens are spread, step by step and by expert rank.

    Attributes:
        steps: of the window, and sampled since the previous window; some of them if there are many.
        by_expert_rank: bytes that a rank receives in a step, by its index in its group; mean. Empty for large groups.
    """

    steps: tuple[ExpertStep, ...]
    by_expert_rank: tuple[float, ...] = ()


class ExpertLoads(msgspec.Struct, frozen=True):
    """How evenly the tokens are spread over the expert ranks: means over the steps; see ``ExpertStep``.

    Attributes:
        num_ranks: ranks that reported.
        num_sampled: how many of ``num_steps`` were sampled between windows.
        all_to_alls, dispatched_bytes: per rank and step, those that dispatch tokens, and the bytes sent in them.
        highest_rank, highest_bytes: the rank that received most, and its bytes per step.
    """

    dimension: str
    group_size: int
    num_ranks: int
    num_steps: int
    num_sampled: int
    all_to_alls: float
    dispatched_bytes: float
    load_max_over_mean: float
    load_cv: float
    split_max_over_mean: float
    split_cv: float
    highest_rank: int = -1
    highest_bytes: float = 0.0
