"""Does the settled difference hold? Windows as they are planned, of step times that follow the mode with a memory.

    python benchmarks/settled.py [--runs 200] [--noise WORD] [--looks 50] [--json benchmarks/results/settled.json]

Steps take 10 % longer without overlap once that mode has lasted. They get there at once, with one time constant, by
halves with two, or in a straight line. A window has 24 overlapped steps, the recorded step, 16 blocks of three steps
(`OSOSOSOSSOSOSOSO`, turned round at random) and 24 overlapped steps. The second window has a block of 41 steps of each
mode before the last ones; the sixth and tenth have it where memory shows. The library's own functions make the figure
of each window and the settled difference of the run, of many runs at once; this noise leaves out no step by its size.
With `--noise stalls` one step in a hundred takes 10 to 50 times as long, and so do the first ten of a sequential block
of 41 steps, all by the same factor; each run then goes through the library alone, which leaves out such steps.

A run is right if a value is headlined as settled, and its interval holds the truth: the settled one, or the run's own
where no memory shows. Goals: right in 94 % without memory and with one constant up to 3 steps. With constants of 10
steps and more, "not settled" comes in 85 % of the runs whose settled interval misses the truth. Where few miss it at
all, the runs that miss it unsaid are counted: at most 0.75 %, which are 15 % of the 5 % that may miss it.

With `--looks`, users look after each of so many windows. Goal: in at most 5 % of runs a value is headlined as settled
at some look while its interval for all looks misses the truth; the same of "at least x %".
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import overlap_callbacks
from overlap_callbacks.analysis.design import design_of
from overlap_callbacks.analysis.figures import figures_of
from overlap_callbacks.analysis.outliers import far_longer
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.settled import Settled, StepSeries, Verdict
from overlap_callbacks.analysis.results.window import RankWindow, TimedBlock
from overlap_callbacks.analysis.settled import SettledFit, SettledNumbers, StepSums
from overlap_callbacks.analysis.statistics import Pooling, half_width_factor, pooled_error

Array = npt.NDArray[np.float64]

TRUTH, STEP_MS, NOISE = 0.10, 100.0, 0.02
BLOCKS, BESIDE, WINDOWS = "OSOSOSOSSOSOSOSO", 24, (1, 2, 4, 12)
LONG_STEPS, LONG_EVERY = 41, 4
GOAL_RIGHT, GOAL_TOLD, MAY_MISS = 0.94, 0.85, 0.05
UP_TO_3 = ("none", "1", "3")
# The counted steps of each block.
TIMED = BESIDE + 1 + 3 * np.arange(len(BLOCKS))[:, None] + np.array([1, 2])
RAMP_STEPS = 12
# Time constants in steps: none, one, or two of equal shares.
MEMORIES: dict[str, tuple[float, ...]] = {
    "none": (), "1": (1,), "3": (3,), "5": (5,), "10": (10,), "20": (20,), "40": (40,),
    "2 and 15": (2, 15), "1 and 20": (1, 20), "5 and 15": (5, 15), f"ramp of {RAMP_STEPS}": (),
}  # fmt: skip
STALLS = "stalls"
NOISES = {"white": 0.0, "AR .5": 0.5, "AR .9": 0.9, STALLS: 0.0}
STALLED, SPELL, TIMES_AS_LONG = 0.01, 10, (10, 50)


class Told(NamedTuple):
    """What is said of a run: the settled difference, and its figure over windows."""

    settled: Settled
    run: Estimate


def follows(sequential: Array, memory: str) -> Array:
    """How much of the difference each step has, from 0 to 1."""
    if memory.startswith("ramp"):
        return np.array(_ramp(sequential))
    shares = [_filtered(sequential, constant) for constant in MEMORIES[memory]]
    return np.mean(shares, axis=0) if shares else sequential


def _filtered(sequential: Array, constant: float) -> Array:
    kept, state, states = math.exp(-1 / constant), 0.0, []
    for mode in sequential:
        state = mode + (state - mode) * kept
        states.append(state)
    return np.array(states)


def _ramp(sequential: Array) -> list[float]:
    state, states = 0.0, []
    for mode in sequential:
        state = min(1.0, max(0.0, state + (1 if mode else -1) / RAMP_STEPS))
        states.append(state)
    return states


def modes_of(turned: bool, long: bool) -> str:
    """The modes of a window's steps; lower case for the recorded one."""
    letters = ["OS"[("OS".index(letter) + turned) % 2] for letter in BLOCKS]
    last = "".join(letter * LONG_STEPS for letter in letters[:2]) if long else ""
    return "O" * BESIDE + "o" + "".join(letter * 3 for letter in letters) + last + "O" * BESIDE


