"""Steps that took far longer than others of their mode: somebody's save, an evaluation, a core taken away.

They are excluded from both modes by one rule, which examines each mode separately. If it excludes many more steps of
one mode than of the other, the stalls may belong to that mode, and all steps count.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.sums import grouped

# A step is excluded if it exceeds the median of comparable steps by more than both.
_MIN_SHARE = 0.1
_MIN_DEVIATIONS = 5.0
_MAD_TO_SD = 1.4826
# Minimum number of comparable steps to tell which of them is too long.
_MIN_ALIKE = 4
# Probability that stalls which hit both modes equally are split this unevenly.
_CHANCE = 0.01
_MAX_NAMED = 3


class LeftOut(NamedTuple):
    """Steps of one part of a window that took far longer than comparable ones; shape (number of steps,).

    They count anyway if ``kept``, because nearly all are of one mode.
    """

    far: npt.NDArray[np.bool_]
    kept: bool


def far_longer(step_ms: Sequence[float], like: Sequence[Hashable], sequential: Sequence[bool]) -> LeftOut:
    """The steps that took far longer than others of their mode.

    Args:
        step_ms: duration of each step, without the effect of the job's rhythms.
        like: steps with equal values are compared: the same mode, kind and so on.
        sequential: whether the step is of the sequential side.
    """
    times = np.asarray(step_ms, dtype=np.float64)
    far = np.zeros(len(times), dtype=bool)
    for rows in grouped(range(len(like)), lambda step: like[step]).values():
        if len(rows) >= _MIN_ALIKE:
            median = float(np.median(times[rows]))
            deviation = _MAD_TO_SD * float(np.median(np.abs(times[rows] - median)))
            far[rows] = times[rows] > median + max(_MIN_SHARE * median, _MIN_DEVIATIONS * deviation)
    of_sequential = int(np.count_nonzero(far & np.asarray(sequential, dtype=bool)))
    return LeftOut(far, are_of_one_mode(int(np.count_nonzero(far)) - of_sequential, of_sequential))


def are_of_one_mode(overlapped: int, sequential: int) -> bool:
    """Whether stalls that hit both modes equally would rarely be split like this: an exact binomial test, two-sided."""
    total, most = overlapped + sequential, max(overlapped, sequential)
    # By logarithms: a long run has thousands.
    of_all = math.lgamma(total + 1) - total * math.log(2)
    chances = [
        math.exp(of_all - math.lgamma(number + 1) - math.lgamma(total - number + 1))
        for number in range(most, total + 1)
    ]
    return bool(total) and 2 * math.fsum(chances) < _CHANCE


def stalls_of_a_run(left_out: Iterable[tuple[int, int]]) -> str:
    """A sentence if stalls belong to one mode over a run's windows, which a single window rarely shows; else empty.

    ``left_out``: the overlapped and the sequential steps excluded from each window.
    """
    windows = list(left_out)
    overlapped, sequential = sum([window[0] for window in windows]), sum([window[1] for window in windows])
    if not are_of_one_mode(overlapped, sequential):
        return ""
    mode = "overlapped" if overlapped > sequential else "sequential"
    return (
        f"Stalls belong to {mode} steps: of those that took far longer than others of their mode, {overlapped:,} were "
        f"overlapped and {sequential:,} sequential in {count(len(windows), 'window')}, and the difference of the modes "
        f"is without them."
    )


def stalls_in_words(
    overlapped: Sequence[int], sequential: Sequence[int], *, kept: bool = False, what: str = "step"
) -> str:
    """The steps that were excluded from a window, or ``kept``, by number; ``what`` they are, e.g. ``profiled step``."""
    steps = sorted([*overlapped, *sequential])
    named = ", ".join(map(str, steps[:_MAX_NAMED])) + (", ..." if len(steps) > _MAX_NAMED else "")
    numbers = f"overlapped {len(overlapped)}, sequential {len(sequential)}"
    if kept:
        return (
            f"{count(len(steps), what)} took far longer than others of their mode, nearly all in one mode ({numbers}): "
            f"all of them count [OC344]"
        )
    return (
        f"{count(len(steps), what)} took far longer than others of {'its' if len(steps) == 1 else 'their'} mode and "
        f"{'is' if len(steps) == 1 else 'are'} left out ({numbers}; step{'s' * (len(steps) > 1)} {named}): wrap a save "
        f"or an evaluation inside the loop in `with monitor.pause():` [OC343]"
    )
