"""Do slopes hold, and is nothing that holds the step up called slack? Jobs whose slack is known, of noisy steps.

    python benchmarks/causal.py [--runs 400] [--json benchmarks/results/causal.json]

A job has eight layers of random lengths. `reduce`: a layer's backward issues its all-reduce, the optimizer waits for
all of them. `gather`: a layer waits for its all-gather, which is issued two layers before. `next`: the optimizer issues
the all-gathers, and the layers of the next step wait for them. One link runs the collectives one after another.
Lengthening each in turn, in all steps, gives its true slope. A window has 54 steps with delays of 0, a and 2a (5 and
10 % of the step), a run one window for each collective. Steps have noise of 1 %: white, autoregressive, or with one
step in fifty 2 to 10 times as long.

Goals: in 95 % of collectives the interval for one holds the true slope, in 95 % of runs the intervals for eight hold
all of them, and of collectives with a slope of 0.9 or more none is called slack. The halving tree runs with the same
noise, to the end: it clears none of those either.

Two estimates of what removing a collective wins are compared with the truth, the step with a transfer of no time.
*Forward*: its length times its slope. *Reverse*: virtual speed-up, its length times the difference between the slope of
delaying all and that of delaying all others. In shares of the collective's length. Of those that hold the step up: how
many win less, or more, than forward says by a tenth.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.about import about
from overlap_callbacks.analysis.causal import (
    BLOCKING_FROM,
    Response,
    Verdict,
    levels_of,
    longest_delay_ms,
    next_set,
    response_of,
)
from overlap_callbacks.analysis.results.causal import CausalWindow, DelayedCall, DelayedSet

Array = npt.NDArray[np.float64]
LAYERS, STEPS, NOISE, BLOCKING, MARGIN = 8, 54, 0.01, 0.9, 0.1
GOAL = 0.94  # 95 % less what so many runs leave to chance
NOISES = {"white": 0.0, "AR .5": 0.5, "AR .9": 0.9, "stalls": 0.0}
KEYS = tuple(DelayedCall("allreduce_", "0", place) for place in range(LAYERS))


def reduced(compute: Array, transfer: Array, delays: Array) -> float:
    """Step time of the layers' backward, each with its all-reduce."""
    now = link = 0.0
    for layer in range(LAYERS):
        now += compute[layer]
        link = max(link, now + delays[layer]) + transfer[layer]
    return max(now, link)


def gathered(compute: Array, transfer: Array, delays: Array) -> float:
    """Step time of the layers' forward, each of which waits for its all-gather."""
    now = link = 0.0
    arrived = np.zeros(LAYERS)
    begun = [0.0, 0.0]  # when all-gathers may be issued
    for layer in range(LAYERS):
        link = max(link, begun[layer] + delays[layer]) + transfer[layer]
        arrived[layer] = link
        now = max(now, link)
        begun.append(now)
        now += compute[layer]
    return now


def each(step: Callable[[Array, Array, Array], float]) -> Callable[[Array, Array, Sequence[Array]], list[float]]:
    """Times of steps that do not depend on each other."""

    def steps(compute: Array, transfer: Array, delays: Sequence[Array]) -> list[float]:
        known: dict[tuple[float, ...], float] = {}
        for of_step in delays:
            if tuple(of_step) not in known:
                known[tuple(of_step)] = step(compute, transfer, of_step)
        return [known[tuple(of_step)] for of_step in delays]

    return steps


def gathered_for_the_next(compute: Array, transfer: Array, delays: Sequence[Array]) -> list[float]:
    """Times of steps whose layers wait for the all-gathers that the step before has issued at its end."""
    now = link = 0.0
    arrived, times = np.zeros(LAYERS), []
    for of_step in delays:
        begun = now
        for layer in range(LAYERS):
            now = max(now, arrived[layer]) + compute[layer]
        for layer in range(LAYERS):
            arrived[layer] = link = max(link, now + of_step[layer]) + transfer[layer]
        times.append(now - begun)
    return times


JOBS: dict[str, Callable[[Array, Array, Sequence[Array]], list[float]]] = {
    "reduce": each(reduced),
    "gather": each(gathered),
    "next": gathered_for_the_next,
}
SETTLE = 4  # steps after which times are the same


def noise(kind: str, steps: int, random: np.random.Generator) -> Array:
    """Factors of step times."""
    correlation = NOISES[kind]
    white = random.normal(0, NOISE * np.sqrt(1 - correlation**2), steps)
    out = np.empty(steps)
    last = random.normal(0, NOISE)
    for step in range(steps):
        last = out[step] = correlation * last + white[step]
    factors: Array = np.exp(out)
    if kind == "stalls":
        stalled = random.random(steps) < 0.02
        factors[stalled] *= random.uniform(2, 10, int(stalled.sum()))
    return factors


