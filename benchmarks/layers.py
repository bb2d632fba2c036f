"""One layer's collective is slow, or one rank: is it named first? A GPT of 12 layers on two simulated GPUs.

    python3 dev.py test --simulated-gpu tests/simulated_gpu/test_layers.py     makes what it needs
    LD_LIBRARY_PATH=$PWD/build/simulated_gpu/lib .venv-simulated-gpu/bin/python benchmarks/layers.py [--runs 50]

A run attaches to a job that trains already, and has one window. In it the device makes a collective of a layer drawn at
random 10 to 80 ms longer: that of its size, which no other layer has. Which unit or bucket holds it is taken from the
model and its buckets, not from the library. A draw counts if steps then take at least a tenth longer, by the device's
events: others are hidden and hold nothing up. Or a rank drawn at random computes 10 to 80 ms more, alike in all layers.
A run counts if no device was idle for more than a tenth of the profiled steps: else the host, whose times are real, was
late. Others are counted apart, and all are in the results. A row that the file has is gone on with.
Goal: the unit, or the rank and no layer, is named first in 48 of 50 runs: in the table by name and in the sentence.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import overlap_callbacks
from tests.simulated_gpu.layers import FRAMEWORKS, run
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU

GOAL, MOST_TRIES = 0.96, 3
# Runs of one job of two ranks, which is killed after some minutes: it could hang.
AT_ONCE = 5


def main() -> int:
    """Run them, and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--only", choices=FRAMEWORKS)
    parser.add_argument("--slow", choices=("layer", "rank"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, beside those it has")
    given = parser.parse_args()
    if not ON_SIMULATED_GPU:
        print("this is not the simulated GPU: set LD_LIBRARY_PATH as --help says", file=sys.stderr)
        return 2
    most = MOST_TRIES * given.runs
    rows = json.loads(given.json.read_text())["rows"] if given.json and given.json.exists() else {}
    for kind in [given.only] if given.only else FRAMEWORKS:
        for slow in [given.slow] if given.slow else ("layer", "rank"):
            row = rows.get(f"{kind}, {slow}") or judged([], given.runs)
            while (left := given.runs - row["runs"]) > 0 and len(row["of"]) < most:
                number = len(row["of"])
                with tempfile.TemporaryDirectory() as folder:
                    made = run(kind, range(number, min(number + min(left, AT_ONCE), most)), slow, Path(folder))
                row = rows[f"{kind}, {slow}"] = judged([*row["of"], *made], given.runs)
                if given.json:
                    write(given.json, rows)
            print(
                f"{kind}, a slow {slow}: right in {row['right']} of {row['runs']}, {len(row['of'])} in all", flush=True
            )
            for one in row["of"]:
                if not one["right"] and not one["host_bound"]:
                    print(f"  {one}", flush=True)
    return not all(row["met"] for row in rows.values())


def judged(runs: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """A row of the results: of ``number`` runs that count."""
    count = [one for one in runs if not one["host_bound"]]
    right = sum(one["right"] for one in count)
    met = len(count) >= number and right >= GOAL * len(count)
    return {"runs": len(count), "host_bound": len(runs) - len(count), "right": right, "met": met, "of": runs}


def write(path: Path, rows: dict[str, Any]) -> None:
    about = {"version": overlap_callbacks.__version__, "date": datetime.date.today().isoformat()}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    found = {**about, "device": "Simulated GPU (no hardware)", "versions": versions, "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
