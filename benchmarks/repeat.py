"""Do two runs of the demo agree? Runs it twice, and compares the intervals of each figure.

python benchmarks/repeat.py
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch

from overlap_callbacks import FIGURES
from overlap_callbacks.cli.demo.command import train
from overlap_callbacks.cli.demo.worker import DemoConfig
from overlap_callbacks.report import record


def main() -> None:
    """Run twice, and print a line for each figure and how many agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=["pytorch", "lightning"], default="pytorch")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            config = DemoConfig(framework=arguments.framework, run_dir=f"{folder}/{name}")
            train(config)
            runs.append(record.read(Path(config.run_dir)).pooled())
    rows, agree = {}, 0
    for figure in FIGURES:
        first, second = (run.get(figure.name) for run in runs)
        if first is None or second is None:
            continue
        meet = first.ci_low <= second.ci_high and second.ci_low <= first.ci_high
        agree += meet
        rows[figure.name] = [[run.value, run.ci_low, run.ci_high] for run in (first, second)]
        shown = "   ".join(f"{run.value:9.4f} [{run.ci_low:9.4f}, {run.ci_high:9.4f}]" for run in (first, second))
        print(f"{figure.name:<28} {shown}{'' if meet else '   apart'}")
    print(f"{agree} of {len(rows)} figures agree within their intervals")
    if arguments.json:
        environment = {"date": time.strftime("%Y-%m-%d"), "torch": str(torch.__version__), "device": "cpu",
                       "python": platform.python_version(), "framework": arguments.framework}  # fmt: skip
        result = {"environment": environment, "agree": agree, "figures": rows}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
