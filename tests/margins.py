"""How near measured times came to the bounds that tests hold them to.

Where ``OVERLAP_MARGINS`` names a file, each is a line there. ``.ci/nightly`` keeps the table of a run beside other
work: ``python -m tests.margins LINES [TABLE]`` prints each test and bound once, the nearest first, and writes JSON.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

# Longest wait for what must come. Only where a test fails is it reached; pytest gives up later than that.
PATIENCE_S = 400.0
_FILE = "OVERLAP_MARGINS"
_SHOWN = 40


def near(value: float, bound: float, name: str = "") -> bool:
    """Whether a value is at most a bound.

    Args:
        value: that was measured.
        bound: of it.
        name: of the bound, where a test has several.
    """
    if path := os.environ.get(_FILE):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        used = value / bound if bound > 0 else 0.0 if value <= bound else float("inf")
        with Path(path).open("a", newline="", encoding="utf-8") as file:  # one short line: whole beside those of others
            csv.writer(file).writerow((f"{used:.4f}", f"{value:.6g}", f"{bound:.6g}", name, test))
    return value <= bound


def table(lines: Path) -> list[dict[str, str | float]]:
    """The nearest that each test came to each of its bounds, over all runs of the file; nearest first."""
    found: dict[tuple[str, str], dict[str, str | float]] = {}
    with lines.open(newline="", encoding="utf-8") as file:
        for used, value, bound, name, test in csv.reader(file):
            row = {"test": test, "name": name, "used": float(used), "value": float(value), "bound": float(bound)}
            before = found.setdefault((test, name), row)
            if row["used"] > before["used"]:  # type: ignore[operator]
                found[test, name] = row
    return sorted(found.values(), key=lambda row: -float(row["used"]))


def main(lines: str, kept: str = "") -> None:
    rows = table(Path(lines))
    if kept:
        Path(kept).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("share of the bound, value, bound, test")
    for row in rows[:_SHOWN]:
        print(f"{row['used']:.4f} {row['value']:12.6g} {row['bound']:12.6g} {row['test']} {row['name']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