def log_times_of(rng: np.random.Generator, runs: int, modes: str, memory: str, correlation: float) -> Array:
    """Logarithms of step times that follow the mode; shape (runs, steps)."""
    noise = rng.normal(0.0, NOISE, (runs, len(modes)))
    for step in range(1, len(modes)):
        noise[:, step] = correlation * noise[:, step - 1] + math.sqrt(1 - correlation**2) * noise[:, step]
    sequential = np.array([letter == "S" for letter in modes], dtype=float)
    return np.asarray(math.log(STEP_MS) + noise + math.log1p(TRUTH) * follows(sequential, memory))


def window(rng: np.random.Generator, number: int, memory: str, correlation: float, long: bool) -> RankWindow:
    """A window of rank 0 whose steps follow the mode."""
    modes = modes_of(bool(rng.random() < 0.5), long)
    return rank_window(number, modes, np.exp(log_times_of(rng, 1, modes, memory, correlation)[0]))


def rank_window(number: int, modes: str, step_ms: Array) -> RankWindow:
    """A window of rank 0, as it is measured: without timed steps that took far longer than others of their mode."""
    steps = TIMED.ravel()
    letters = [modes[step] for step in steps]
    found = far_longer(step_ms[steps].tolist(), letters, [letter == "S" for letter in letters])
    counts = np.reshape(~found.far | found.kept, TIMED.shape)
    timed = tuple(
        [
            TimedBlock(_mode(modes[steps[0]]), block, tuple(step_ms[steps[counts[block]]].tolist()))
            for block, steps in enumerate(TIMED)
            if counts[block].any()
        ]
    )
    return RankWindow(
        rank=0, window=number, first_step=0, num_steps=len(modes), complete=True, backend="nccl", device="scripted",
        wall_ms=float(step_ms.sum()), timed=timed, series=StepSeries(0, tuple(step_ms.tolist()), modes),
    )  # fmt: skip


def _mode(letter: str) -> Mode:
    return Mode.SEQUENTIAL if letter == "S" else Mode.OVERLAPPED


class Windows(NamedTuple):
    """A window of each of many runs: what the settled difference and the run's figure are made of.

    Attributes:
        sums: normal equations of its steps.
        short: logarithm of its figure, by short blocks; shape (runs,).
        error, degrees: standard error of that, and its degrees of freedom.
    """

    sums: StepSums
    short: Array
    error: Array
    degrees: Array


def with_stalls(rng: np.random.Generator, modes: str, log_times: Array) -> Array:
    """The same, with steps that take far longer."""
    longer = np.where(rng.random(log_times.shape) < STALLED, rng.uniform(*TIMES_AS_LONG, log_times.shape), 1.0)
    if "S" * LONG_STEPS in modes:
        first = modes.index("S" * LONG_STEPS)
        longer[:, first : first + SPELL] = rng.uniform(*TIMES_AS_LONG, (len(log_times), 1))
    return np.asarray(log_times + np.log(longer))


def windows_by_the_library(modes: str, log_times: Array) -> Windows:
    """``windows_of``, run by run, without the steps that the library leaves out."""
    sums, figures = StepSums.zeros(len(log_times)), []
    for run, step_ms in enumerate(np.exp(log_times)):
        own, fit = rank_window(0, modes, step_ms), SettledFit()
        figure = figures_of([own])["speedup_vs_sequential"]
        assert own.series is not None
        fit.add(own.series, figure.value)
        for mine, part in zip(sums, fit.sums, strict=True):
            mine[run] = part
        figures.append((math.log1p(figure.value), figure.standard_error, figure.degrees_of_freedom))
    return Windows(sums, *np.array(figures).T)


