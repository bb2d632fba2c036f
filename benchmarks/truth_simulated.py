"""Every figure of the library against what a simulated device did, by its log.

    python3 dev.py test --simulated-gpu tests/simulated_gpu/test_device.py     makes what it needs
    LD_LIBRARY_PATH=$PWD/build/simulated_gpu/lib .venv-simulated-gpu/bin/python benchmarks/truth_simulated.py

A figure holds if it is that of the log, of the very steps that the figure is made of, within 0.2 %; what samples of
power tell within 2.5 %, and modelled causes within 5 %. Where the host is behind the device, the log tells bounds of a
step's time. ``--json`` also writes the results to a file. Exit code 1 if a figure does not hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.simulated_gpu.figures import CASES, run
from tests.simulated_gpu.meeting_place import meeting_place
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU


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
    every = [row for rows in found.values() for row in rows]
    print(f"{len(every)} figures of {len(found)} jobs, {len(missed)} that do not hold")
    if options.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        device = "Simulated GPU (no hardware)"
        options.json.write_text(json.dumps({"device": device, "versions": versions, "jobs": found}, indent=1) + "\n")
    return bool(missed)


def _run(name: str) -> list[dict[str, Any]]:
    with meeting_place() as folder:
        window, _, compared = run(CASES[name], folder)
    print(f"{name}{'' if window.valid else ': not valid: ' + '; '.join(window.problems)}")
    for one in compared:
        log = f"{one.true:11.4f}{'' if one.most is None else f' to {one.most:.4f}'}"
        print(f"  {one.name:44} {one.reported:11.4f}   log {log}{'' if one.holds else '   <-- off'}")
    return [
        {
            "figure": one.name,
            "reported": round(one.reported, 6),
            "log": round(one.true, 6) if one.most is None else [round(one.true, 6), round(one.most, 6)],
            "within": one.within,
            "slack": one.slack,
            "holds": one.holds,
        }
        for one in compared
    ]


if __name__ == "__main__":
    sys.exit(main())
