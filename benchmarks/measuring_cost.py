"""Is the cost of a window told rightly? Synthetic windows with known costs put in.

    python benchmarks/measuring_cost.py [--windows 1000] [--json benchmarks/results/measuring-cost.json]

Steps of 100 ms, with noise, run by the real schedule with its parts at random places. Sequential steps, those under the
profiler, the library's own work and steps after the window take known times more. The library's analysis tells the cost
from the marks of the steps. Its 95 % interval should hold the known cost in about 95 % of windows (goal: 93 to 98.5 %;
at least 90 % with noise that lasts longer than a window's blocks, and with rare stalls: one on the steps after a window
counts with two steps at most, and is no cost). Beside it stands what the steps before a window
tell, as up to 2026-11-25: the time of the window beyond that of as many steps as the 64 before it.

A second table has what default windows cost by their plan, times the square of their interval's width: at equal width,
a run costs as much as that says. Beside it: the schedule and intervals of 2026-11-25.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import intervals
from benchmarks.about import about
from overlap_callbacks import Schedule
from overlap_callbacks.analysis.measuring_cost import StepsAfter, lost_time
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.settled import Verdict
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.monitor.background.budget import LongBlocks
from overlap_callbacks.monitor.background.measurement import stretches_of
from overlap_callbacks.monitor.placement import PhaseBalance
from overlap_callbacks.monitor.schedule import Part, Placement
from overlap_callbacks.monitor.window import MeasuredStep

STEP_MS, BEFORE, AFTER = 100.0, 64, 12
GOAL, GOAL_OF_RARE = (0.93, 0.985), 0.9
_LOG = StepLog((), 0, None)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """What is put in.

    Attributes:
        sequential, profiled: of such a step, as a fraction of an overlapped one.
        own_ms: work on the training thread in the whole window.
        after: of the first steps after the window, as a fraction; it fades.
    """

    sequential: float
    profiled: float
    own_ms: float
    after: float


COSTS = {
    "no costs": Costs(0.0, 0.0, 0.0, 0.0),
    "usual costs": Costs(0.2, 0.1, 300.0, 0.5),
    "sequential steps are faster": Costs(-0.1, 0.1, 300.0, 0.5),
}
NOISE = (
    "white 2 %", "white 10 %", "AR(1) 0.5, 2 %", "drift 5 %", "heavy tails 3 %", "rare stalls",
    "sequential twice as noisy", "AR(1) 0.9, 2 %",
)  # fmt: skip


def noise_of(kind: str, num_steps: int, chance: np.random.Generator) -> Floats:
    """Step times without costs, as multiples of the usual one; their mean is one."""
    if kind.startswith("AR(1)"):
        rho, noise = float(kind.split()[1].rstrip(",")), np.empty(num_steps)
        noise[0] = chance.normal()
        for step, shock in enumerate(chance.normal(0, np.sqrt(1 - rho**2), num_steps - 1), start=1):
            noise[step] = rho * noise[step - 1] + shock
        return 1 + 0.02 * noise
    if kind.startswith("drift"):
        return 1 + 0.02 * chance.normal(size=num_steps) + np.linspace(-0.025, 0.025, num_steps)
    if kind.startswith("heavy"):
        return 1 + 0.03 * chance.standard_t(3, num_steps) / np.sqrt(3)
    if kind == "rare stalls":
        return 1 + 0.02 * chance.normal(size=num_steps) + np.where(chance.random(num_steps) < 0.005, 30.0, 0.0)
    return 1 + (0.1 if "10 %" in kind else 0.02) * chance.normal(size=num_steps)


def window_of(kind: str, costs: Costs, seed: int) -> dict[str, float | None]:
    """What is told of one window, and the truth, in ms."""
    chance = np.random.default_rng(seed)
    base = Schedule()
    gap = int(chance.integers(0, 120))
    timed_start = base.decided_at + 24 + int(chance.integers(0, 120))
    timed_end = timed_start + len(base.part(Part.TIMED)) + 24
    profiled_start = timed_end + gap
    schedule = base.placed(Placement(timed_start, profiled_start, bool(chance.integers(2)), bool(chance.integers(2))))
    end = profiled_start + len(base.part(Part.PROFILED))
    times = STEP_MS * noise_of(kind, BEFORE + end + AFTER, chance)
    before, inside, after = times[:BEFORE], times[BEFORE : BEFORE + end], times[BEFORE + end :]
    steps, now_ns, true_ms, window_ms = [], 0, costs.own_ms, costs.own_ms
    for offset, usual_ms in enumerate(inside):
        plan = schedule.plan(schedule.first_step + offset)
        took_ms = float(usual_ms)
        if plan is not None:
            other = plan.arm is Mode.SEQUENTIAL
            extra_ms = STEP_MS * (costs.sequential * other + costs.profiled * (plan.part is Part.PROFILED))
            if other and kind == "sequential twice as noisy":
                took_ms += STEP_MS * 0.02 * np.sqrt(3) * chance.normal()
            true_ms, took_ms = true_ms + extra_ms, took_ms + extra_ms
            end_ns = now_ns + round(took_ms * 1e6)
            steps.append(MeasuredStep(plan=plan, start=now_ns, end=end_ns, log=_LOG))
        window_ms += took_ms
        now_ns += round(took_ms * 1e6)
    late_ms = STEP_MS * costs.after * 0.5 ** np.arange(AFTER)
    known_after = np.minimum(after, 2 * STEP_MS) + late_ms  # a stall after the window is cut off, as by the monitor
    true_ms += float(late_ms.sum())
    found = lost_time(stretches_of(steps), costs.own_ms, StepsAfter(AFTER, float(known_after.sum())))
    usual = before[before <= 20 * np.median(before)].mean()
    by_before = window_ms + float(known_after.sum()) - (end + AFTER) * usual
    assert found is not None
    return {"true": true_ms, "told": found.ms, "low": found.low_ms, "high": found.high_ms, "before": by_before}


def run(kind: str, name: str, windows: int) -> dict[str, Any]:
    """One row of the table; fractions are of the time from one window to the next."""
    made = [window_of(kind, COSTS[name], seed) for seed in range(windows)]
    true, told, low, high, before = (
        np.array([found[key] for found in made], dtype=float) for key in ("true", "told", "low", "high", "before")
    )
    between_ms = Schedule().every_n_steps * STEP_MS
    held = float(((low <= true) & (true <= high)).mean())
    least, most = (GOAL_OF_RARE, 1.0) if kind in ("AR(1) 0.9, 2 %", "rare stalls") else GOAL
    return {
        "noise": kind, "costs": name, "windows": windows, "true": float(true.mean() / between_ms), "held": held,
        "bias": float((told - true).mean() / between_ms),
        "half_width": float(np.median(high - low) / 2 / between_ms),
        "resolved": float((low > 0).mean()),
        "error_by_steps_before": float(np.sqrt(((np.maximum(before, 0) - true) ** 2).mean()) / between_ms),
        "error": float(np.sqrt(((told - true) ** 2).mean()) / between_ms),
        "ok": least <= held <= most,
    }  # fmt: skip


# -- cost at equal width

COMMIT_BEFORE = "696575d2"  # the commit before windows had places of their own and blocks a common trend
# There, for as many windows: the width of the interval in points, by the same noise. A window cost 11.0 steps.
WIDTHS_BEFORE = {
    "white": {1: 3.303, 2: 9.822, 4: 2.21, 12: 0.957, 50: 0.437},
    "autocorrelated 0.5": {1: 4.004, 2: 10.884, 4: 2.546, 12: 1.113, 50: 0.518},
    "drift": {1: 4.013, 2: 4.917, 4: 1.106, 12: 0.479, 50: 0.219},
}
STEPS_BEFORE = 11.0


def steps_lost(num_windows: int) -> Floats:
    """What each window of a run without memory costs, in steps: sequential and profiled steps, and the library's work.

    Its plan is the library's, long blocks included.
    """
    schedule, balance, long_blocks, costs = Schedule(), PhaseBalance(), LongBlocks(), COSTS["usual costs"]
    lost = np.full(num_windows, costs.own_ms / STEP_MS)
    for window in range(num_windows):
        first = schedule.first_step + window * schedule.every_n_steps
        long_steps = long_blocks.steps(window, "sequential", schedule, schedule.steps_per_block)
        planned = schedule.placed(balance.place(schedule, first, "sequential", schedule.steps_per_block, long_steps))
        for plan in map(planned.plan, range(first, first + schedule.every_n_steps)):
            if plan is not None:
                lost[window] += costs.sequential * (plan.mode is Mode.SEQUENTIAL)
                lost[window] += costs.profiled * (plan.part is Part.PROFILED)
        told = {"window": window, "power": None, "settled": SimpleNamespace(verdict=Verdict.SHORT)}
        times = {"e2e_overlapped_ms": STEP_MS, "e2e_sequential_ms": STEP_MS * (1 + costs.sequential)}
        means = {name: SimpleNamespace(value=value) for name, value in times.items()}
        long_blocks.record(cast("Any", SimpleNamespace(**told, **means)))
    return lost


def at_equal_width(number: int) -> list[dict[str, Any]]:
    """The second table, from as many simulated windows of each noise, and as many runs of these."""
    rng, part = np.random.default_rng(30), Schedule().part(Part.TIMED)
    table = []
    for noise, before in WIDTHS_BEFORE.items():
        made = intervals.of_one_design(part, intervals.NOISES[noise][0](rng, (number, len(part))), 0, ())
        drawn = made.draw(rng.integers(0, number, (number, max(before))))
        for windows, width_before in before.items():
            lost = float(steps_lost(windows).sum())
            if windows == 1:
                width = 100 * float(np.median(made.high - made.low))
            else:
                point, half, _ = intervals.run_intervals(drawn.draw((slice(None), slice(windows))))
                width = 100 * float(np.median(np.expm1(point + half) - np.expm1(point - half)))
            lost_before = STEPS_BEFORE * windows
            table.append(
                {
                    "noise": noise, "windows": windows, "steps_lost": round(lost, 2), "width_points": round(width, 3),
                    "before": {"commit": COMMIT_BEFORE, "steps_lost": lost_before, "width_points": width_before},
                    "cost_at_equal_width": round(lost * width**2 / (lost_before * width_before**2), 3),
                }
            )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--equal-width", action="store_true", help="only the second table; the file's first stays")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("  held    true    bias  half-width  resolved   error  (by steps before)")
    table = []
    for kind in () if options.equal_width else NOISE:
        for name in COSTS:
            row = run(kind, name, options.windows)
            table.append(row)
            print(
                f"{row['held']:6.1%}  {row['true']:6.2%}  {row['bias']:6.2%}  {row['half_width']:10.2%}  "
                f"{row['resolved']:8.0%}  {row['error']:6.2%}  {row['error_by_steps_before']:17.2%}  "
                f"{'' if row['ok'] else 'NOT OK '}{kind}; {name}",
                flush=True,
            )
    print(f"{sum(row['ok'] for row in table)} of {len(table)} rows hold")
    equal_width = at_equal_width(10 * options.windows)
    print("\nwindows  steps lost (before)  width (before)  cost at equal width, of that before")
    for row in equal_width:
        before = row["before"]
        print(
            f"{row['windows']:7}  {row['steps_lost']:10.1f} ({before['steps_lost']:6.1f})  {row['width_points']:5.2f} "
            f"({before['width_points']:6.2f})  {row['cost_at_equal_width']:19.2f}  {row['noise']}"
        )
    if options.json:
        content = {
            **about("numpy"),
            "goal": {"held": GOAL, "held_with_long_noise_or_stalls": GOAL_OF_RARE},
            "rows": table,
        }
        if options.equal_width:
            content = json.loads(options.json.read_text())
        content["at_equal_width"] = equal_width
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
