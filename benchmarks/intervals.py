"""How often intervals hold the truth, and how wide they are: simulated step times through the library's own arithmetic.

    python benchmarks/intervals.py [--quick] [--json FILE]

Each simulated window has step times with one kind of noise, and a known difference between the modes. The library makes
the window's figures of them. Runs are drawn from these windows. A share counts as worse than its goal only if chance
explains it in less than 5 % of repetitions (one-sided).

What the job does at every k-th step is one more noise: there, windows lie where the library places them, and know the
rhythms that the library finds in the steps before them.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from overlap_callbacks.analysis.design import covariates_of, design_of
from overlap_callbacks.analysis.figures import TimedMeans, figures_of
from overlap_callbacks.analysis.outliers import far_longer
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, Rhythm, TimedBlock
from overlap_callbacks.analysis.rhythms import find_rhythms
from overlap_callbacks.analysis.statistics import (
    _MOST_APART,
    MIN_BLOCKS,
    ONE_LOOK,
    Pooling,
    half_width_factor,
    pooled_error,
    t_quantile,
)
from overlap_callbacks.monitor.placement import PERIODS, PhaseBalance
from overlap_callbacks.monitor.schedule import Part, Plan, Schedule

Floats = npt.NDArray[np.float64]

EFFECT = math.log(1.10)  # sequential steps take 10 % longer
LONGER = math.log(1.5)  # every k-th step
VARIES = 0.02  # standard deviation over windows of the effect, where it varies
ALL_LOOKS = Pooling(all_looks=True)
LOOKS, MANY_LOOKS = (2, 3, 4, 6, 12, 50), 200
# Least share of intervals that hold, and the most that is not too wide.
STRICT, LOOSE, OF_RHYTHM, AT_LEAST = (0.94, 0.985), (0.94, 1.0), (0.90, 1.0), (0.83, 1.0)
MOST_WRONG, WIDER = 0.05, 1.8


def _autocorrelated(rng: np.random.Generator, shape: tuple[int, int], rho: float, sd: float) -> Floats:
    shocks = rng.normal(0, sd * math.sqrt(1 - rho * rho), shape)
    shocks[:, 0] = rng.normal(0, sd, shape[0])
    for step in range(1, shape[1]):
        shocks[:, step] += rho * shocks[:, step - 1]
    return shocks


def _spells(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    step, first = np.arange(shape[1]), rng.integers(0, shape[1], (shape[0], 1))
    length, on = rng.integers(3, 10, (shape[0], 1)), rng.random((shape[0], 1)) < 0.5
    return np.asarray(on & (step >= first) & (step < first + length))


def _two_clocks(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    flips = np.cumsum(rng.random(shape) < 1 / 60, axis=1)
    return np.asarray((rng.integers(0, 2, (shape[0], 1)) + flips) % 2)


def _steady(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return rng.normal(0, 0.01, shape)


# Logarithms of step times, shape (windows, steps); and the goal for the share of intervals that hold.
NOISES: dict[str, tuple[Callable[[np.random.Generator, tuple[int, int]], Floats], tuple[float, float]]] = {
    "white": (lambda rng, shape: rng.normal(0, 0.02, shape), STRICT),
    "autocorrelated 0.5": (lambda rng, shape: _autocorrelated(rng, shape, 0.5, 0.02), STRICT),
    "autocorrelated 0.9": (lambda rng, shape: _autocorrelated(rng, shape, 0.9, 0.02), LOOSE),
    "drift": (lambda rng, shape: _steady(rng, shape) + 0.05 * np.arange(shape[1]) / shape[1], STRICT),
    "slow first steps": (lambda rng, shape: _steady(rng, shape) + 0.05 * np.exp(-np.arange(shape[1]) / 8), STRICT),
    "two clocks": (lambda rng, shape: _steady(rng, shape) + 0.04 * _two_clocks(rng, shape), STRICT),
    "heavy tails": (
        lambda rng, shape: _steady(rng, shape) + (rng.random(shape) < 0.05) * rng.exponential(0.3, shape), LOOSE,
    ),
    "rare stalls": (lambda rng, shape: _steady(rng, shape) + 0.7 * (rng.random(shape) < 0.02), LOOSE),
    "straggler spells": (lambda rng, shape: _steady(rng, shape) + 0.22 * _spells(rng, shape), LOOSE),
    "effect varies": (_steady, LOOSE),
}  # fmt: skip


class Windows(NamedTuple):
    """What the library says of n windows; each of shape (n,).

    Attributes:
        value, low, high: speed-up of overlap and its interval; NaN where there is none.
        error, degrees: standard error on the scale of logarithms, and its degrees of freedom.
        overlapped_ms, sequential_ms: step times.
        truth: the speed-up that was put in.
    """

    value: Floats
    low: Floats
    high: Floats
    error: Floats
    degrees: Floats
    overlapped_ms: Floats
    sequential_ms: Floats
    truth: Floats

    def draw(self, index: Any) -> Windows:
        """Those at some places, of any shape."""
        return Windows(*[part[index] for part in self])


def simulated(rng: np.random.Generator, noise: str, repeats: int, number: int) -> Windows:
    """Windows with one noise, every second one with the modes changed about."""
    schedule = Schedule(repeats=repeats, every_n_steps=1000)
    parts = [schedule.part(Part.TIMED, swapped=swapped) for swapped in (False, True)]
    logs = NOISES[noise][0](rng, (number, len(parts[0])))
    effects = np.full(number, EFFECT) + (rng.normal(0, VARIES, number) if noise == "effect varies" else 0.0)
    found = Windows(*[np.empty(number) for _ in Windows._fields])
    for turn, part in enumerate(parts):
        of_part = of_one_design(part, logs[turn::2], 0, (), effects[turn::2])
        for values, of_these in zip(found, of_part, strict=True):
            values[turn::2] = of_these
    return found


def _window(
    part: list[Plan], logs: Floats, effect: float, first_step: int, known: tuple[Rhythm, ...] = ()
) -> RankWindow:
    blocks: dict[int, TimedBlock] = {}
    times_ms = (100 * np.exp(logs)).tolist()
    for plan, time_ms in zip(part, times_ms, strict=True):
        if plan.counted:
            so_far = blocks.get(plan.block, TimedBlock(plan.arm, plan.block, ()))
            slower = math.exp(effect) if plan.arm is Mode.SEQUENTIAL else 1.0
            blocks[plan.block] = TimedBlock(
                plan.arm, plan.block, (*so_far.step_ms, slower * time_ms), (*so_far.steps, first_step + plan.offset)
            )
    return RankWindow(
        0, 0, first_step, len(part), True, "gloo", "cpu", 1.0, timed=tuple(blocks.values()),
        rhythms=known,
    )  # fmt: skip


def _measured(windows: Iterator[RankWindow], effects: Floats) -> Windows:
    rows = []
    for window in windows:
        figures = figures_of([window])
        found = figures["speedup_vs_sequential"]
        rows.append(
            (
                found.value, found.ci_low, found.ci_high, found.standard_error, found.degrees_of_freedom,
                figures["e2e_overlapped_ms"].value, figures["e2e_sequential_ms"].value,
            )
        )  # fmt: skip
    return Windows(*np.array(rows, dtype=np.float64).T, np.expm1(effects))


def run_intervals(windows: Windows) -> tuple[Floats, Floats, Floats]:
    """Point and half the widths, at one look and at all, of runs: windows of shape (runs, windows).

    On the scale of logarithms, as in ``RunSummary.pooled``.
    """
    means: list[Any] = [TimedMeans(part.mean(axis=-1)) for part in (windows.sequential_ms, windows.overlapped_ms)]
    point = np.log1p(figure_named("speedup_vs_sequential").defined.of(*means))
    # As ``run_deviations``, of many runs at once.
    deviations = windows.sequential_ms / means[0].step_ms[:, None] - windows.overlapped_ms / means[1].step_ms[:, None]
    error, degrees = pooled_error(deviations, windows.error**2, windows.degrees)
    alone = not np.isfinite(windows.error).any()
    one, all_looks = (
        error * half_width_factor(degrees, windows.value.shape[-1], pooling, alone=alone)
        for pooling in (ONE_LOOK, ALL_LOOKS)
    )
    return point, one, all_looks


def judged(held: int, of: int, goal: tuple[float, float]) -> dict[str, Any]:
    """The share that holds; whether it is within its goal but for chance."""
    low, high = goal
    met = binom.cdf(held, of, low) >= 0.05 and (high >= 1 or binom.sf(held - 1, of, high) >= 0.05)
    return {"held": held, "of": of, "share": round(held / of, 4), "goal": list(goal), "met": bool(met)}


def one_window(windows: Windows, goal: tuple[float, float]) -> dict[str, Any]:
    """How often a window's interval holds that window's truth."""
    held = (windows.low <= windows.truth) & (windows.truth <= windows.high)
    width = float(np.median(windows.high - windows.low))
    return {**judged(int(held.sum()), held.size, goal), "width_points": round(100 * width, 3)}


def runs(rng: np.random.Generator, windows: Windows, noise: str, repeats: int, number: int) -> dict[str, Any]:
    """Runs that are drawn from windows: at one look, by number of windows; and at all looks."""
    found: dict[str, Any] = {"one_look": {}, "width_of_all_looks_over_one": {}}
    drawn = windows.draw(rng.integers(0, windows.value.size, (number, MANY_LOOKS)))
    wrong_at_one, wrong_at_all, wrong_with_few = np.zeros((3, number), dtype=bool)
    for looks in range(1, MANY_LOOKS + 1):
        so_far = Windows(*[part[:, :looks] for part in drawn])
        point, half, wide = run_intervals(so_far)
        apart = np.abs(point - EFFECT)
        if np.isnan(half).any():
            continue  # windows alone, and too few
        # Where windows differ, a few of them say too little of how much.
        few = noise == "effect varies" and looks < 6
        if looks > 1 or not few:  # the truth of a single window is its own effect
            wrong_with_few |= apart > wide
        if not few:
            wrong_at_one |= apart > half
            wrong_at_all |= apart > wide
        if looks in (1, *LOOKS, MANY_LOOKS):
            ratio = float(np.median(wide / half))
            found["width_of_all_looks_over_one"][looks] = {
                "ratio": round(ratio, 3), "goal": WIDER, "met": ratio <= WIDER + 1e-9
            }  # fmt: skip
        if looks in LOOKS:
            goal = NOISES[noise][1]
            if few:
                goal = AT_LEAST
            if repeats == 1:
                goal = LOOSE
            width = 100 * float(np.median(np.expm1(point + half) - np.expm1(point - half)))
            found["one_look"][looks] = {
                **judged(int((apart <= half).sum()), number, goal), "width_points": round(width, 3)
            }  # fmt: skip
    found["wrong_at_some_look"] = {
        "looks": MANY_LOOKS,
        "one_look_intervals": round(float(wrong_at_one.mean()), 4),
        "all_looks_intervals": round(float(wrong_at_all.mean()), 4),
        "with_few_windows": round(float(wrong_with_few.mean()), 4),
        "goal": MOST_WRONG,
        "met": bool(binom.sf(int(wrong_at_all.sum()) - 1, number, MOST_WRONG) >= 0.05),
    }
    return found


def rhythms(
    rng: np.random.Generator, repeats: int, number: int, num_windows: int, periods: Sequence[int]
) -> dict[str, Any]:
    """Jobs with steps 50 % longer at every k-th step, by k: intervals of single windows, and of the run so far.

    Windows lie where the library places them, know the rhythms that it finds in the ordinary steps before them (after
    the third: before the third), and leave out the steps that it leaves out.
    """
    schedule, balance = Schedule(repeats=repeats), PhaseBalance()
    firsts = [schedule.first_step + place * schedule.every_n_steps for place in range(num_windows)]
    placed = [balance.place(schedule, first, "sequential", schedule.steps_per_block) for first in firsts]
    parts = [schedule.part(Part.TIMED, swapped=where.timed_swapped) for where in placed]
    starts = [first + where.timed_start for first, where in zip(firsts, placed, strict=True)]
    ends = [first + where.profiled_start for first, where in zip(firsts, placed, strict=True)]
    ordinary = np.concatenate([np.arange(*between) for between in zip([0, *ends], firsts[:3], strict=False)])
    rows: dict[str, Any] = {}
    found_right: list[list[bool]] = []
    for period in periods:
        found = Windows(*np.empty((len(Windows._fields), number, num_windows)))
        phases = rng.integers(period, size=number).tolist()
        known: list[list[tuple[Rhythm, ...]]] = []
        alike: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)  # runs and windows of one design
        for run, phase in enumerate(phases):
            hits = Rhythm(period, phase, 50.0, 100.0).hits(ordinary)
            times_ms = 100 * np.exp(rng.normal(0, 0.01, len(ordinary)) + LONGER * hits)
            known.append([find_rhythms(ordinary[ordinary < first], times_ms[ordinary < first]) for first in firsts[:3]])
            right = [[(of.period, of.phase) for of in told] == [(period, phase)] for told in known[-1]]
            found_right.append(right)
            for place, start in enumerate(starts):
                one_design = (placed[place].timed_swapped, (start - phase) % period)
                alike[one_design if right[min(place, 2)] else (run, place, -1)].append((run, place))
        for key, windows in alike.items():
            run, place = windows[0]
            part, start, told = parts[place], starts[place], known[run][min(place, 2)]
            hits = Rhythm(period, phases[run], 50.0, 100.0).hits(start + np.arange(len(part)))
            logs = rng.normal(0, 0.01, (len(windows), len(part))) + LONGER * hits
            if key[-1] < 0:
                part = _without_stalls(part, logs[0], start, told)
                of_key = _measured(iter([_window(part, logs[0], EFFECT, start, told)]), np.array([EFFECT]))
            else:
                of_key = of_one_design(part, logs, start, told)
            for values, of_these in zip(found, of_key, strict=True):
                values[tuple(zip(*windows, strict=True))] = of_these
        row = {"first window": one_window(found.draw((slice(None), 0)), OF_RHYTHM), "1": one_window(found, OF_RHYTHM)}
        for looks in [looks for looks in (2, 4, 12, 50) if looks <= num_windows]:
            point, half, _ = run_intervals(found.draw((slice(None), slice(looks))))
            held = int((np.abs(point - EFFECT) <= half).sum())
            row[str(looks)] = {
                **judged(held, number, OF_RHYTHM), "width_points": round(200 * float(np.median(half)), 3)
            }  # fmt: skip
        rows[str(period)] = row
    over_all = {}
    for looks in next(iter(rows.values())):
        held, of = (sum(row[looks][name] for row in rows.values()) for name in ("held", "of"))
        over_all[looks] = judged(held, of, LOOSE)
    shares = np.mean(found_right, axis=0).round(4).tolist()
    return {"runs_of_a_period": number, "found_right_by_window": shares, "over_all": over_all, "by_period": rows}


def _without_stalls(part: list[Plan], logs: Floats, first_step: int, known: tuple[Rhythm, ...]) -> list[Plan]:
    """A part in which the steps that the library leaves out do not count."""
    counted = [plan for plan in part if plan.counted]
    sequential = [plan.arm is Mode.SEQUENTIAL for plan in counted]
    times = [math.exp(logs[plan.offset] + EFFECT * (plan.arm is Mode.SEQUENTIAL)) for plan in counted]
    hits = [of.hits([first_step + plan.offset for plan in counted]).tolist() for of in known]
    found = far_longer(times, list(zip(sequential, *hits, strict=True)), sequential)
    far = {plan.offset for plan, is_far in zip(counted, found.far, strict=True) if is_far and not found.kept}
    return [replace(plan, counted=plan.counted and plan.offset not in far) for plan in part]


def of_one_design(
    part: list[Plan], logs: Floats, first_step: int, known: tuple[Rhythm, ...], effects: Floats | None = None
) -> Windows:
    """What ``figures_of`` says of many windows of the same steps, much faster; shape of ``logs`` (windows, steps).

    ``effects``: of each window, ``EFFECT`` without them.
    """
    effects = np.full(len(logs), EFFECT) if effects is None else effects
    blocks = _window(part, logs[0], EFFECT, first_step, known).timed
    design = design_of(
        [block.mode for block in blocks], [block.block for block in blocks], [len(block.steps) for block in blocks],
        np.array([covariates_of(block, known) for block in blocks]),
    )  # fmt: skip
    logs = logs + math.log(100) + np.outer(effects, [plan.arm is Mode.SEQUENTIAL for plan in part])
    of_blocks = [logs[:, np.array(block.steps) - first_step] for block in blocks]
    found: list[Any] = []
    for values in ([of.mean(axis=1) for of in of_blocks], [np.exp(of).mean(axis=1) for of in of_blocks]):
        means, squares = design.means(np.array(values)), design.residuals(np.array(values)) ** 2
        parts = np.array([squares[own].sum(axis=0) for own in design.of_mode])
        parts *= (design.spread() / design.degrees)[:, None]
        if found:  # of times, not of logarithms
            parts, means, times_ms = parts / means**2, np.log(means), means
        variance = parts.sum(axis=0)
        found.append((means[1] - means[0], variance, variance**2 / (parts**2 / design.degrees[:, None]).sum(axis=0)))
    center, (by_logs, variance, degrees) = found[1][0], found[0]
    apart = np.abs(center - by_logs) > _MOST_APART * 2 * np.sqrt(variance) * t_quantile(degrees)
    variance, degrees = (np.where(apart, *sides) for sides in zip(found[1][1:], found[0][1:], strict=True))
    if design.of_mode.sum(axis=1).min() < MIN_BLOCKS:
        variance, degrees = np.full((2, len(logs)), np.nan)
    half = np.sqrt(variance) * t_quantile(degrees)
    value, low, high = np.expm1([center, center - half, center + half])
    return Windows(value, low, high, np.sqrt(variance), degrees, *times_ms, np.expm1(effects))


def ever_wrong(rng: np.random.Generator, per_window: int, number: int, most: int) -> dict[str, Any]:
    """The share of runs with normal noise whose interval for all looks was wrong at some look so far.

    Args:
        rng: of the noise.
        per_window: degrees of freedom of a window's own error.
        number: of runs.
        most: windows of a run.
    """
    sums, squares, wrong = np.zeros(number), np.zeros(number), np.zeros(number, dtype=bool)
    shares = {}
    for windows in range(1, most + 1):
        sums += rng.normal(size=number)
        squares += rng.chisquare(per_window, number)
        degrees = per_window * windows
        error = np.sqrt(squares / degrees / windows)
        wrong |= np.abs(sums / windows) > error * half_width_factor(degrees, windows, ALL_LOOKS)
        if windows in (1, 12, MANY_LOOKS, most):
            shares[str(windows)] = round(float(wrong.mean()), 4)
    met = binom.sf(int(wrong.sum()) - 1, number, MOST_WRONG) >= 0.05
    return {"runs": number, "by_windows": shares, "goal": MOST_WRONG, "met": bool(met)}


def profiled(rng: np.random.Generator, noise: str, number: int) -> dict[str, Any]:
    """The compute slowdown of windows with four profiled steps a mode."""
    part = [plan for plan in Schedule().part(Part.PROFILED) if plan.counted]
    truth, held, widths = math.exp(EFFECT) - 1, 0, []
    for logs in NOISES[noise][0](rng, (number, len(part))):
        blocks = []
        for plan, log in zip(part, logs.tolist(), strict=True):
            compute_ms = 60 * math.exp(log + (EFFECT if plan.arm is Mode.OVERLAPPED else 0.0))
            blocks.append(ProfiledBlock(plan.arm, plan.block, 1, compute_ms, compute_ms, 20, 20, 10, 10, 0))
        window = RankWindow(0, 0, 0, 1, True, "gloo", "cpu", 1.0, profiled=tuple(blocks))
        found: Estimate = figures_of([window])["compute_slowdown"]
        assert found.ci_low is not None
        assert found.ci_high is not None
        held += found.ci_low <= truth <= found.ci_high
        widths.append(found.ci_high - found.ci_low)
    return {**judged(held, number, NOISES[noise][1]), "width_points": round(100 * float(np.median(widths)), 3)}


def measure_noises(noises: Sequence[str], *, quick: bool = False) -> dict[str, Any]:
    """Windows and runs of some noises.

    Args:
        noises: of ``NOISES``.
        quick: far fewer windows and runs, for a test.
    """
    num_windows, num_runs = (60, 40) if quick else (3000, 1000)
    found: dict[str, Any] = {}
    for noise in noises:
        rng = np.random.default_rng([30, list(NOISES).index(noise)])
        for repeats in (4,) if quick else (4, 8):
            windows = simulated(rng, noise, repeats, num_windows if repeats == 4 else num_windows // 2)
            print(f"{noise}, repeats {repeats}: simulated", file=sys.stderr, flush=True)
            found[f"{noise}, repeats {repeats}"] = {
                "one_window": one_window(windows, NOISES[noise][1]),
                "run": runs(rng, windows, noise, repeats, num_runs),
            }
        if noise == "white":
            alone = simulated(rng, noise, 1, num_windows)
            found["white, repeats 1"] = {"run": runs(rng, alone, noise, 1, num_runs)}
    return found


def measure_others(*, quick: bool = False) -> dict[str, Any]:
    """Profiled figures, and very long runs; arguments as of ``measure_noises``."""
    rng = np.random.default_rng(30)
    noises, size = ("white", "drift", "heavy tails"), (100, 20) if quick else (10_000, 2000)
    return {
        "profiled": {noise: profiled(rng, noise, 20 if quick else 1000) for noise in noises},
        "ever_wrong": {
            f"{per_window} degrees of freedom a window": ever_wrong(rng, per_window, *size) for per_window in (5, 11)
        },
    }


def measure_rhythms(*, quick: bool = False) -> dict[str, Any]:
    """Those of 4 and of 8 repeats; arguments as of ``measure_noises``."""
    size: tuple[int, int, Sequence[int]] = (20, 4, [7, 8]) if quick else (200, 50, PERIODS)
    found = {f"repeats {repeats}": rhythms(np.random.default_rng([30, repeats]), repeats, *size) for repeats in (4, 8)}
    return {"date": time.strftime("%Y-%m-%d"), **found}


def not_met(found: Any, where: str = "") -> list[str]:
    """Where a goal is not met."""
    if not isinstance(found, dict):
        return []
    below = [each for name, part in found.items() for each in not_met(part, f"{where} / {name}" if where else name)]
    return [where, *below] if found.get("met") is False else below


def main() -> None:
    """Simulate, print the table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few windows: shows that it works, and no more")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    parser.add_argument("--only", choices=("rhythms", "noises", "others"), help="what else is in the file stays")
    arguments = parser.parse_args()
    if arguments.only and arguments.json is None:
        parser.error("--only needs --json, the file of which the rest stays")
    started_s = time.monotonic()
    found = json.loads(arguments.json.read_text()) if arguments.only else {"noises": {}}
    if arguments.only in (None, "noises"):
        noises = ("white", "drift") if arguments.quick else tuple(NOISES)
        found["noises"] = measure_noises(noises, quick=arguments.quick)
    if arguments.only in (None, "others"):
        found |= measure_others(quick=arguments.quick)
    if arguments.only in (None, "rhythms"):
        found["rhythms"] = measure_rhythms(quick=arguments.quick)
    for name, row in found["noises"].items():
        of_one, of_run = row.get("one_window"), row["run"]
        cells = [] if of_one is None else [f"W=1 {of_one['share']:.1%}/{of_one['width_points']:.2f}"]
        cells += [
            f"W={looks} {cell['share']:.1%}/{cell['width_points']:.2f}" for looks, cell in of_run["one_look"].items()
        ]
        wrong = of_run["wrong_at_some_look"]
        cells.append(f"wrong at some look {wrong['all_looks_intervals']:.1%} ({wrong['one_look_intervals']:.0%})")
        ratios = [cell["ratio"] for cell in of_run["width_of_all_looks_over_one"].values()]
        cells.append(" ".join("none" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
        print(f"{name:32} " + ", ".join(cells))
    for name, cell in found["profiled"].items():
        print(f"profiled, {name:22} W=1 {cell['share']:.1%}/{cell['width_points']:.2f}")
    for name, row in found["ever_wrong"].items():
        print(f"wrong at some look, {name}: {row['by_windows']}")
    for name in ("repeats 4", "repeats 8"):
        row = found["rhythms"][name]
        shares = [f"{looks} {cell['share']:.1%}" for looks, cell in row["over_all"].items()]
        print(f"rhythms, {name}: {', '.join(shares)}; found right at the first windows: {row['found_right_by_window']}")
    print(f"goals not met: {'; '.join(not_met(found)) or 'none'}")
    if arguments.json:
        about = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "numpy": np.__version__,
                 "seconds": round(time.monotonic() - started_s)}  # fmt: skip
        content = {**about, **found, "not_met": not_met(found)}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
