"""Which collective holds the step up? From steps in which some were delayed by known times.

In a causal window every step delays each collective of one set by 0, a or 2a, in balanced order. The *slope* is the
time by which the longest delay makes the step longer, over that delay: 1 if the step waits for the collective at once,
0 if there is as much slack. Delays that lengthen the step only from some length on show the slack: s = 2a (1 - slope).
(Coz, arXiv 1608.03676, delays everything else instead.)

What removing a collective wins is at most its length, if the step waits for it. The slope tells no more: one that
queues behind others may begin later at no cost, and yet those behind it would come earlier without it. Virtual speed-up
(all others delayed alike) is no better: in jobs of known gains it errs by 0.25 to 0.36 of a collective's length, the
slope by 0.26 to 0.40 (``benchmarks/causal.py``), and it delays hundreds of collectives to know of one. So it is not
offered. Nor does the slope's interval bound the gain: of those that the step waits for 4 to 59 % win less than slope
times length, by a tenth of the length or more (another path is as long), and 2 to 6 % more.

**The next step** may be the one that waits, or the one in which rank 0 feels what other stages waited for. So each
delay is held for two steps, and the second counts: it has what a delay costs in both. Without that, parameters that
are gathered for the next step would all seem to have slack (``benchmarks/causal.py``).

**Intervals** are over blocks, which have each level once: a block's own level drops out, and so does most of what slow
changes have in common with it. They hold for all sets tested together (Bonferroni), after each window of a set.

**Sets** are halved. Delaying more collectives never makes a step shorter, so no member of a set costs more than all of
it: a set that costs less than half of one member's delay clears all its members. The more members, the shorter is each
one's delay: halves that could not tell, by the intervals seen so far, are halved again at once.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.name_rules import collective_in_words, collective_of
from overlap_callbacks.analysis.results.causal import CausalWindow, DelayedCall, DelayedSet
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import CONFIDENCE, MIN_BLOCKS, t_quantile
from overlap_callbacks.analysis.sums import grouped

Floats = npt.NDArray[np.float64]

LEVELS = 3  # delays of 0, a and 2a
HELD = 2  # steps of each, of which the last counts
BLOCK_STEPS = LEVELS * HELD
# Each level is as often first, second and third of a block. No block begins with the longest or no delay where the one
# before ended with it: noise that lasts would make neighbouring blocks alike.
_ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 1, 0), (2, 0, 1))
# Below this slope's upper bound a collective does not hold the step up, above it the lower bound says that it does.
BLOCKING_FROM = 0.5
# Windows after which a collective stays inconclusive.
_MOST_WINDOWS = 5
# The longest delay of one collective, of a set, and its bounds in ms.
_OF_STEP, _SET_OF_STEP, _LEAST_MS, _MOST_MS = 0.1, 0.5, 0.2, 50.0


def call_in_words(call: DelayedCall) -> str:
    """E.g. ``all-gather of layers.3 (2nd)``."""
    kind = collective_in_words(call.operator).replace("_", "-")
    if not call.name:
        return f"{kind} {call.place + 1} of {call.group}"
    return f"{kind} of {call.name}{f' #{call.place + 1}' if call.place else ''}"


def row_of(call: DelayedCall) -> tuple[str, str]:
    """Kind and name of its row in ``CausalWindow.names``: of several in a step with a name, each has its own."""
    name = f"{call.name} #{call.place + 1}" if call.name and call.place else call.name
    return collective_of(call.operator), name or call_in_words(call)


def levels_of(num_steps: int, start: int = 0) -> tuple[int, ...]:
    """The level of delay of each step of a window; ``start`` turns the order."""
    blocks = itertools.islice(itertools.cycle(_ORDERS), start % len(_ORDERS), None)
    held = (level for block in blocks for level in block for _ in range(HELD))
    return tuple(itertools.islice(held, num_steps))


def longest_delay_ms(step_ms: float, num_members: int) -> float:
    """The longest delay (2a) of each member of a set, for steps of ``step_ms``."""
    return min(max(_OF_STEP * step_ms, _LEAST_MS), _SET_OF_STEP * step_ms / num_members, _MOST_MS)


class Verdict(enum.Enum):
    """What a slope says of a set."""

    BLOCKING = "holds the step up"
    SLACK = "has slack"
    INCONCLUSIVE = "inconclusive"


def _error_of(num_windows: int) -> float:
    """Share of the error that a set's interval may have after so many windows; 1 in all."""
    return 1 / (num_windows * (num_windows + 1))


