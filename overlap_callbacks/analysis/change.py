"""Finds lasting changes of a figure, value by value, at a stated rate of false alarms. Pure.

A cumulative sum in the form of a change-point test: for each split of the latest values into before and after, the
likelihood of a step of one standard deviation is compared with that of none, and the best split counts. Nothing about
the level is known beforehand, so a step must show against the error of the values before it as well.

- A single value says at most two and a half deviations, so one or two outliers are no change.
- The deviation of a mean comes from the scatter of the values themselves around both levels, and is wider if values
  next to each other are alike.
- After a change only the values since then count, so a slowdown becomes its own past.

``benchmarks/change.py`` has the false alarms and the delays for every kind of noise that this library simulates.

Sources: E. S. Page, "Continuous Inspection Schemes" (Biometrika 41, 1954); G. Lorden, "Procedures for Reacting to a
Change in Distribution" (Annals of Mathematical Statistics 42, 1971): the time between false alarms grows as the
exponential of the threshold; D. M. Hawkins, P. Qiu, C. W. Kang, "The Changepoint Model for Statistical Process Control"
(Journal of Quality Technology 35, 2003): unknown levels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks import _validation

Floats = npt.NDArray[np.float64]

# Windows between false alarms, of all watched figures together.
WINDOWS_PER_FALSE_ALARM = 1000
# Values before the first alarm, and on each side of a change.
LEAST_VALUES = 20
_LEAST_BEFORE, _LEAST_AFTER = 10, 3
# Values kept, and the longest stretch after a change that is looked for.
_MOST_VALUES, _MOST_AFTER = 300, 100
_MOST_DEVIATIONS = 2.5
_MAD_TO_SD = 1.4826
# The step, in standard deviations of a value, that is found soonest.
_STEP = 1.0
# Values between false alarms are about the exponential of the threshold plus the first of these. With fewer values
# behind it a detector needs a threshold that is higher by the second over their number (``benchmarks/change.py``).
_LONGER, _FOR_FEW = 0.8, 30.0
# By how much a value raises the statistic at most.
_MOST_RAISED = _STEP * _MOST_DEVIATIONS - _STEP**2 / 2
_MOST_ALIKE = 0.95
# Within so many values a step of ``smallest_step`` is found in 95 % of cases.
WITHIN_VALUES = 20
_QUANTILE = 1.645
_ROUNDING = 1e-9


class Change(NamedTuple):
    """A lasting change of a figure.

    Attributes:
        first: position of the first value after it, counted from the first value of all.
        found: position of the value with which it was found.
        before, after: median value on each side.
        deviation: standard deviation of one value around these.
    """

    first: int
    found: int
    before: float
    after: float
    deviation: float


class ChangeDetector:
    """Watches one figure.

    Args:
        values_per_false_alarm: mean number of values between two false alarms, at least 100; with several figures,
            their number times what all of them may have together.
        least_deviation: of a value, assumed if values vary less: far smaller steps are not sought.

    Raises:
        TypeError, ValueError: ``values_per_false_alarm`` has the wrong type or value.
    """

    def __init__(self, values_per_false_alarm: float, least_deviation: float = _ROUNDING) -> None:
        number = _validation.positive("values_per_false_alarm", values_per_false_alarm)
        self._least = least_deviation
        self._threshold = math.log(number) - _LONGER
        self._values: list[float] = []
        self._dropped = 0  # values before those kept
        self._deviation = math.nan
        self._wait = 0  # values that cannot make a change show

    def add(self, value: float) -> Change | None:
        """The change that shows with this value; None for none, or for a value that is not finite."""
        if not math.isfinite(value):
            self._dropped += 1
            return None
        self._values.append(value)
        if len(self._values) > _MOST_VALUES:
            del self._values[0]
            self._dropped += 1
        number = len(self._values)
        self._wait -= 1
        if number < LEAST_VALUES or self._wait >= 0:
            return None
        values = np.array(self._values)
        statistic, self._deviation = _best_split(_limited(values, self._least), self._least)
        missing = self._threshold + _FOR_FEW / number - statistic
        if missing >= 0:
            self._wait = int(missing / _MOST_RAISED)
            return None
        split = _begins(values)
        after = number - split
        before, since = float(np.median(values[:split])), float(np.median(values[split:]))
        deviation = self._deviation
        self.keep(after)
        return Change(self._dropped, self._dropped + after - 1, before, since, deviation)

    def keep(self, number: int) -> None:
        """Start anew with the latest values, so many: the job has changed before them."""
        drop = max(0, len(self._values) - number)
        del self._values[:drop]
        self._dropped += drop
        self._deviation, self._wait = math.nan, 0

    @property
    def smallest_step(self) -> float | None:
        """The step that would be found within 20 values in 95 % of cases; None with too few values."""
        number = len(self._values)
        if number < LEAST_VALUES or math.isnan(self._deviation):
            return None
        root = math.sqrt(WITHIN_VALUES * number / (WITHIN_VALUES + number))
        return self._deviation * (
            _STEP / 2 + (self._threshold + _FOR_FEW / number) / (_STEP * root * root) + _QUANTILE / root
        )


def changes(values: Iterable[float], values_per_false_alarm: float) -> tuple[list[Change], float | None]:
    """All changes of a figure over a run, and the step that would be found after the last value."""
    detector = ChangeDetector(values_per_false_alarm)
    found = [change for value in values if (change := detector.add(value)) is not None]
    return found, detector.smallest_step


def _limited(values: Floats, least: float) -> Floats:
    """Distances from the median, at most two and a half robust deviations."""
    values = values - np.median(values)
    limit = _MOST_DEVIATIONS * max(least, _MAD_TO_SD * float(np.median(np.abs(values))))
    return np.clip(values, -limit, limit)


def _begins(values: Floats) -> int:
    """Position from which values lie around another level: closest to the medians of both sides."""
    number = len(values)
    splits = range(max(_LEAST_BEFORE, number - _MOST_AFTER), number)
    misses = [sum(float(np.abs(side - np.median(side)).sum()) for side in np.split(values, [k])) for k in splits]
    return splits[int(np.argmin(misses))]


def _best_split(values: Floats, least: float) -> tuple[float, float]:
    """Log likelihood ratio of the likeliest change, and the deviation of a value."""
    number = len(values)
    after = np.arange(_LEAST_AFTER, min(_MOST_AFTER, number - _LEAST_BEFORE) + 1)
    sums = np.cumsum(values[::-1])
    before = number - after
    steps = np.abs(sums[after - 1] / after - (sums[-1] - sums[after - 1]) / before)
    weights = after * before / number
    best = int(np.argmax(steps * np.sqrt(weights)))
    split = int(before[best])
    rest = np.concatenate([values[:split] - values[:split].mean(), values[split:] - values[split:].mean()])
    squares = float(rest @ rest)
    deviation = math.sqrt(squares / (number - 2))
    if deviation > least:
        alike = float(rest[1:] @ rest[:-1]) / squares + 1 / number
        alike = min(max(alike, 0.0), _MOST_ALIKE)
        deviation *= math.sqrt((1 + alike) / (1 - alike))
    deviation = max(deviation, least)
    ratios = weights * (_STEP * steps / deviation - _STEP**2 / 2)
    return float(ratios.max()), deviation
