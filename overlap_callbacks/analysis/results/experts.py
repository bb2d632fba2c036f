"""How evenly a mixture of experts spreads its tokens over the expert ranks: plain data."""

from __future__ import annotations

import msgspec


class StepExperts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The all-to-alls of one rank's step that carry tokens to the experts.

    Attributes:
        step: its number.
        in_window: whether it was a step of a window; else one that was sampled between windows.
        all_to_alls: those that dispatch tokens, with split sizes; not those that return them.
        sent_bytes, received_bytes: that the rank sends and receives in them.
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
    """What one rank saw of the experts' tokens.

    Attributes:
        dimension: of parallelism that the group serves.
        group_size: expert ranks of the group.
        position: the rank's place among them: ranks at the same place have the same experts.
        stage: of its pipeline.
        steps: by number, ascending.
    """

    dimension: str
    group_size: int
    position: int
    stage: int
    steps: tuple[StepExperts, ...]


class ExpertStep(msgspec.Struct, frozen=True):
    """How unevenly the tokens of one step were spread, over all ranks.

    Attributes:
        step: its number.
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
    """How evenly the tokens are spread over the expert ranks: means over the steps.

    Attributes:
        dimension: of parallelism that the groups serve.
        group_size: expert ranks of a group.
        num_ranks: ranks that were heard.
        num_steps: steps that the figures rest on.
        num_sampled: those of them that were sampled between windows.
        all_to_alls: that dispatch tokens, of a rank and step.
        dispatched_bytes: that a rank sends in them in a step.
        load_max_over_mean, load_cv, split_max_over_mean, split_cv: as in ``ExpertStep``.
        highest_rank: the rank that received most.
        highest_bytes: what it received in a step.
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
