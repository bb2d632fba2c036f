"""The settled difference between the modes, and the series of steps that it is fitted to: plain data."""

from __future__ import annotations

import enum
import math

import msgspec

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode

# Maximum half-width of a resolved interval, as a multiple of the largest of the settled difference, the short blocks'
# and one percentage point.
_WIDEST, _LEAST = 4.0, 0.01
# And at all looks: from half to twice. An extrapolated value may be so large that any interval is narrow next to it.
_TWICE = math.log(2)
_LETTERS = {"O": Mode.OVERLAPPED, "S": Mode.SEQUENTIAL}


class StepSeries(msgspec.Struct, frozen=True):
    """Consecutive steps of a window on one rank, in order.

    ``modes`` has a letter for each: ``O`` overlapped, ``S`` sequential; lower case if its time does not count.
    """

    first_step: int
    step_ms: tuple[float, ...]
    modes: str

    @classmethod
    def of(cls, first_step: int, steps: list[tuple[Mode, float, bool]]) -> StepSeries:
        """A series, from each step's mode, its time in milliseconds, and whether that counts."""
        letters = {mode: letter for letter, mode in _LETTERS.items()}
        modes = [letters[mode] if counts else letters[mode].lower() for mode, _, counts in steps]
        return cls(first_step, tuple([round(time_ms, 4) for _, time_ms, _ in steps]), "".join(modes))


class Verdict(enum.Enum):
    """Which value of the difference applies to training that keeps one mode."""

    SHORT = "short blocks"
    SETTLED = "settled"
    NOT_SETTLED = "not settled"


class Settled(msgspec.Struct, frozen=True):
    """How much longer a step is without overlap once the mode has lasted, over a run's windows so far.

    Attributes:
        value: the settled difference, as a fraction of an overlapped step.
        ci_low, ci_high: its 95 % interval at one look.
        short: the same in the short blocks of the windows, of ``short_steps`` each.
        constant_steps: time constant of effects that follow the mode, in steps; 0 if there are none.
        verdict: which of the values applies.
        at_least: if not settled, the minimum size of the difference, with its sign; None otherwise, and
            if the difference shrinks.
        after_steps: maximum steps in one mode after a change.
        all_looks_low, all_looks_high: its 95 % interval at all looks while windows are added; None in records of
            earlier versions.

    Raises:
        ValueError: a step's time would be zero, negative or unknown.
    """

    value: float
    ci_low: float
    ci_high: float
    short: float
    short_steps: int
    constant_steps: float
    verdict: Verdict
    at_least: float | None
    after_steps: int
    num_steps: int
    num_windows: int
    all_looks_low: float | None = None
    all_looks_high: float | None = None

    def __post_init__(self) -> None:
        optional = (self.at_least, self.all_looks_low, self.all_looks_high)
        for longer in (self.value, self.ci_low, self.ci_high, self.short, *optional):
            if longer is not None and not -1 < longer < math.inf:
                raise ValueError(f"a step cannot take {longer} of an overlapped step longer")

    @property
    def resolved(self) -> bool:
        """Whether the interval is narrow enough to say more than the difference's sign.

        Windows without enough steps in one mode, or with noise, leave open what happens after a long time.
        """
        half = _half_width(self.ci_low, self.ci_high)
        narrow = half <= _WIDEST * max(abs(math.log1p(self.value)), abs(math.log1p(self.short)), _LEAST)
        return narrow and _half_width(self.estimate.ci_low, self.estimate.ci_high) <= _TWICE

    @property
    def headlined(self) -> bool:
        """Whether a headline has it: it is resolved, or the short blocks alone are not the answer."""
        return self.resolved or self.verdict is not Verdict.SHORT

    @property
    def holds_at_all_looks(self) -> bool:
        return self.all_looks_low is not None and self.all_looks_high is not None

    @property
    def estimate(self) -> Estimate:
        """With the interval for all looks if it is known: the wider one, because no step shows the settled value."""
        low, high = self.all_looks_low, self.all_looks_high
        if low is None or high is None:
            low, high = self.ci_low, self.ci_high
        return Estimate(self.value, low, high, self.num_steps, self.num_windows)


def _half_width(low: float | None, high: float | None) -> float:
    return math.inf if low is None or high is None else (math.log1p(high) - math.log1p(low)) / 2
