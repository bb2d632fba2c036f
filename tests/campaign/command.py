"""Runs the cases, says how each ended, and keeps the outcome in a JSON file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import tests.campaign.cases  # noqa: F401  (enters the cases)
from tests.campaign.case import CASES, Case, version_of
from tests.campaign.judging import CHECKS, Verdict, judge
from tests.campaign.page import RESULTS, write_page
from tests.campaign.processes import ROOT, Zygote, zygotes
from tests.campaign.running import Run, run_job, was_aborted
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU

# Ranks of plain torch 2.13 with Gloo abort now and then as they end ("terminate called without an active exception"),
# without the library and any fault. A reference in which one does is run again, so often at most.
MAX_TRIES = 6
# Without the library a fault may end a job in several ways. So there are several references, up to this number.
MAX_REFERENCES = 10


def main(arguments: Sequence[str]) -> int:
    """Run the cases that are asked for; 1 if one failed."""
    options = _parse(arguments)
    if options.page:
        write_page()
        return 0
    chosen = [CASES[name] for name in options.only] if options.only else cases_here()
    outcomes = []
    with zygotes() as both, ThreadPoolExecutor(options.jobs) as pool:
        how = {"repeat": options.repeat, "quick": options.quick, "keep": options.keep}
        for outcome in pool.map(lambda case: run_case(case, *both, **how), chosen):
            outcomes.append(outcome)
            print(_line(outcome), flush=True)
            if options.json:
                save(Path(options.json), [outcome], quick=options.quick)
    failed = [outcome["name"] for outcome in outcomes if outcome["failures"]]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(outcomes)} cases in {used.ru_utime + used.ru_stime:.0f} s of CPU, {len(failed)} failed"
        + (f": {', '.join(failed)}" if failed else "")
    )
    if options.json and Path(options.json).resolve() == RESULTS:
        write_page()
    return int(bool(failed))


def cases_here() -> list[Case]:
    """The cases that have an outcome on what this process runs on."""
    return [case for case in CASES.values() if case.device_runs or not ON_SIMULATED_GPU]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each case once, in its shortest form")
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--repeat", type=int, help="run each case so often, instead of its own number of times")
    parser.add_argument("--jobs", type=int, default=1, help="so many cases at once: most of them wait")
    parser.add_argument("--json", metavar="FILE", help="add the outcomes to this file, in place of older ones")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the files of all jobs in this folder")
    parser.add_argument("--page", action="store_true", help="write docs/faults.md from the results, and run nothing")
    options = parser.parse_args(arguments)
    if options.repeat is not None and options.repeat < 1:
        parser.error(f"--repeat must be a whole number of at least 1, got {options.repeat}")
    return options


def run_case(
    case: Case,
    plain: Zygote,
    library: Zygote,
    *,
    repeat: int | None = None,
    quick: bool = False,
    keep: str | None = None,
) -> dict[str, Any]:
    """Run a case as often as asked, each time with another seed.

    Args:
        case: what is done.
        plain: forks ranks without the library.
        library: forks ranks with it.
        repeat: runs; None for the case's own number.
        quick: once, in the short form.
        keep: folder that keeps the files of the jobs; None to delete them.

    Returns:
        The outcome, as the JSON file has it.
    """
    outcome: dict[str, Any] = {
        "name": case.name, "group": case.group, "what": case.what, "date": datetime.date.today().isoformat(),
        "runs": 0, "failures": [], "sentences": {}, "silent": 0, "endings": {},
        "packages": {name: version_of(name) for name in case.packages},
    }  # fmt: skip
    if reason := case.lacks():
        return {**outcome, "skipped": reason}
    runs = repeat or (1 if quick else case.runs_here)
    folder = Path(keep or tempfile.mkdtemp(prefix="campaign-")).resolve() / f"{case.name}-{time.time_ns()}"
    try:
        references: list[Run] = []
        pairs = []
        for seed in range(runs):
            if seed < MAX_REFERENCES:
                references.append(reference(case, plain, folder / f"plain-{seed}", seed=seed, quick=quick))
            pairs.append(
                run_job(case, library, plain, folder / f"library-{seed}", library=True, seed=seed, quick=quick)
            )
        verdicts = [judge(case, run, references, library) for run in pairs]
    finally:
        if keep is None:
            shutil.rmtree(folder.parent, ignore_errors=True)
    return {**outcome, **_summed(verdicts, references)}


def reference(case: Case, plain: Zygote, folder: Path, *, seed: int, quick: bool) -> Run:
    """A job without the library, to compare others with. The arguments are those of ``run_job``."""
    for number in range(MAX_TRIES):
        run = run_job(case, plain, plain, folder / str(number), library=False, seed=seed, quick=quick)
        if case.ends or not any(map(was_aborted, run.endings)):
            break
    return run


def _summed(verdicts: Sequence[Verdict], references: Sequence[Run]) -> dict[str, Any]:
    sentences: dict[str, int] = {}
    endings: dict[str, int] = {}
    for verdict in verdicts:
        endings[verdict.kinds] = endings.get(verdict.kinds, 0) + 1
        if verdict.sentence:
            sentences[verdict.sentence] = sentences.get(verdict.sentence, 0) + 1
    return {
        "runs": len(verdicts),
        "references": len(references),
        "failures": [
            {"run": number, "check": check, "fault": verdict.faults[check]}
            for number, verdict in enumerate(verdicts)
            for check in CHECKS
            if check in verdict.faults
        ],
        "sentences": sentences,
        "silent": sum(not verdict.sentence for verdict in verdicts),
        "endings": endings,
        "longest_s": round(max(verdict.seconds for verdict in verdicts), 2),
        "reference_longest_s": round(max(reference.seconds for reference in references), 2),
    }


def _line(outcome: dict[str, Any]) -> str:
    if "skipped" in outcome:
        return f"{outcome['name']:22s} skipped: {outcome['skipped']}"
    failures = outcome["failures"]
    failed_runs = len({failure["run"] for failure in failures})
    lines = [
        f"{outcome['name']:22s} {outcome['runs'] - failed_runs} of {outcome['runs']} as without the library, "
        f"{outcome['longest_s']:.1f} s against {outcome['reference_longest_s']:.1f} s; {outcome['endings']}",
        *(f"    {count} x {sentence}" for sentence, count in outcome["sentences"].items()),
        *(f"    run {failure['run']}, {failure['check']}: {failure['fault']}" for failure in failures),
    ]
    return "\n".join(lines)


def save(path: Path, outcomes: Sequence[dict[str, Any]], *, quick: bool) -> None:
    """Put outcomes into a file, in place of older ones of the same cases.

    A case that this machine cannot run keeps what it came to where it ran. Outcomes on a device have a section of their
    own.
    """
    whole = json.loads(path.read_text()) if path.exists() else {}
    part = whole.setdefault("device", {}) if ON_SIMULATED_GPU else whole
    by_name = {outcome["name"]: outcome for outcome in part.get("cases", ())}
    by_name |= {
        outcome["name"]: outcome for outcome in outcomes if not ("skipped" in outcome and outcome["name"] in by_name)
    }
    part |= {
        "date": datetime.date.today().isoformat(),
        "command": "python -m tests.campaign" + (" --quick" if quick else ""),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "overlap-callbacks": _version()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "cases": [by_name[name] for name in CASES if name in by_name],
    }
    path.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


def _version() -> str:
    namespace: dict[str, str] = {}
    exec((ROOT / "overlap_callbacks" / "_version.py").read_text(), namespace)
    return namespace["__version__"]