def windows_of(modes: str, log_times: Array) -> Windows:
    """The windows of runs that have the same modes: ``RankWindow`` by ``RankWindow``, but all at once."""
    sequential = np.array([letter == "S" for letter in modes])
    steps = np.flatnonzero(np.array([letter.isupper() for letter in modes]))
    lines = np.stack([np.ones(len(steps)), steps - steps.mean()], axis=1)
    blocks = [_mode(modes[steps[0]]) for steps in TIMED]
    design = design_of(blocks, range(len(blocks)), [TIMED.shape[1]] * len(blocks), np.zeros((len(blocks), 0)))
    times, logs = (of[:, TIMED].mean(axis=2).T for of in (np.exp(log_times), log_times))
    overlapped, sequentially = design.means(times)
    residuals = design.residuals(logs) ** 2
    parts = np.array([residuals[own].sum(axis=0) for own in design.of_mode]).T * design.spread() / design.degrees
    variance = parts.sum(axis=1)
    return Windows(
        StepSums.of(sequential, steps, log_times[:, steps], lines),
        np.log(sequentially / overlapped),
        np.sqrt(variance),
        variance**2 / (parts**2 / design.degrees).sum(axis=1),
    )


def told_of(
    rng: np.random.Generator, runs: int, memory: str, correlation: float, looks: int = 0, *, stalls: bool = False
) -> dict[int, list[Told]]:
    """What is said of runs after so many windows: those of ``WINDOWS``, or at each of so many looks."""
    sums, figures, is_open, told = StepSums.zeros(runs), [], np.ones(runs, dtype=bool), {}
    for number in range(looks or max(WINDOWS)):
        turned, long = rng.random(runs) < 0.5, is_open & (number % LONG_EVERY == 1)
        new = Windows(StepSums.zeros(runs), *np.zeros((3, runs)))
        for kind in itertools.product((False, True), repeat=2):
            own = np.flatnonzero((turned == kind[0]) & (long == kind[1]))
            modes = modes_of(*kind)
            log_times = log_times_of(rng, len(own), modes, memory, correlation)
            if stalls and len(own):
                found = windows_by_the_library(modes, with_stalls(rng, modes, log_times))
            else:
                found = windows_of(modes, log_times) if len(own) else new
            for mine, part in zip((*new.sums, *new[1:]), (*found.sums, *found[1:]), strict=True):
                mine[own] = part[: len(own)]
        sums = sums.plus(new.sums)
        figures.append(np.array(new[1:]))
        windows = number + 1
        if looks or windows in WINDOWS or windows % LONG_EVERY == 1:
            told[windows] = told_of_sums(sums, np.array(figures), Pooling(all_looks=looks > 0))
            short = np.array([each.settled.verdict is Verdict.SHORT for each in told[windows]])
            is_open = ~short | (number == 0)
    return told


def told_of_sums(sums: StepSums, figures: Array, pooling: Pooling) -> list[Told]:
    """``figures``: of each window those of ``Windows``; shape (windows, 3, runs)."""
    values, errors, degrees = figures.transpose(1, 2, 0)
    error, freedom = pooled_error(values, errors**2, degrees)
    number = len(figures)
    half = error * half_width_factor(freedom, number, pooling)
    numbers = SettledNumbers.of(sums, number)
    told = []
    for run, (value, wide) in enumerate(zip(values.mean(axis=1).tolist(), half.tolist(), strict=True)):
        settled = SettledNumbers(*[part[run] for part in numbers]).settled(value, number, 0, 3, BESIDE)
        told.append(
            Told(settled, Estimate(math.expm1(value), math.expm1(value - wide), math.expm1(value + wide), 0, number))
        )
    return told


def holds(found: Estimate) -> bool:
    """Whether an interval holds the truth."""
    return found.ci_low is not None and found.ci_high is not None and found.ci_low <= TRUTH <= found.ci_high


def judged(runs: list[Told]) -> dict[str, Any]:
    """How often what is said is right; values and widths in points, as medians."""
    settled = [each.settled for each in runs]
    held = [holds(each.estimate) for each in settled]
    said = [each.verdict is not Verdict.NOT_SETTLED for each in settled]
    short = [each.verdict is Verdict.SHORT for each in settled]
    right = [
        says and (holds(told.run) if is_short else holds_)
        for says, is_short, told, holds_ in zip(said, short, runs, held, strict=True)
    ]
    least = [each.at_least for each in settled if each.at_least is not None]
    missed = [says for says, holds_ in zip(said, held, strict=True) if not holds_]
    return {
        "value": round(100 * float(np.median([each.value for each in settled])), 2),
        "width": round(100 * float(np.median([_width(each.estimate) for each in settled])), 2),
        "width_one_look": round(100 * float(np.median([each.ci_high - each.ci_low for each in settled])), 2),
        "short_blocks": round(100 * float(np.median([each.short for each in settled])), 2),
        "held": float(np.mean(held)),
        "held_one_look": float(np.mean([each.ci_low <= TRUTH <= each.ci_high for each in settled])),
        "headlined_short": float(np.mean(short)),
        "not_settled": 1 - float(np.mean(said)),
        "right": float(np.mean(right)),
        "missed": len(missed),
        "missed_and_told": len(missed) - sum(missed),
        "at_least": len(least),
        "at_least_true": sum(value <= TRUTH for value in least),
    }


