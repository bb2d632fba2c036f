"""Writes ``docs/faults.md`` from the results of the last full run."""

from __future__ import annotations

import json
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
_HEAD = (
    "| {first} | passed | with the library | without | what is said | date |",
    "| --- | --- | --- | --- | --- | --- |",
)
# The text above the table of a group whose cases are no faults.
_LEADS = {
    TRAINERS: """\
Here nothing goes wrong. Training loops from the package index run with the documented line and without the library. All
losses and all weights after every step must be bit-identical, and the record must hold a whole window. Runs without the
library are compared with each other too. The loops, and what was replaced to run them on a CPU, are on
[a page of their own](loops.md).
""",
}
_TEXT = """\
# Faults

The library must not make a fault worse. So faults are put into running jobs, with the library and without. The job
without it is the reference. The job with it must

- end alike: the same exit code and the same kind of error on each rank;
- have bit-identical weights after each step that both have done;
- take no longer than the reference and a bound: 15 s in most cases. Where a rank or the store falls silent, timeouts of
  the library pass once, and the bound is 20 to 30 s;
- leave a record that `overlap show` can read;
- say what happened, in one sentence on each rank that has something to say. A job that ends early is not held up for
  that: where it ends within a window, `overlap show` must say which one is unfinished. Where it ends between windows,
  there is nothing to say.

Each job has two ranks over Gloo on one machine, in processes of their own that end as an interpreter ends. Windows are
short and come every 16 steps, so that most faults fall within one. The moment of a fault is left to chance, and differs
from run to run. A run of each fault is part of the tests. All runs are made by `python3 dev.py campaign`, nightly and
before a release. The last section has no faults: it is training loops of others.

Plain torch 2.13 with Gloo aborts a rank now and then as it ends, without the library and any fault ("terminate called
without an active exception"). A reference in which that happens is run again. A job with the library is not.

{summary}
With {versions}, on {machine}.
This page is written by the command, from `benchmarks/results/campaign.json`.
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
    summary = (
        f"The table has the last outcome of each case, with its date: {len(done)} of {len(cases)} cases ran, "
        f"{runs} times in all; {len(good)} passed."
    )
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [_TEXT.format(summary=summary, versions=versions, machine=results["machine"])]
    failing = [case for case in done if case["failures"]]
    if failing:
        parts.append("\n".join(["## What does not pass", "", *(_failing(case) for case in failing), ""]))
    for group in dict.fromkeys(case["group"] for case in cases):
        rows = [_row(case) for case in cases if case["group"] == group]
        lead = [_LEADS[group]] if group in _LEADS else []
        head = [line.format(first="loop" if lead else "fault") for line in _HEAD]
        parts.append("\n".join([f"## {group}", "", *lead, *head, *rows, ""]))
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


def _row(case: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in case.get("packages", {}).items() if version)
    name = f"`{case['name']}`: {_cell(case['what'])}" + (f" ({packages})" if packages else "")
    if "skipped" in case:
        return f"| {name} | not run: {case['skipped']} | | | | {case['date']} |"
    failed = len({failure["run"] for failure in case["failures"]})
    passed = f"{case['runs'] - failed} of {case['runs']}"
    times = f"{case['longest_s']:.1f} s at most | {case['reference_longest_s']:.1f} s"
    return f"| {name} | {passed} | {times} | {'; '.join(_said(case)) or 'nothing'} | {case['date']} |"


def _said(case: dict[str, Any]) -> Iterator[str]:
    for sentence, count in case["sentences"].items():
        yield f"{_cell(sentence)} ({count} of {case['runs']})" if case["runs"] > count else _cell(sentence)


def _cell(text: str) -> str:
    """Text that Markdown leaves alone, for a cell of a table."""
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if "`" in text else text.replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
