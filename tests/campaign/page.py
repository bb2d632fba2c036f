"""Writes ``docs/faults.md`` from the results of the last full run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.campaign.case import NEEDS_DEVICE
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
Case = Mapping[str, Any]  # an outcome, as the results have it; empty where there is none
_MAX_EXAMPLE = 300  # characters
_USUAL_RUNS = 3  # of a case
# Of a sentence, before what is told in this case.
_BEGINNING = re.compile(r"^(rank …|measuring is switched off(, training goes on)?|Race check): ")
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

The library must not make a fault worse. Faults are put into jobs of two ranks, at random moments, with it and without:
on the CPU over Gloo, and on a simulated GPU over NCCL, where kernels compute. With it a job must

- end with the same exit code and kind of error on each rank;
- have bit-identical weights after each step that both have done;
- take at most 15 s longer; 20 to 30 s where a rank or the store falls silent;
- leave a record in which `overlap show` names the window that the job's end has cut;
- say in one sentence what happened ([troubleshooting](troubleshooting.md)).

- **CPU**: {cpu}, by `python3 dev.py campaign`.
- **Simulated GPU**: {device}, by `python3 dev.py campaign --simulated-gpu`.

A reference in which plain torch aborts is run again. So were nine cases on the simulated GPU: six were too slow at a
load of 24 to 36, two were wrong, and `race-memory-taken` ended the job before the library was mended.

In the tables: most seconds with/without the library, of three runs or as many as named (all passed, unless fewer are
named); the sentence's beginning.
"""


def write_page() -> None:
    """Write the page anew."""
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


def page(results: dict[str, Any]) -> str:
    """The page as Markdown.

    Args:
        results: as ``benchmarks/results/campaign.json`` holds them.
    """
    cases, on_device = results["cases"], {case["name"]: case for case in results["device"]["cases"]}
    parts = [_TEXT.format(cpu=_summary(results), device=_summary(results["device"], results))]
    failing = [
        _failing(case, where)
        for where, part in (("CPU", cases), ("simulated GPU", on_device.values()))
        for case in _done(part)
        if case["failures"]
    ]
    if failing:
        parts.append("\n".join(["## What does not pass", "", *failing, ""]))
    for group in dict.fromkeys(case["group"] for case in cases):
        rows = [_row(case, on_device.get(case["name"], {})) for case in cases if case["group"] == group]
        head = ["case", "CPU", "simulated GPU", "said"]
        used = [0, *[place for place in range(1, len(head)) if any(row[place] for row in rows)]]
        lines = [f"| {' | '.join([row[place] for place in used])} |" for row in [head, ["---"] * len(head), *rows]]
        lead = [_LEADS[group]] if group in _LEADS else []
        parts.append("\n".join([f"## {group}", "", *lead, *lines, ""]))
    return "\n".join(parts)


def _done(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if "skipped" not in case]


def _summary(part: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> str:
    """What ran, when, and with what, where the other part has not said it."""
    possible = [case for case in part["cases"] if case.get("skipped") != NEEDS_DEVICE]
    done = _done(possible)
    dates = sorted({case["date"] for case in done})
    when = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    told = {} if other is None else {**other["versions"], "": other["machine"]}
    with_what = {**part["versions"], "": part["machine"]}
    setting = ", ".join(f"{name} {value}".strip() for name, value in with_what.items() if told.get(name) != value)
    runs, passed = sum(case["runs"] for case in done), sum(not case["failures"] for case in done)
    return f"{len(done)} of {len(possible)} cases ran, {runs} times ({when}), and {passed} passed every time; {setting}"


def _failing(case: Case, where: str) -> str:
    counts = Counter(failure["check"] for failure in case["failures"])
    return f"- `{case['name']}` ({where}): " + "; ".join(
        f"{_CHECKS[check]} in {count} of {case['runs']} runs ({_cell(_example(case, check))})"
        for check, count in counts.items()
    )


def _example(case: Case, check: str) -> str:
    fault = next(failure["fault"] for failure in case["failures"] if failure["check"] == check)
    return fault if len(fault) <= _MAX_EXAMPLE else f"{fault[:_MAX_EXAMPLE]}…"


def _row(case: Case, on_device: Case) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in case.get("packages", {}).items() if version)
    name = f"`{case['name']}`: {_cell(case['what'])}" + (f" ({packages})" if packages else "")
    said = dict.fromkeys(sentence for part in (case, on_device) for sentence in _said(part))
    on_cpu = "" if "skipped" in case and on_device else _runs(case)
    return [name, on_cpu, _runs(on_device) if on_device else "", "; ".join(said)]


def _runs(case: Case) -> str:
    """Seconds, and runs that passed."""
    if "skipped" in case:
        return f"not run: {case['skipped']}"
    failed = len({failure["run"] for failure in case["failures"]})
    passed = f"{case['runs'] - failed} of {case['runs']}" if failed else str(case["runs"])
    shown = "" if passed == str(_USUAL_RUNS) else f" ({passed})"
    return f"{case['longest_s']:.1f}/{case['reference_longest_s']:.1f}{shown}"


def _said(case: Case) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for sentence, count in case.get("sentences", {}).items():
        if not sentence.startswith(_UNFINISHED):
            counts[re.split("[:,] ", _BEGINNING.sub("", sentence))[0]] += count
    for first, count in counts.items():
        yield _cell(first) + (f" ({count} of {case['runs']})" if case["runs"] > count else "")


def _cell(text: str) -> str:
    """Text that Markdown leaves alone, for a cell of a table."""
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if "`" in text else text.replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