@dataclass(frozen=True)
class Response:
    """How a set's delay lengthens the step.

    Attributes:
        slope: of the step time, over the longest delay of one member: 1 if the step waits for one of them.
        slack_ms: delay of each member that costs nothing; None if the slope's interval reaches 1 or it has none. At
            least so long if the step did not get longer at all.
        levels_ms: mean step time at each delay, less that without.
        num_windows: of the set.
        step_ms: mean step time without delay.
    """

    delayed: DelayedSet
    slope: Estimate
    slack_ms: Estimate | None
    levels_ms: tuple[float, ...]
    num_windows: int = 1
    step_ms: float = 0.0

    @property
    def half_width_ms(self) -> float:
        """Half the width of the interval, as a time of the step."""
        low, high = self.slope.ci_low, self.slope.ci_high
        return math.inf if low is None or high is None else (high - low) / 2 * self.delayed.delay_ms

    @property
    def alone(self) -> bool:
        """Whether it is of a single collective."""
        return len(self.delayed.members) == 1

    @property
    def label(self) -> str:
        """E.g. ``6 collectives: all-reduce of bucket 0 … bucket 5``."""
        members = self.delayed.members
        if self.alone:
            return call_in_words(members[0])
        # Without the parameters of a bucket.
        first, last = [call_in_words(member).partition(": ")[0] for member in (members[0], members[-1])]
        kind, of, rest = last.partition(" of ")
        return f"{len(members)} collectives: {first} … {rest if of and first.startswith(kind + of) else last}"

    @property
    def verdict(self) -> Verdict:
        low, high = self.slope.ci_low, self.slope.ci_high
        if low is None or high is None:
            return Verdict.INCONCLUSIVE
        # A set's slope adds up those of its members, and no member's exceeds it.
        if high < BLOCKING_FROM:
            return Verdict.SLACK
        return Verdict.BLOCKING if low > BLOCKING_FROM else Verdict.INCONCLUSIVE


def response_of(windows: Sequence[CausalWindow], confidence: float = CONFIDENCE) -> Response | None:
    """The response of one set to the delays of its windows; None with fewer than ``MIN_BLOCKS`` whole blocks."""
    slopes, longer, undelayed = [], [], []
    for window in windows:
        blocks = _blocks(window.levels, window.step_ms)
        longer.append(blocks - blocks[:, :1])
        undelayed.append(blocks[:, 0])
        slopes.append(longer[-1][:, -1] / window.delayed.delay_ms)
    of_blocks = np.concatenate(slopes) if slopes else np.zeros(0)
    if len(of_blocks) < MIN_BLOCKS:
        return None
    delayed = windows[-1].delayed
    slope = _mean(of_blocks, confidence)
    means = np.concatenate(longer).mean(axis=0)
    slack_ms, step_ms = _slack_ms(slope, delayed.delay_ms), float(np.concatenate(undelayed).mean())
    return Response(delayed, slope, slack_ms, tuple(means.tolist()), len(windows), step_ms)


def _blocks(levels: Sequence[int], step_ms: Sequence[float | None]) -> Floats:
    """Step times of whole blocks by level, each of the last step that has it; shape (blocks, levels)."""
    rows = []
    for start in range(0, len(levels) - BLOCK_STEPS + 1, BLOCK_STEPS):
        times = step_ms[start : start + BLOCK_STEPS]
        by_level = dict(zip(levels[start : start + BLOCK_STEPS], times, strict=True))
        if len(by_level) == LEVELS and all(time is not None for time in times):
            rows.append([by_level[level] for level in range(LEVELS)])
    return np.array(rows, dtype=np.float64).reshape(-1, LEVELS)


def _mean(values: Floats, confidence: float) -> Estimate:
    """The trimmed mean of blocks: a stall of a single step does not count."""
    number = len(values)
    cut = number // 8
    ordered = np.sort(values)
    kept = np.clip(values, ordered[cut], ordered[number - 1 - cut])
    degrees = max(1, number - 2 * cut - 2)  # neighbouring blocks share what changes slowly: benchmarks/causal.py
    # Tukey and McLaughlin's interval of a trimmed mean, of winsorised variance.
    mean = float(ordered[cut : number - cut].mean())
    error = float(kept.std(ddof=1)) / ((1 - 2 * cut / number) * math.sqrt(number))
    half = float(t_quantile(degrees, confidence)) * error
    return Estimate(mean, mean - half, mean + half, number * LEVELS, number, error, degrees)


