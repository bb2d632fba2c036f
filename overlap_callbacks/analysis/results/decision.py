"""What a run has decided about its arms so far: plain data."""

from __future__ import annotations

import enum

import msgspec

from overlap_callbacks.analysis.results.estimate import Estimate


class Why(enum.Enum):
    """Why an arm is no longer measured."""

    SLOWER = "slower"  # than the job as configured, with certainty
    NO_GAIN = "no gain"  # it wins less than finding out is worth
    BEHIND = "behind"  # slower than ``than``, with certainty
    NOT_AHEAD = "not ahead"  # not known to be faster than ``than``, after as many windows as it took to find that
    STOPPED = "stopped"  # it was the best, and stopped winning
    NOT_KEPT = "not kept"  # its windows show that it wins, and the job is no faster while it is on between them
    UNMEASURED = "unmeasured"  # its windows do not count, or the job cannot have it


class LeftOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """An arm that is no longer measured.

    Attributes:
        window: after which it was left out.
        speedup: by its windows so far, with an interval for all looks; None without any.
        than: the arm that it was compared with; empty for the job as configured.
        reason: in words, if it could not be measured.
    """

    arm: str
    window: int
    why: Why
    num_windows: int
    speedup: Estimate | None = None
    than: str = ""
    reason: str = ""


class Winner(msgspec.Struct, frozen=True, omit_defaults=True):
    """An arm that is faster than the job as configured, with certainty.

    Attributes:
        window: after which it was chosen.
        speedup: by its windows so far; its interval holds at all looks, and for all arms together.
        line: what to put into the job to have it for good; empty if the arm does not say.
        caution: why it may only be recommended, in words; empty if it may be kept.
    """

    arm: str
    window: int
    num_windows: int
    speedup: Estimate
    line: str = ""
    caution: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is decided after a window.

    Attributes:
        window, first_step: the window that led to it.
        keeps: whether ``best`` is turned on; False if it is only recommended.
        wrong: share of jobs in which an arm is chosen that is slower than the job as configured, at most.
        best: the fastest arm that does not change results; None if none is known to be faster.
        advised: the fastest of those that may only be recommended: they change results, or are sequential.
        left: arms that are still measured, ``best`` included.
        left_out: arms that are not, in this order.
        would_show: the least speed-up that would be known by now for each arm of ``left``; None before its first
            interval.
        cost_s: training time that all windows have cost so far, at the charged (upper) end; what arms that are kept
            have cost beyond what they had won; and what an earlier start had not paid for.
        training_s: training time since the first of them began.
        budget: what all that costs, as a share of ``training_s``, at most, but for the dearest window.
    """

    window: int
    first_step: int
    keeps: bool
    wrong: float
    budget: float
    cost_s: float
    training_s: float
    best: Winner | None = None
    advised: Winner | None = None
    left: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    would_show: dict[str, float] = {}

    @property
    def kept(self) -> str:
        """The arm that is to be turned on between windows; empty for the user's own setting."""
        return self.best.arm if self.keeps and self.best is not None else ""

    @property
    def owed_s(self) -> float:
        """What training has not paid for yet."""
        return max(0.0, self.cost_s - self.budget * self.training_s)

    def is_news(self, before: Decision | None) -> bool:
        """Whether it says something else than the decision before it, apart from figures."""
        return before is None or self._choice != before._choice

    @property
    def _choice(self) -> object:
        names = [None if winner is None else winner.arm for winner in (self.best, self.advised)]
        return names, [(one.arm, one.why) for one in self.left_out]
