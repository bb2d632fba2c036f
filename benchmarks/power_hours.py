"""Does an hour of training tell watts and joules? The default schedule, over the scripted sensors of power_truth.

    python benchmarks/power_hours.py [--hours 20] [--only WORD] [--json benchmarks/results/power-hours.json]

Schedule and budget are the library's: they say which windows are measured and which have long blocks. Sequential steps
take 20 % longer. An hour's figures are those of its last window with watts, as on a run's screen. The goal is watts and
joules of both modes within 2 % in 95 % of hours; what forbids them stands in the row.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import power_truth

from overlap_callbacks import OverlapReport, Schedule
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import DevicePower, JobModePower, JobPower
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.config import MonitorConfig

PROFILED, OWN_S = 0.1, 0.3  # what else a window costs: of a profiled step, and the library's own work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=int, default=20, help="of each row")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    every = [replace(row, long_s=0.0) for row in power_truth.rows() if row.long_s]
    table = hours_table([row for row in every if options.only in row.name], options.hours)
    print(f"{sum(row['ok'] for row in table)} of {len(table)} rows hold")
    if options.json:
        power_truth.write(options.json, table, within=power_truth.WITHIN, hours_within=power_truth.GOAL_WITHIN)


def hours_table(chosen: list[power_truth.Row], hours: int) -> list[dict[str, Any]]:
    table = []
    print("watts and joules  within 2 %  largest error  windows with long blocks")
    for row in chosen:
        found = run_hours(row, hours)
        table.append(found)
        print(
            f"{found['told']:16.0%}  {found['right']:10.0%}  {found['largest_error']:13.2%}  "
            f"{found['long_blocks']:24.0f}  {'' if found['ok'] else 'NOT OK '}{found['row']}"
            + (f" | {found['reason']}" if found["reason"] else ""),
            flush=True,
        )
    return table


def hour_of(row: power_truth.Row, seed: int) -> dict[str, Any]:
    """One hour of a job by the default schedule and budget: what its last window with watts says."""
    schedule, now_s, window, num_long = Schedule(), 0.0, 0, 0
    config = MonitorConfig()
    budget = WindowBudget(config.max_overhead, lambda: round(now_s * 1e9))
    told: list[dict[str, Any]] = []
    reason = ""
    now_s = schedule.first_step * row.step_s
    while now_s < 3600.0:
        opened_ns = round(now_s * 1e9)
        if budget.skip(window) is None:
            steps = budget.long_blocks.steps(window, "sequential", schedule, schedule.steps_per_block)
            num_long += steps > 0
            script, power, results = power_truth.measured(replace(row, long_s=steps * row.step_s), 1000 * seed + window)
            if all(result["error"] is not None for result in results):
                told = results
            elif steps:
                reason = next(result["reason"] for result in results if result["reason"])
            report = report_of(window, script, power, schedule, row)
            now_s += (report.lost_ms or 0.0) / 1e3
            budget.record(report, opened_ns)
        now_s += schedule.every_n_steps * row.step_s
        window += 1
    return {"told": told, "long": num_long, "reason": reason}


def report_of(
    window: int, script: power_truth.Script, power: DevicePower, schedule: Schedule, row: power_truth.Row
) -> OverlapReport:
    """What the budget asks of a window's report."""
    step_ms = {}
    for mode in Mode:
        blocks = [s for s in script.stretches if s.mode is mode and s.counted][: schedule.timed_blocks // 2]
        step_ms[mode] = 1e3 * sum(s.duration_s for s in blocks) / sum(s.num_steps for s in blocks)
    sequential = sum(s.num_steps for s in script.stretches if s.mode is Mode.SEQUENTIAL)
    profiled = schedule.profiled_steps * (1 + schedule.warmup_steps)
    lost_steps = (sequential + profiled) * (power_truth.SLOWER - 1) + 2 * profiled * PROFILED
    lost_ms = 1e3 * (lost_steps * row.step_s + OWN_S)
    modes = [
        JobModePower(m.mode, 1, m.avg_w, m.avg_w, energy_per_step_j=m.energy_per_step_j, energy_method=m.energy_method)
        for m in power.modes
    ]
    return OverlapReport(
        window=window, first_step=0, num_steps=len(script.stretches), complete=True, control=False, world_size=1,
        ranks=(0,), backend="", device="", valid=True, problems=(), wall_ms=1e3 * script.end_s, lost_ms=lost_ms,
        measurement_overhead=lost_ms / (1e3 * schedule.every_n_steps * row.step_s), lost_high_ms=lost_ms,
        e2e_overlapped_ms=Estimate(step_ms[Mode.OVERLAPPED], None, None, 16, 8),
        e2e_sequential_ms=Estimate(step_ms[Mode.SEQUENTIAL], None, None, 16, 8),
        power=JobPower(1, (0,), modes=tuple(modes)),
    )  # fmt: skip


def run_hours(row: power_truth.Row, hours: int) -> dict[str, Any]:
    """One row of the table of hours."""
    found = [hour_of(row, seed) for seed in range(hours)]
    told = [hour["told"] for hour in found if hour["told"]]
    errors = [max(abs(result["error"]) for result in results) for results in told]
    right = sum(error <= power_truth.WITHIN for error in errors)
    reasons = [hour["reason"] for hour in found if not hour["told"]]
    if any(hour["long"] == 0 and not hour["told"] for hour in found):
        reasons = ["no window of the hour had long blocks", *reasons]
    return {
        "row": row.name, "hours": hours, "told": len(told) / hours, "right": right / hours,
        "long_blocks": float(np.median([hour["long"] for hour in found])), "largest_error": max(errors, default=0.0),
        "reason": reasons[0] if reasons else "", "ok": right / hours >= power_truth.GOAL_WITHIN,
    }  # fmt: skip


if __name__ == "__main__":
    main()