def _slack_ms(slope: Estimate, delay_ms: float) -> Estimate | None:
    """Delay that costs nothing: what the longest one does not lengthen the step by."""
    if slope.ci_low is None or slope.ci_high is None or slope.ci_high >= 1:
        return None
    value, low, high = (
        min(max((1 - of) * delay_ms, 0.0), delay_ms) for of in (slope.value, slope.ci_high, slope.ci_low)
    )
    return Estimate(value, low, high, slope.num_steps, slope.num_blocks)


def responses_of(windows: Sequence[CausalWindow]) -> list[Response]:
    """The response of each set tested. Their intervals hold together, after each of a set's windows (``_error_of``)."""
    by_set = grouped(windows, lambda window: window.delayed.members)
    found = [response_of(of, 1 - (1 - CONFIDENCE) * _error_of(len(of)) / len(by_set)) for of in by_set.values()]
    return [response for response in found if response is not None]


def causal_summary(windows: Sequence[CausalWindow]) -> str:
    """The log's line of the last window: what it delayed, and what is known of that."""
    last = windows[-1]
    delay = PLAIN.quantity(last.delayed.delay_ms, "ms")
    said = f"overlap window {last.window} (step {last.first_step}), delays of {delay}"
    found = next((of for of in responses_of(windows) if of.delayed.members == last.delayed.members), None)
    if found is None or found.slope.ci_low is None:
        return f"{said}: too few of its steps count"
    value, low, high = (
        PLAIN.number(of or 0.0, 2) for of in (found.slope.value, found.slope.ci_low, found.slope.ci_high)
    )
    the = "the " if found.alone else ""
    return f"{said} to {the}{found.label}; {found.verdict.value}, slope {value} ({low} to {high})"


def slopes_by_name(windows: Sequence[CausalWindow]) -> dict[tuple[str, str], float]:
    """By kind of collective and name, as far as verdicts tell: the slope of what holds the step up, 0 of slack.

    Of several with a name one is enough to hold the step up, and all must have slack. A set that holds the step up
    tells of no member.
    """
    known: dict[DelayedCall, list[float]] = {member: [] for of in windows for member in of.delayed.members}
    for of in responses_of(windows):
        if of.verdict is Verdict.SLACK or (of.alone and of.verdict is Verdict.BLOCKING):
            for member in of.delayed.members:
                known[member].append(0.0 if of.verdict is Verdict.SLACK else of.slope.value)
    found = {}
    for key, members in grouped(known, lambda member: (collective_of(member.operator), member.name)).items():
        slope = max([slope for member in members for slope in known[member]], default=0.0)
        if key[1] and (slope > 0 or all(known[member] for member in members)):
            found[key] = slope
    return found


def ranked(responses: Sequence[Response]) -> list[Response]:
    """Single collectives before sets; those that hold the step up most first."""
    return sorted(responses, key=lambda of: (not of.alone, -of.slope.value))


def next_set(
    first: Sequence[tuple[DelayedCall, ...]],
    responses: Sequence[Response],
    step_ms: float,
    given_up: Collection[tuple[DelayedCall, ...]] = (),
) -> DelayedSet | None:
    """The set to test next: all of ``first``, in this order, then halves of what is not cleared, the first half first.

    Halves that are too large to tell are not tested. Then inconclusive ones again. None once every collective is
    cleared or was tested alone often enough.
    """
    known = {frozenset(response.delayed.members): response for response in responses}
    left_out = {frozenset(members) for members in given_up}
    # A slope of 0, or of 1, is told from ``BLOCKING_FROM`` by an interval of that half width.
    least_ms = float(np.median([of.half_width_ms for of in responses])) / BLOCKING_FROM if responses else 0.0
    waiting = [tuple(members) for members in first if members]
    waiting = sorted(waiting, key=lambda members: frozenset(members) in known)
    unclear: list[Response] = []
    while waiting:
        members = waiting.pop(0)
        found = known.get(frozenset(members))
        delay_ms = longest_delay_ms(step_ms, len(members))
        tells = len(members) == 1 or delay_ms >= least_ms or members in first
        if found is None and frozenset(members) not in left_out and tells:
            return DelayedSet(members, delay_ms)
        if len(members) > 1 and (found is None or found.verdict is not Verdict.SLACK):
            half = (len(members) + 1) // 2
            waiting = [members[:half], members[half:], *waiting]
        elif found is not None and found.verdict is Verdict.INCONCLUSIVE and found.num_windows < _MOST_WINDOWS:
            unclear.append(found)
    if not unclear:
        return None
    again = min(unclear, key=lambda response: response.num_windows).delayed.members
    return DelayedSet(again, longest_delay_ms(step_ms, len(again)))