def _width(found: Estimate) -> float:
    return math.nan if found.ci_low is None or found.ci_high is None else found.ci_high - found.ci_low


def judged_at_all_looks(told: dict[int, list[Told]]) -> dict[str, Any]:
    """In which share of runs something is wrong at some look."""

    def at_some_look(is_wrong: Callable[[Told], bool]) -> float:
        return float(np.mean([any(map(is_wrong, run)) for run in zip(*told.values(), strict=True)]))

    return {
        "headlined_settled": at_some_look(lambda told: told.settled.verdict is Verdict.SETTLED),
        "wrong_where_settled": at_some_look(
            lambda told: told.settled.verdict is Verdict.SETTLED and not holds(told.settled.estimate)
        ),
        "wrong_where_short": at_some_look(lambda told: told.settled.verdict is Verdict.SHORT and not holds(told.run)),
        "wrong_at_least": at_some_look(
            lambda told: told.settled.at_least is not None and told.settled.at_least > TRUTH
        ),
        "wrong_one_look": at_some_look(
            lambda told: (
                told.settled.verdict is Verdict.SETTLED and not told.settled.ci_low <= TRUTH <= told.settled.ci_high
            )
        ),
    }


def meets_goal(memory: str, row: dict[str, Any], runs: int) -> bool | None:
    """Whether a row meets its goal; None where it has none."""
    if memory in UP_TO_3:
        return bool(row["right"] >= GOAL_RIGHT)
    if memory == "5":
        return None
    told, missed = row["missed_and_told"], row["missed"]
    return bool(told >= GOAL_TOLD * missed or missed - told <= (1 - GOAL_TOLD) * MAY_MISS * runs)


def main(argv: list[str] | None = None) -> int:
    """Simulate and print; returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="of each cell (200)")
    parser.add_argument("--noise", choices=list(NOISES), help="one alone")
    parser.add_argument("--looks", type=int, default=0, help="judge this many looks together, after each window")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    arguments = parser.parse_args(argv)
    for noise in [arguments.noise] if arguments.noise else [noise for noise in NOISES if noise != STALLS]:
        rows: list[dict[str, Any]] = []
        for memory in MEMORIES:
            rng = np.random.default_rng(7)
            told = told_of(rng, arguments.runs, memory, NOISES[noise], arguments.looks, stalls=noise == STALLS)
            cell = {"noise": noise, "memory": memory, "runs": arguments.runs}
            if arguments.looks:
                rows.append({**cell, "looks": arguments.looks, **judged_at_all_looks(told)})
                print(rows[-1], flush=True)
                continue
            for windows in WINDOWS:
                row = judged(told[windows])
                goal = meets_goal(memory, row, arguments.runs)
                rows.append({**cell, "windows": windows, **row, "met": goal})
                print(f"{noise:6} memory {memory:12} {windows:2} windows: {_line(row, goal)}", flush=True)
        if arguments.json is not None:
            _write(arguments.json, "looks" if arguments.looks else "rows", rows)
    return 0


def _line(row: dict[str, Any], goal: bool | None) -> str:
    return (
        f"{row['value']:5.1f} (held {row['held']:.1%}, width {row['width']:.1f}), blocks {row['short_blocks']:.1f}, "
        f"headlined {row['headlined_short']:.0%}; not settled {row['not_settled']:.1%}: {row['missed_and_told']} of "
        f"{row['missed']} missed; right {row['right']:.1%} {'' if goal is None else 'met' if goal else 'NOT MET'}"
    )


def _write(path: Path, part: str, rows: list[dict[str, Any]]) -> None:
    """Add rows to a part of a file, in the place of those of the same noise."""
    new = {row["noise"] for row in rows}
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    content = {
        "rows": [],
        "looks": [],
        **content,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "library": overlap_callbacks.__version__,
        "truth": TRUTH,
        "noise_of_steps": NOISE,
    }
    content[part] = [row for row in content[part] if row["noise"] not in new] + rows
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
