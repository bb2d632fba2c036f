"""Finds lasting changes of a figure, value by value, at a stated rate of false alarms. Pure.

For each split of the latest values into before and after, the difference of the means is divided by its standard error.
It is a change if that exceeds a limit for this number of values after the split. Two limits share the false alarms:

- That of a cumulative sum: a large step shows after few values, a small one later.
- A lower one for the latest 20 values, so that the step that is promised to be found within 20 values is small.

Nothing about the level is known beforehand, so a step must show against the error of the values before it as well.

- A single value says at most two and a half deviations, so one or two outliers are no change.
- The deviation of a mean comes from the scatter of the values themselves around both levels, and is wider if values
  next to each other are alike. With few values it is uncertain, so the limits are those of a likelihood ratio with
  unknown deviation.
- After a change only the values since then count, so a slowdown becomes its own past.

``benchmarks/change.py`` has the false alarms and the delays for every kind of noise that this library simulates.

Sources: E. S. Page, "Continuous Inspection Schemes" (Biometrika 41, 1954); G. Lorden, "Procedures for Reacting to a
Change in Distribution" (Annals of Mathematical Statistics 42, 1971): the time between false alarms grows as the
exponential of the threshold; D. M. Hawkins, P. Qiu, C. W. Kang, "The Changepoint Model for Statistical Process Control"
(Journal of Quality Technology 35, 2003): unknown levels; P. Bauer, P. Hackl, "The Use of MOSUMS for Quality Control"
(Technometrics 20, 1978): a window of fixed length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks import _validation

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Windows between false alarms, of all watched figures together.
WINDOWS_PER_FALSE_ALARM = 1000
# Values before the first alarm, and on each side of a change.
LEAST_VALUES = 20
_LEAST_BEFORE, _LEAST_AFTER = 10, 3
# Values kept, and the longest stretch after a change that is looked for.
_MOST_VALUES, _MOST_AFTER = 300, 100
_MOST_DEVIATIONS = 2.5
_QUARTILES_TO_SD = 1.349
# The cumulative sum is made for the step that it finds after about so many values.
_SOON = 12
# Values between false alarms are about the exponential of the cumulative sum's threshold less the first of these, or of
# half the square of the other limit plus the second. With few values limits are higher by the third over their number.
_SUM_ABOVE, _WINDOW_BELOW, _FOR_FEW = 0.3, 2.05, 2.0
_MOST_ALIKE = 0.95
# Within so many values a step of ``smallest_step`` is found in 95 % of cases.
WITHIN_VALUES = 20
_QUANTILE = 1.645
_HALVINGS = 40
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
        self._threshold = math.log(number) + _SUM_ABOVE
        self._sum_step = math.sqrt(2 * self._threshold / _SOON)  # in standard deviations of a value
        self._window_limit = math.sqrt(2 * (math.log(number) - _WINDOW_BELOW))
        self._values: list[float] = []
        self._dropped = 0  # values before those kept

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
        if number < LEAST_VALUES:
            return None
        values = np.array(self._values)
        splits, errors, deviation = _splits(np.clip(values, *self._range(values)), self._least)
        if np.all(_certain(errors, number) < self._limits(splits, number)):
            return None
        split = _begins(values)
        after = number - split
        before, since = float(np.median(values[:split])), float(np.median(values[split:]))
        self.keep(after)
        return Change(self._dropped, self._dropped + after - 1, before, since, deviation)

    def keep(self, number: int) -> None:
        """Start anew with the latest values, so many: the job has changed before them."""
        drop = max(0, len(self._values) - number)
        del self._values[:drop]
        self._dropped += drop

    @property
    def smallest_step(self) -> float | None:
        """The step that would be found within 20 values in 95 % of cases; None with too few values."""
        number = len(self._values)
        if number < LEAST_VALUES:
            return None
        values = np.array(self._values)
        low, high = self._range(values)
        limited = np.clip(values, low, high)
        _, _, deviation = _splits(limited, self._least)
        number += WITHIN_VALUES
        limit = float(self._limits(np.array([WITHIN_VALUES]), number)[0])
        error = deviation / math.sqrt(WITHIN_VALUES * (number - WITHIN_VALUES) / number)
        wanted = error * (math.sqrt(number * math.expm1(limit**2 / number)) + _QUANTILE)
        # Limited values move by less than the step.
        enough, too_small = high - low, 0.0
        for _ in range(_HALVINGS):
            step = (too_small + enough) / 2
            moved = float(np.mean(np.clip(values + step, low, high) - limited))
            too_small, enough = (step, enough) if moved < wanted else (too_small, step)
        return max(enough, wanted)

    def _range(self, values: Floats) -> tuple[float, float]:
        """What a value may say at least and at most, from the quartiles: half of the values may lie apart."""
        ordered = np.sort(values)
        low, high = ordered[len(values) // 4], ordered[-1 - len(values) // 4]
        reach = _MOST_DEVIATIONS * max(self._least, (high - low) / _QUARTILES_TO_SD)
        return (low + high) / 2 - reach, (low + high) / 2 + reach

    def _limits(self, after: Ints, number: int) -> Floats:
        """Standard errors from which splits are a change, by their number of values after."""
        root = np.sqrt(after * (number - after) / number)
        limits = self._sum_step * root / 2 + self._threshold / (self._sum_step * root)
        window = after == WITHIN_VALUES
        limits[window] = np.minimum(limits[window], self._window_limit)
        return np.asarray(limits * (1 + _FOR_FEW / number))


def changes(values: Iterable[float], values_per_false_alarm: float) -> tuple[list[Change], float | None]:
    """All changes of a figure over a run, and the step that would be found after the last value."""
    detector = ChangeDetector(values_per_false_alarm)
    found = [change for value in values if (change := detector.add(value)) is not None]
    return found, detector.smallest_step


def _certain(errors: Floats, number: int) -> Floats:
    """Numbers of standard errors as they would be if the deviation were known: the same likelihood ratio."""
    return np.asarray(np.sqrt(number * np.log1p(errors**2 / number)))


def _begins(values: Floats) -> int:
    """Position from which values lie around another level: closest to the medians of both sides."""
    number = len(values)
    splits = range(max(_LEAST_BEFORE, number - _MOST_AFTER), number)
    misses = [sum(float(np.abs(side - np.median(side)).sum()) for side in np.split(values, [k])) for k in splits]
    return splits[int(np.argmin(misses))]


def _splits(values: Floats, least: float) -> tuple[Ints, Floats, float]:
    """By split: values after it, and by how many standard errors both sides differ; and the deviation of a value."""
    number = len(values)
    after = np.arange(_LEAST_AFTER, min(_MOST_AFTER, number - _LEAST_BEFORE) + 1)
    sums = np.cumsum(values[::-1])
    before = number - after
    steps = np.abs(sums[after - 1] / after - (sums[-1] - sums[after - 1]) / before)
    roots = np.sqrt(after * before / number)
    split = int(before[np.argmax(steps * roots)])
    rest = np.concatenate([values[:split] - values[:split].mean(), values[split:] - values[split:].mean()])
    squares = float(rest @ rest)
    deviation = math.sqrt(squares / (number - 2))
    if deviation > least:
        alike = float(rest[1:] @ rest[:-1]) / squares + 1 / number
        alike = min(max(alike, 0.0), _MOST_ALIKE)
        deviation *= math.sqrt((1 + alike) / (1 - alike))
    deviation = max(deviation, least)
    return after, steps * roots / deviation, deviation
