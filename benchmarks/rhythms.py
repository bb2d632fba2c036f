"""Rhythms that are found in the times of simulated steps, and what leaving out steps that took far longer does.

Step times are simulated, as a job's host clock would tell them between windows. Three tables: how often a rhythm of a
given period and size is found, with its period and phase right; how often one is told where there is none; and by how
much the difference of the modes is off in a window of 16 blocks from which far longer steps were left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import overlap_callbacks
from overlap_callbacks.analysis.outliers import far_longer
from overlap_callbacks.analysis.rhythms import find_rhythms

Floats = npt.NDArray[np.float64]
DEVIATION = 0.01
PERIODS = (2, 3, 4, 8, 10, 25, 50, 64)
SIZES = (0.015, 0.03, 0.1, 0.5)
NUMBERS = (300, 4096)
NOISES = ("white", "AR 0.5", "AR 0.9", "drift", "heavy tails", "rare stalls", "straggler spells", "two clocks")
ORDER = np.repeat([letter == "S" for letter in "OSOSOSOSSOSOSOSO"], 2)
EFFECT = 0.1


def ring(number: int) -> npt.NDArray[np.int64]:
    """Steps outside windows of 65 steps, one every 500."""
    steps = np.arange(20, 20 + 2 * number)
    return steps[(steps - 20) % 500 >= 65][:number]


def noise(kind: str, number: int, chance: np.random.Generator) -> Floats:
    """Logarithms of step times."""
    logs = chance.normal(0, DEVIATION, number)
    place = np.arange(number)
    if kind.startswith("AR"):
        from scipy.signal import lfilter

        correlation = float(kind.split()[1])
        logs[1:] *= math.sqrt(1 - correlation**2)
        return np.asarray(lfilter([1], [1, -correlation], logs))
    if kind == "drift":
        logs += 0.15 * place / max(number, 1024) + 0.05 * np.sin(place / 700)
    elif kind == "heavy tails":
        logs += (chance.random(number) < 0.05) * chance.exponential(0.3, number)
    elif kind == "rare stalls":
        logs += (chance.random(number) < 0.02) * 0.7
    elif kind == "straggler spells":
        for first in np.flatnonzero(chance.random(number) < 0.01):
            logs[first : first + chance.integers(3, 10)] += 0.22
    elif kind == "two clocks":
        logs += 0.04 * ((chance.integers(2) + np.cumsum(chance.random(number) < 1 / 60)) % 2)
    return logs


def detection(kind: str, period: int, size: float, number: int, runs: int, chance: np.random.Generator) -> Any:
    """How often the first rhythm is right, how often anything is told, and what it costs against the truth."""
    steps = ring(number)
    right = told = more = 0
    errors, cpu_ms = [], []
    for _ in range(runs):
        phase = int(chance.integers(period))
        step_ms = 100 * np.exp(noise(kind, number, chance)) * (1 + size * (steps % period == phase))
        started_s = time.thread_time()
        found = find_rhythms(steps, step_ms)
        cpu_ms.append((time.thread_time() - started_s) * 1e3)
        told += bool(found)
        more += len(found) > 1
        if found and (found[0].period, found[0].phase) == (period, phase):
            right += 1
            errors.append(found[0].extra_ms / found[0].step_ms / size - 1)
    return {
        "noise": kind, "steps": number, "period": period, "size": size, "runs": runs, "right": right / runs,
        "told": told / runs, "more_told": more / runs, "cost_error": float(np.median(errors)) if errors else None,
        "cpu_ms": float(np.median(cpu_ms)),
    }  # fmt: skip


def false_alarms(kind: str, number: int, runs: int, chance: np.random.Generator) -> Any:
    """How often a rhythm is told where there is none."""
    steps = ring(number)
    told = sum(bool(find_rhythms(steps, 100 * np.exp(noise(kind, number, chance)))) for _ in range(runs))
    return {"noise": kind, "steps": number, "runs": runs, "told": told / runs}


def leaving_out(kind: str, runs: int, chance: np.random.Generator) -> Any:
    """What leaving out does to the difference of the modes' means over many windows, in points, and to its spread."""
    plain, kept_alone, shares, apart = [], [], [], 0
    for _ in range(runs):
        steps = noise(kind, 48, chance)[np.arange(48) % 3 > 0]  # one warm-up step a block
        step_ms = 100 * np.exp(steps) * (1 + EFFECT * ORDER)
        found = far_longer(step_ms.tolist(), ORDER.tolist(), ORDER.tolist())
        apart += found.kept
        keep = np.ones(32, dtype=bool) if found.kept else ~found.far
        shares.append(1 - keep.mean())
        for kept, into in ((np.ones(32, dtype=bool), plain), (keep, kept_alone)):
            logs = np.log(step_ms)
            into.append(100 * (logs[kept & ORDER].mean() - logs[kept & ~ORDER].mean() - math.log1p(EFFECT)))
    return {
        "noise": kind, "windows": runs, "bias_points": float(np.mean(kept_alone)),
        "bias_standard_error": float(np.std(kept_alone) / math.sqrt(runs)),
        "deviation_points": float(np.std(kept_alone)),
        "deviation_points_all_steps": float(np.std(plain)), "share_left_out": float(np.mean(shares)),
        "told_of_one_mode": apart / runs,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs",
        type=int,
        default=100,
        help="of each period, size and noise; 20 and 300 times as many of the other tables",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chance = np.random.default_rng(0)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": f"python {' '.join(sys.argv)}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "overlap_callbacks": overlap_callbacks.__version__,
        "leaving_out": [leaving_out(kind, 300 * options.runs, chance) for kind in NOISES],
        "false_alarms": [
            false_alarms(kind, number, 20 * options.runs, chance) for number in NUMBERS for kind in NOISES
        ],
        "detection": [
            detection(kind, period, size, number, options.runs, chance)
            for number in NUMBERS
            for kind in ("white", "AR 0.9", "heavy tails", "straggler spells")
            for size in SIZES
            for period in PERIODS
            if number >= 5.5 * period
        ],
    }
    for name in ("leaving_out", "false_alarms", "detection"):
        print(name)
        for row in result[name]:
            print(
                "  ",
                ", ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
                ),
            )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
