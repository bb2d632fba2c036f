"""The error of measurement on a real job: A/A windows of the demo, both arms overlapped.

    python benchmarks/control.py [--windows 12]

There is no difference to be found, so a 95 % interval should contain zero in about 19 windows of 20.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch

from overlap_callbacks.cli.demo.command import train
from overlap_callbacks.cli.demo.worker import DemoConfig
from overlap_callbacks.report import record

FIGURES = ("speedup_vs_sequential", "compute_slowdown", "gap_to_ideal", "comm_slowdown")


def main() -> None:
    """Run, print one line a window, and the share of intervals that contain zero."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = DemoConfig(control=True, every_n_steps=82, steps=10 + 82 * arguments.windows, run_dir=f"{folder}/run")
        train(config)
        run_record = record.read(Path(config.run_dir))
    windows = [window for window in run_record.windows if window.complete]
    hits = dict.fromkeys(FIGURES, 0)
    print(f"{'window':>6}  " + "  ".join(f"{name:^34}" for name in FIGURES))
    for window in windows:
        cells = []
        for name in FIGURES:
            figure = getattr(window, name)
            hit = figure.ci_low <= 0 <= figure.ci_high
            hits[name] += hit
            text = f"{figure.value:+.1%} [{figure.ci_low:+.1%}, {figure.ci_high:+.1%}]{'' if hit else ' *'}"
            cells.append(f"{text:^34}")
        print(f"{window.window:>6}  " + "  ".join(cells))
    shares = {name: f"{count} of {len(windows)}" for name, count in hits.items()}
    print("intervals that contain zero: " + ", ".join(f"{name} {share}" for name, share in shares.items()))
    pooled = {name: figure for name, figure in run_record.summary.sides().items() if name in FIGURES}
    for name, figure in pooled.items():
        print(f"pooled over the run: {name} {figure.value:+.2%} [{figure.ci_low:+.2%}, {figure.ci_high:+.2%}]")
    if arguments.json:
        environment = {"date": time.strftime("%Y-%m-%d"), "torch": str(torch.__version__), "device": "cpu",
                       "python": platform.python_version()}  # fmt: skip
        by_window = [
            {name: [getattr(w, name).value, getattr(w, name).ci_low, getattr(w, name).ci_high] for name in FIGURES}
            for w in windows
        ]
        pooled_json = {name: [figure.value, figure.ci_low, figure.ci_high] for name, figure in pooled.items()}
        result = {"environment": environment, "contain_zero": shares, "pooled": pooled_json, "windows": by_window}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
