"""Holds a job with the library against the same job without it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaign import job as ranks
from tests.campaign.case import Case
from tests.campaign.processes import Zygote, wait_for
from tests.campaign.running import Run

CHECKS = ("ending", "weights", "time", "record", "sentence")
FILE = "overlap.jsonl"
_SHOW_S = 60.0
_UNFINISHED = "window 0 is unfinished"  # the number is left out of what is kept


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a run, by check; empty where nothing is.

    Attributes:
        faults: a sentence for each check that failed.
        sentence: what the library said, with numbers left out; empty if nothing.
        kinds: how the ranks ended.
        seconds: that the job took.
    """

    faults: dict[str, str]
    sentence: str
    kinds: str
    seconds: float


def judge(case: Case, run: Run, references: Sequence[Run], zygote: Zygote) -> Verdict:
    """Hold a run with the library against those without it."""
    found = {
        "ending": _ending(case, run, references),
        "weights": _weights(run, references),
        "time": _time(case, run, references),
        "record": _record(case, run, zygote),
        "sentence": _sentence(case, run),
    }
    faults = {check: fault for check, fault in found.items() if fault}
    unfinished = unfinished_window(run.record / FILE)
    said = _sentences(case, run) or ([(0, f"`overlap show`: {_UNFINISHED}")] if unfinished is not None else [])
    return Verdict(faults, _plain(said), ", ".join(run.kinds()), run.seconds)


def _ending(case: Case, run: Run, references: Sequence[Run]) -> str:
    if case.ends and any(set(reference.kinds()) == {"0"} for reference in references):
        return "the fault had no effect on the job without the library"
    if any("hung" in reference.kinds() for reference in references):
        return "the job without the library hung, so that there is nothing to hold this one against"
    if not case.ends and any(set(reference.kinds()) != {"0"} for reference in references):
        return "the job without the library failed, so that there is nothing to hold this one against"
    allowed = [{*case.also, *kinds} for kinds in zip(*(reference.kinds() for reference in references), strict=True)]
    wrong = [
        f"rank {rank} ended with {kind!r}, without the library with {' or '.join(sorted(map(repr, kinds)))}"
        for rank, (kind, kinds) in enumerate(zip(run.kinds(), allowed, strict=True))
        if kind not in kinds
    ]
    return "; ".join(wrong)


def _weights(run: Run, references: Sequence[Run]) -> str:
    expected: dict[str, set[str]] = {}
    for reference in references:
        for key, weights in reference.steps.items():
            expected.setdefault(key, set()).add(weights)
    if any(len(weights) > 1 for weights in expected.values()):
        return "the jobs without the library differ among themselves"
    if different := [key for key, weights in run.steps.items() if key in expected and weights not in expected[key]]:
        return f"they differ from rank.attempt.step {different[0]} on: {run.steps[different[0]]}"
    if not expected.keys() & run.steps.keys():
        return "no step of both jobs is the same"
    done = [reference for reference in references if all(ending.code == 0 for ending in reference.endings)]
    if done and not _as_far(run, done):
        return "the job has done other steps than without the library"
    return ""


def _as_far(run: Run, done: Sequence[Run]) -> bool:
    """Whether a run has the steps of one of those that were done."""
    return any(reference.steps.keys() == run.steps.keys() for reference in done)


def _time(case: Case, run: Run, references: Sequence[Run]) -> str:
    longest_s = max(reference.seconds for reference in references)
    if run.seconds <= longest_s + case.bound_s:
        return ""
    return (
        f"took {run.seconds:.1f} s; without the library {longest_s:.1f} s at most, and {case.bound_s:g} s more are fine"
    )


def _record(case: Case, run: Run, zygote: Zygote) -> str:
    if case.record == "none":
        return ""
    if not (run.record / FILE).exists():
        return "" if case.record == "maybe" else "there is no record"
    output = run.folder / "shown"
    process = zygote.start(ranks.show_record, [str(run.record)], run.folder, output)
    if not wait_for(lambda: not process.runs, _SHOW_S):
        process.ending()
        return "`overlap show` hung"
    ending = process.ending()
    clear = ending.code == 0 or (re.search(r"^Error: .+", ending.output, re.MULTILINE) and case.record == "maybe")
    if "Traceback" in ending.output or not clear:
        return f"`overlap show` ended with {ending.code}: {ending.output.strip().splitlines()[-1:]}"
    # A job that ends by itself or is killed cannot say what became of its window: the record's reader does.
    unfinished = unfinished_window(run.record / FILE)
    if unfinished is not None and f"window {unfinished} is unfinished" not in ending.output.lower():
        return f"`overlap show` does not say that window {unfinished} is unfinished"
    if case.whole_window and not _has_whole_window(case, run.record / FILE):
        return "no window of the record has all steps of all ranks"
    return ""


def unfinished_window(path: Path) -> int | None:
    """The last window, where the record has blocks of it and no report; None if it has one, or there is no record."""
    blocks: set[int] = set()
    reports: set[int] = set()
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:  # cut off
            continue
        kind, window = found.get("record"), found.get("window")
        (blocks if kind == "block" else reports if kind in ("window", "arm") else set()).add(window)
    open_now = blocks - reports
    return max(open_now) if open_now and max(open_now) > max(reports, default=-1) else None


def _has_whole_window(case: Case, path: Path) -> bool:
    from overlap_callbacks.report import record

    return any(
        window.complete and window.num_reporting == case.world_size and window.speedup_vs_sequential is not None
        for window in record.read(path).windows
    )


def _sentences(case: Case, run: Run) -> list[tuple[int, str]]:
    """What was said of the fault, by rank: warnings, else what needs no action, else notes in the record."""
    if case.in_record:
        # Every window has its notes: the same one is one sentence.
        notes = dict.fromkeys(_problems(run.record / FILE))
        return [(0, note) for note in notes if re.search(case.says, note)]
    warnings = [(line.rank, line.text) for line in run.said if line.level != "INFO" and not _is_beside(case, line.text)]
    if warnings or not case.says:
        return warnings
    return [(line.rank, line.text) for line in run.said if re.search(case.says, line.text)][:1]


def _is_beside(case: Case, text: str) -> bool:
    """Whether a case may say this and need not."""
    return bool(case.may_say and re.search(case.may_say, text) and not (case.says and re.search(case.says, text)))


def _problems(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines() if path.exists() else ():
        yield from json.loads(line).get("problems", ())


def _sentence(case: Case, run: Run) -> str:
    said = _sentences(case, run)
    if beside := [f"rank {rank}: {text}" for rank, text in said if not (case.says and re.search(case.says, text))]:
        return "other words: " + "; ".join(beside)
    if not said:
        return "" if case.may_be_silent or not case.says else "nothing was said"
    for rank in sorted({rank for rank, _ in said}):
        own = [text for speaker, text in said if speaker == rank]
        if len(own) > case.sentences:
            return f"rank {rank} said {len(own)} sentences: " + "; ".join(own)
    return ""


def _plain(said: Sequence[tuple[int, str]]) -> str:
    """The first of some like sentences, without numbers and places."""
    if not said:
        return ""
    text = re.sub(r"^overlap-callbacks( \(rank \d+\))?: ", "", said[0][1])
    text = re.sub(r"/\S+", "…", text)
    return re.sub(r"\d+(\.\d+)?", "…", text)
