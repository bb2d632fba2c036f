"""Writes ``docs/faults.md`` from the results of the last full run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.campaign.cases.trainers import GROUP as TRAINERS
from tests.campaign.processes import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "campaign.json"
PAGE = ROOT / "docs" / "faults.md"
_CHECKS = {
    "ending": "the ranks end otherwise than without the library",
    "weights": "losses, weights or steps differ",
    "time": "it took longer than allowed",
    "record": "the record cannot be read",
    "sentence": "not one clear sentence",
}
_MAX_EXAMPLE = 300  # characters
# What ``overlap show`` says wherever a job ends within a window: the text above the tables says so once.
_UNFINISHED = "`overlap show`: "
# The text above the table of a group whose cases are no faults.
_LEADS = {
    TRAINERS: """\
No faults: [loops from the package index](loops.md) with the documented line. Losses and weights after every step are
bit-identical, and the record holds a whole window.
""",
}
_TEXT = """\
# Faults

The library must not make a fault worse. So faults are put into jobs of two Gloo ranks, at random moments, with it and
without. With it a job must

- end with the same exit code and kind of error on each rank;
- have bit-identical weights after each step that both have done;
- take at most 15 s longer; 20 to 30 s where a rank or the store falls silent;
- leave a record in which `overlap show` names the window that the job's end has cut;
- say in one sentence what happened ([troubleshooting](troubleshooting.md)).

{summary} With {versions}, on
{machine}, by `python3 dev.py campaign`, which writes this page. A reference in which plain torch aborts is run again.

Columns: runs (all passed, unless fewer are named), most seconds with/without the library, the sentence's beginning.
"""


def write_page() -> None:
    """Write the page anew."""
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


def page(results: dict[str, Any]) -> str:
    """The page as Markdown.

    Args:
        results: as ``benchmarks/results/campaign.json`` holds them.
    """
    cases = results["cases"]
    done = [case for case in cases if "skipped" not in case]
    good = [case for case in done if not case["failures"]]
    runs = sum(case["runs"] for case in done)
    dates = sorted({case["date"] for case in done})
    when = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    summary = f"{len(done)} of {len(cases)} cases ran, {runs} times in all ({when}); {len(good)} passed every time."
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [_TEXT.format(summary=summary, versions=versions, machine=results["machine"])]
    failing = [case for case in done if case["failures"]]
    if failing:
        parts.append("\n".join(["## What does not pass", "", *(_failing(case) for case in failing), ""]))
    for group in dict.fromkeys(case["group"] for case in cases):
        rows = [_row(case) for case in cases if case["group"] == group]
        lead = [_LEADS[group]] if group in _LEADS else []
        columns = max([len(row) for row in rows])
        rows = [["case", "runs", "s", "said"][:columns], ["---"] * columns, *rows]
        lines = [f"| {' | '.join([*row, *[''] * (columns - len(row))])} |" for row in rows]
        parts.append("\n".join([f"## {group}", "", *lead, *lines, ""]))
    return "\n".join(parts)


def _failing(case: dict[str, Any]) -> str:
    counts = Counter(failure["check"] for failure in case["failures"])
    return f"- `{case['name']}`: " + "; ".join(
        f"{_CHECKS[check]} in {count} of {case['runs']} runs ({_cell(_example(case, check))})"
        for check, count in counts.items()
    )


def _example(case: dict[str, Any], check: str) -> str:
    fault = next(failure["fault"] for failure in case["failures"] if failure["check"] == check)
    return fault if len(fault) <= _MAX_EXAMPLE else f"{fault[:_MAX_EXAMPLE]}…"


def _row(case: dict[str, Any]) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in case.get("packages", {}).items() if version)
    name = f"`{case['name']}`: {_cell(case['what'])}" + (f" ({packages})" if packages else "")
    if "skipped" in case:
        return [name, f"not run: {case['skipped']}"]
    failed = len({failure["run"] for failure in case["failures"]})
    passed = f"{case['runs'] - failed} of {case['runs']}" if failed else str(case["runs"])
    said = "; ".join(_said(case))
    return [name, passed, f"{case['longest_s']:.1f}/{case['reference_longest_s']:.1f}", *([said] if said else [])]


def _said(case: dict[str, Any]) -> Iterator[str]:
    for sentence, count in case["sentences"].items():
        if not sentence.startswith(_UNFINISHED):
            first = re.split("[:,] ", re.sub(r"^(rank …|measuring is switched off): ", "", sentence))[0]
            yield _cell(first) + (f" ({count} of {case['runs']})" if case["runs"] > count else "")


def _cell(text: str) -> str:
    """Text that Markdown leaves alone, for a cell of a table."""
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if "`" in text else text.replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