class Job:
    """A job of known slopes."""

    def __init__(self, kind: str, random: np.random.Generator) -> None:
        self._time = JOBS[kind]
        self._compute = random.uniform(5, 15, LAYERS)
        self._transfer = self._compute * random.uniform(0.2, 1.2) * random.uniform(0.5, 1.5, LAYERS)
        self.step_ms = self.takes(())
        self.delay_ms = longest_delay_ms(self.step_ms, 1)
        self.slopes = [self.slope((key,)) for key in KEYS]

    def takes(self, members: Sequence[Any], delay_ms: float = 0.0, without: int = -1) -> float:
        """Step time with these delayed in all steps; one of the transfers may take no time."""
        delays = [np.array([delay_ms * (key in members) for key in KEYS])] * SETTLE
        transfer = np.where(np.arange(LAYERS) == without, 0.0, self._transfer)
        return self._time(self._compute, transfer, delays)[-1]

    def slope(self, members: Sequence[Any], delay_ms: float = 0.0) -> float:
        """The truth; per delay of one member."""
        delay_ms = delay_ms or longest_delay_ms(self.step_ms, len(members))
        return (self.takes(members, delay_ms) - self.step_ms) / delay_ms

    def errors(self, place: int) -> tuple[float, float]:
        """Of the estimates of what removing a collective wins, forward and reverse, as shares of its length."""
        won = (self.step_ms - self.takes((), without=place)) / self._transfer[place]
        others = [key for key in KEYS if key.place != place]
        reverse = self.slope(KEYS, self.delay_ms) - self.slope(others, self.delay_ms)
        return self.slopes[place] - won, min(max(reverse, 0.0), 1.0) - won

    def response(self, delayed: DelayedSet, kind: str, random: np.random.Generator, tests: int) -> Response:
        """What a window shows."""
        levels = levels_of(STEPS, int(random.integers(6)))
        which = np.array([key in delayed.members for key in KEYS])
        before = [np.zeros(LAYERS)] * SETTLE
        delays = [which * delayed.delay_ms * level / 2 for level in levels]
        times = self._time(self._compute, self._transfer, [*before, *delays])[SETTLE:]
        noisy = tuple((np.array(times) * noise(kind, STEPS, random)).tolist())
        window = CausalWindow(window=0, first_step=0, delayed=delayed, levels=levels, step_ms=noisy)
        found = response_of([window], 1 - 0.05 / tests)
        assert found is not None
        return found


def holds(response: Response, truth: float) -> bool:
    low, high = response.slope.ci_low, response.slope.ci_high
    return low is not None and high is not None and low - 1e-9 <= truth <= high + 1e-9


def row(kind: str, noisy: str, runs: int) -> dict[str, Any]:
    """Of many runs."""
    random = np.random.default_rng([runs, *map(ord, kind + noisy)])
    held, all_held, wrong, cleared, windows, blocking, told, widths = 0, 0, 0, 0, 0, 0, 0, []
    for _ in range(runs):
        job, family = Job(kind, random), []
        for key, truth in zip(KEYS, job.slopes, strict=True):
            delayed = DelayedSet((key,), job.delay_ms)
            one, together = (job.response(delayed, noisy, random, tests) for tests in (1, LAYERS))
            held += holds(one, truth)
            family.append(holds(together, truth))
            widths.append(one.slope.ci_high - one.slope.value)  # type: ignore[operator]
            if truth >= BLOCKING:
                blocking += 1
                wrong += together.verdict is Verdict.SLACK
                told += together.verdict is Verdict.BLOCKING
        all_held += all(family)
        responses: list[Response] = []
        tested: set[tuple[DelayedCall, ...]] = set()
        while (delayed := next_set([KEYS], responses, job.step_ms)) is not None:  # type: ignore[assignment]
            if delayed.members in tested:
                break  # the rest is the same again
            tested.add(delayed.members)
            responses.append(job.response(delayed, noisy, random, 2 * LAYERS - 1))
        windows += len(responses)
        cleared += sum(
            truth >= BLOCKING and any(key in of.delayed.members and of.verdict is Verdict.SLACK for of in responses)
            for key, truth in zip(KEYS, job.slopes, strict=True)
        )
    count = runs * LAYERS
    return {
        "job": kind,
        "noise": noisy,
        "runs": runs,
        "held": round(float(held) / count, 4),
        "all_held": round(all_held / runs, 4),
        "half_width": round(float(np.median(widths)), 3),
        "blocking": int(blocking),
        "blocking_found": round(told / max(1, blocking), 3),
        "blocking_called_slack": int(wrong),
        "blocking_cleared_by_a_set": int(cleared),
        "windows_of_the_tree": round(windows / runs, 2),
        "met": bool(held >= GOAL * count and all_held >= (GOAL - 0.01) * runs and wrong == 0 and cleared == 0),
    }


def removal(kind: str, runs: int) -> dict[str, Any]:
    """How well the two estimates tell what removing a collective wins, without noise."""
    random = np.random.default_rng([runs, *map(ord, kind)])
    jobs = [Job(kind, random) for _ in range(runs)]
    forward, reverse = np.array([job.errors(place) for job in jobs for place in range(LAYERS)]).T
    slopes = np.array([job.slopes for job in jobs]).ravel()
    of_blocking = forward[slopes > BLOCKING_FROM]  # its slope less what removing it wins
    return {
        "job": kind,
        "runs": runs,
        "forward_bias": round(float(forward.mean()), 3),
        "forward_rms_error": round(float(np.sqrt((forward**2).mean())), 3),
        "reverse_bias": round(float(reverse.mean()), 3),
        "reverse_rms_error": round(float(np.sqrt((reverse**2).mean())), 3),
        "blocking_wins_less": round(float((of_blocking > MARGIN).mean()), 3),
        "blocking_wins_more": round(float((of_blocking < -MARGIN).mean()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [row(kind, noisy, given.runs) for kind in JOBS for noisy in NOISES]
    removals = [removal(kind, given.runs) for kind in JOBS]
    for one in [*rows, *removals]:
        print(one)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "removal": removals, **about()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
