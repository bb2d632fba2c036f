"""How evenly a mixture of experts spreads its tokens over the expert ranks: plain data."""

from __future__ import annotations

import msgspec


class StepExperts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The all-to-alls of one rank's step that carry tokens to the experts, with what it sends and receives in them.

    Attributes:
        in_window: whether it was a step of a window; else one that was sampled between windows.
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
    """What one rank saw of the experts' tokens; its steps are ascending.

    ``position`` is the rank's place in its group: ranks at the same place have the same experts.
    """

    dimension: str
    group_size: int
    position: int
    stage: int
    steps: tuple[StepExperts, ...]


class ExpertStep(msgspec.Struct, frozen=True):
    """How unevenly the tokens of one step were spread, over all ranks.

    Attributes:
        in_window: whether it was a step of a window; else one that was sampled between windows.
        load_max_over_mean: bytes that an expert rank receives in the step, the most over the mean; of the stages of a
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
        steps: of the window, and those sampled since the window before; of many, some.
        by_expert_rank: bytes that a rank receives in a step, by its place in its group; mean. Empty for large groups.
    """

    steps: tuple[ExpertStep, ...]
    by_expert_rank: tuple[float, ...] = ()


class ExpertLoads(msgspec.Struct, frozen=True):
    """How evenly the tokens are spread over the expert ranks: means over the steps; see ``ExpertStep``.

    Attributes:
        num_ranks: ranks that were heard.
        num_sampled: steps that were sampled between windows, of ``num_steps``.
        all_to_alls, dispatched_bytes: of a rank and step, those that dispatch tokens, and what is sent in them.
        highest_rank, highest_bytes: the rank that received most, and what it received in a step.
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
