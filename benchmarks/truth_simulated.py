"""Every figure of the library against what a simulated device did, by its log.

    python3 dev.py test --simulated-gpu tests/simulated_gpu/test_device.py     makes what it needs
    LD_LIBRARY_PATH=$PWD/build/simulated_gpu/lib .venv-simulated-gpu/bin/python benchmarks/truth_simulated.py

``--json`` also writes the results to a file. Exit code 1 if a figure is further from the log than is allowed: 1 % of a
time of the device, 2.5 % of what samples of power tell.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.simulated_gpu.figures import CASES, Compared, run
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU, Parameters


def main() -> int:
    """Run the cases, and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name has this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    if not ON_SIMULATED_GPU:
        print("this is not the simulated GPU: set LD_LIBRARY_PATH as --help says", file=sys.stderr)
        return 2
    found = {name: _run(name) for name in CASES if options.only in name}
    missed = [(name, row["figure"]) for name, rows in found.items() for row in rows if not row["holds"]]
    print(
        f"{sum(map(len, found.values()))} figures of {len(found)} jobs, {len(missed)} further from the log than allowed"
    )
    if options.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        device = "Simulated GPU (no hardware)"
        options.json.write_text(json.dumps({"device": device, "versions": versions, "jobs": found}, indent=1) + "\n")
    return bool(missed)


def _run(name: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Parameters(folder=Path(folder)).apply()
        window, _, compared = run(CASES[name], Path(folder))
    print(f"{name}{'' if window.valid else ': not valid: ' + '; '.join(window.problems)}")
    for one in compared:
        print(f"  {one.name:44} {one.reported:11.4f}   log {one.least:11.4f} to {one.most:11.4f}{_remark(one)}")
    return [
        {
            "figure": one.name,
            "reported": round(one.reported, 6),
            "log": [round(one.least, 6), round(one.most, 6)],
            "holds": one.holds,
        }
        for one in compared
    ]


def _remark(one: Compared) -> str:
    return "" if one.holds else "   <-- off"


if __name__ == "__main__":
    sys.exit(main())
