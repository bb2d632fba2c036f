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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from overlap_callbacks.analysis.figures import TimedMeans, figures_of
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import ProfiledBlock, RankWindow, Rhythm, TimedBlock
from overlap_callbacks.analysis.rhythms import find_rhythms
from overlap_callbacks.analysis.statistics import ONE_LOOK, Pooling, half_width_factor, pooled_error
from overlap_callbacks.monitor.placement import PERIODS, PhaseBalance
from overlap_callbacks.monitor.schedule import Part, Schedule

Floats = npt.NDArray[np.float64]

EFFECT = math.log(1.10)  # sequential steps take 10 % longer
VARIES = 0.02  # standard deviation over windows of the effect, where it varies
ALL_LOOKS = Pooling(all_looks=True)
LOOKS, MANY_LOOKS = (2, 3, 4, 6, 12, 50), 200
STEPS_BEFORE = 1000  # of which rhythms are found
# Least share of intervals that hold, and the most that is not too wide.
STRICT, LOOSE, AT_LEAST = (0.94, 0.985), (0.94, 1.0), (0.83, 1.0)
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

    def draw(self, index: npt.NDArray[np.intp]) -> Windows:
        """Those at some places, of any shape."""
        return Windows(*[part[index] for part in self])


def simulated(rng: np.random.Generator, noise: str, repeats: int, number: int) -> Windows:
    """Windows with one noise, every second one with the modes changed about."""
    schedule = Schedule(repeats=repeats, every_n_steps=1000)
    parts = [schedule.part(Part.TIMED, swapped=swapped) for swapped in (False, True)]
    logs = NOISES[noise][0](rng, (number, len(parts[0])))
    effects = np.full(number, EFFECT) + (rng.normal(0, VARIES, number) if noise == "effect varies" else 0.0)
    return _measured(
        (
            _window(parts[place % 2], log, effect, 0)
            for place, (log, effect) in enumerate(zip(logs, effects, strict=True))
        ),
        effects,
    )


