"""Each case of the campaign once, in its shortest form; and the judge finds what it looks for."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tests.campaign.cases  # noqa: F401  (enters the cases)
from tests.campaign.case import CASES, Case
from tests.campaign.command import run_case
from tests.campaign.judging import judge
from tests.campaign.page import RESULTS
from tests.campaign.processes import Ending, Zygote, zygotes
from tests.campaign.running import Run, Said, kind_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Zygote, Zygote]]:
    with zygotes() as both:
        yield both


def _known_failures(name: str) -> set[str]:
    """What the last full run shows as failing in a case, in the table that users read."""
    cases = {case["name"]: case for case in json.loads(RESULTS.read_text())["cases"]}
    return {failure["check"] for failure in cases.get(name, {"failures": []})["failures"]}


@pytest.mark.parametrize("name", CASES)
def test_a_job_with_this_fault_ends_as_without_the_library(name: str, processes: tuple[Zygote, Zygote]) -> None:
    if CASES[name].nightly:
        pytest.skip(CASES[name].nightly)
    outcome = run_case(CASES[name], *processes, quick=True)
    if "skipped" in outcome:
        pytest.skip(outcome["skipped"])
    failed = {failure["check"] for failure in outcome["failures"]}
    if failed and failed <= _known_failures(name):
        pytest.xfail(f"docs/faults.md shows it as failing: {outcome['failures']}")
    assert outcome["failures"] == []


# -- the judge


CASE = Case("made-up", "none", "nothing", lambda rank: None, says="gone", bound_s=5.0, record="none")
SENTENCE = Said(0, "WARNING", "overlap-callbacks: it is gone")


def _run(folder: Path, **changes: Any) -> Run:
    run = Run(
        [Ending(0, "", 1.0)],
        {"0.0.1": "a", "0.0.2": "b"},
        [Said(0, "WARNING", "overlap-callbacks: it is gone")],
        folder,
    )
    return replace(run, **changes)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a signal": ("ending", {"endings": [Ending(-signal.SIGABRT, "", 1.0)]}),
    "a hang": ("ending", {"endings": [Ending(None, "", 1.0)]}),
    "other weights": ("weights", {"steps": {"0.0.1": "a", "0.0.2": "c"}}),
    "a step less": ("weights", {"steps": {"0.0.1": "a"}}),
    "too late": ("time", {"endings": [Ending(0, "", 6.5)]}),
    "no sentence": ("sentence", {"said": []}),
    "two sentences": ("sentence", {"said": [SENTENCE] * 2}),
    "other words": ("sentence", {"said": [Said(0, "WARNING", "overlap-callbacks: it is here")]}),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str, tmp_path: Path, processes: tuple[Zygote, Zygote]) -> None:
    check, changes = WRONG[what]
    reference = _run(tmp_path, said=[])
    assert judge(CASE, _run(tmp_path), [reference], processes[1]).faults == {}
    assert set(judge(CASE, _run(tmp_path, **changes), [reference], processes[1]).faults) == {check}


def test_a_fault_without_effect_is_found(tmp_path: Path, processes: tuple[Zygote, Zygote]) -> None:
    reference = _run(tmp_path, said=[])
    assert set(judge(replace(CASE, ends=True), _run(tmp_path), [reference], processes[1]).faults) == {"ending"}


def test_a_reference_that_hangs_is_no_reference(tmp_path: Path, processes: tuple[Zygote, Zygote]) -> None:
    reference = _run(tmp_path, said=[], endings=[Ending(None, "", 1.0)])
    assert "without the library hung" in judge(CASE, _run(tmp_path), [reference], processes[1]).faults["ending"]


def test_a_record_that_cannot_be_read_is_found(tmp_path: Path, processes: tuple[Zygote, Zygote]) -> None:
    case = replace(CASE, record="yes")
    run = _run(tmp_path)
    assert set(judge(case, run, [run], processes[1]).faults) == {"record"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "overlap.jsonl").write_text("no record\n")
    assert set(judge(case, run, [run], processes[1]).faults) == {"record"}


def test_the_kind_of_an_error_is_that_of_the_traceback() -> None:
    output = "[rank1]: RuntimeError: Connection closed by peer\nException raised from recvBytes at Utils.hpp:685\n"
    assert kind_of(Ending(1, output, 1.0)) == "1 RuntimeError"
    assert kind_of(Ending(-signal.SIGINT, "KeyboardInterrupt\n", 1.0)) == "-SIGINT KeyboardInterrupt"
