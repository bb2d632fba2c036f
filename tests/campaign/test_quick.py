"""Each case of the campaign once, in its shortest form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tests.campaign.cases  # noqa: F401  (enters the cases)
from tests.campaign.case import CASES
from tests.campaign.command import run_case
from tests.campaign.judging import judge
from tests.campaign.page import RESULTS
from tests.campaign.processes import Ending, Zygote, zygotes
from tests.campaign.running import Run

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
    if any("the job without the library hung" in failure["fault"] for failure in outcome["failures"]):
        pytest.xfail(f"there is no reference: {outcome['failures']}")
    failed = {failure["check"] for failure in outcome["failures"]}
    if failed and failed <= _known_failures(name):
        pytest.xfail(f"docs/faults.md shows it as failing: {outcome['failures']}")
    assert outcome["failures"] == []


def test_a_record_that_cannot_be_read_is_found(tmp_path: Path, processes: tuple[Zygote, Zygote]) -> None:
    case = replace(CASES["file-store"], name="made-up")
    run = Run([Ending(0, "", 1.0)], {"0.0.1": "a"}, [], tmp_path)
    assert set(judge(case, run, [run], processes[1]).faults) == {"record"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "overlap.jsonl").write_text("no record\n")
    assert set(judge(case, run, [run], processes[1]).faults) == {"record"}