def _window(
    part: list[Any], logs: Floats, effect: float, first_step: int, known: tuple[Rhythm, ...] = ()
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
    wrong_at_one, wrong_at_all = np.zeros(number, dtype=bool), np.zeros(number, dtype=bool)
    for looks in range(1, MANY_LOOKS + 1):
        so_far = Windows(*[part[:, :looks] for part in drawn])
        point, half, wide = run_intervals(so_far)
        apart = np.abs(point - EFFECT)
        if np.isnan(half).any():
            continue  # windows alone, and too few
        # Where windows differ, a few of them say too little of how much.
        few = noise == "effect varies" and looks < 6
        if not few:
            wrong_at_one |= apart > half
            wrong_at_all |= apart > wide
        if looks in (1, *LOOKS, MANY_LOOKS):
            ratio = float(np.median(wide / half))
            of_goal = None if few or looks == MANY_LOOKS else WIDER
            found["width_of_all_looks_over_one"][looks] = {
                "ratio": round(ratio, 3) if math.isfinite(ratio) else None, "goal": of_goal,
                "met": of_goal is None or repeats == 1 or round(ratio, 2) <= of_goal,
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
        "goal": MOST_WRONG,
        "met": bool(binom.sf(int(wrong_at_all.sum()) - 1, number, MOST_WRONG) >= 0.05),
    }
    return found


def rhythms(rng: np.random.Generator, number: int, num_windows: int, periods: list[int]) -> dict[str, Any]:
    """Steps that are 50 % longer at every k-th step, which the windows know as it was found; by period."""
    schedule, balance = Schedule(), PhaseBalance()
    firsts = [schedule.first_step + place * schedule.every_n_steps for place in range(num_windows)]
    placed = [balance.place(schedule, first, "sequential", schedule.steps_per_block) for first in firsts]
    parts = [schedule.part(Part.TIMED, swapped=where.timed_swapped) for where in placed]
    starts = [first + where.timed_start for first, where in zip(firsts, placed, strict=True)]
    rows: dict[str, Any] = {}
    found_right = 0
    for period in periods:
        windows = []
        for _ in range(number):
            phase = int(rng.integers(period))
            rhythm = Rhythm(period, phase, 50.0, 100.0)
            before = np.arange(STEPS_BEFORE)
            logs = rng.normal(0, 0.01, STEPS_BEFORE) + math.log(1.5) * rhythm.hits(before)
            known = find_rhythms(before, 100 * np.exp(logs))
            found_right += [(of.period, of.phase) for of in known] == [(period, phase)]
            for part, start in zip(parts, starts, strict=True):
                hits = rhythm.hits(start + np.arange(len(part)))
                logs = rng.normal(0, 0.01, len(part)) + math.log(1.5) * hits
                windows.append(_window(part, logs, EFFECT, start, known))
        found = _measured(iter(windows), np.full(len(windows), EFFECT))
        table = found.draw(np.arange(len(windows)).reshape(number, num_windows))
        row: dict[str, Any] = {"1": one_window(found, (0.90, 1.0))}
        for looks in [looks for looks in (2, 4, 12) if looks <= num_windows]:
            point, half, _ = run_intervals(Windows(*[part[:, :looks] for part in table]))
            held = int((np.abs(point - EFFECT) <= half).sum())
            row[str(looks)] = {
                **judged(held, number, (0.90, 1.0)), "width_points": round(200 * float(np.median(half)), 3)
            }  # fmt: skip
        rows[str(period)] = row
    over_all = {}
    for looks in next(iter(rows.values())):
        held, of = (sum(row[looks][name] for row in rows.values()) for name in ("held", "of"))
        over_all[looks] = judged(held, of, LOOSE)
    share = round(found_right / (number * len(periods)), 4)
    return {"found_right": share, "over_all": over_all, "by_period": rows}


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


def measure(*, quick: bool = False) -> dict[str, Any]:
    """All of it.

    Args:
        quick: far fewer windows and runs, for a test.
    """
    rng = np.random.default_rng(30)
    num_windows, num_runs = (60, 40) if quick else (3000, 1000)
    found: dict[str, Any] = {"noises": {}, "profiled": {}}
    for noise in ("white", "drift") if quick else NOISES:
        for repeats in (4,) if quick else (4, 8):
            windows = simulated(rng, noise, repeats, num_windows if repeats == 4 else num_windows // 2)
            print(f"{noise}, repeats {repeats}: simulated", file=sys.stderr, flush=True)
            found["noises"][f"{noise}, repeats {repeats}"] = {
                "one_window": one_window(windows, NOISES[noise][1]),
                "run": runs(rng, windows, noise, repeats, num_runs),
            }
    found["noises"]["white, repeats 1"] = {
        "run": runs(rng, simulated(rng, "white", 1, num_windows), "white", 1, num_runs)
    }
    for noise in ("white", "drift", "heavy tails"):
        found["profiled"][noise] = profiled(rng, noise, 20 if quick else 1000)
    found["ever_wrong"] = {
        f"{per_window} degrees of freedom a window": ever_wrong(
            rng, per_window, *((100, 20) if quick else (10_000, 2000))
        )
        for per_window in (5, 11)
    }
    found["rhythms"] = rhythms(rng, 2 if quick else 40, 4 if quick else 12, [7, 8] if quick else list(PERIODS))
    return found


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
    arguments = parser.parse_args()
    started_s = time.monotonic()
    found = measure(quick=arguments.quick)
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
    print(f"rhythms found right: {found['rhythms']['found_right']:.1%}")
    print("rhythms: " + ", ".join(f"W={w} {cell['share']:.1%}" for w, cell in found["rhythms"]["over_all"].items()))
    print(f"goals not met: {'; '.join(not_met(found)) or 'none'}")
    if arguments.json:
        about = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "numpy": np.__version__,
                 "seconds": round(time.monotonic() - started_s), "not_met": not_met(found)}  # fmt: skip
        arguments.json.write_text(json.dumps({**about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
