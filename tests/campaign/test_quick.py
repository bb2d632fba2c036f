"""Each case of the campaign once, in its shortest form.

Most jobs wait for most of their time: for timeouts, for each other, for the interpreter to end. So several run at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tests.campaign.cases  # noqa: F401  (enters the cases)
from tests.campaign.case import CASES, ON_DEVICES, Case
from tests.campaign.command import run_case
from tests.campaign.judging import FILE, judge
from tests.campaign.page import RESULTS
from tests.campaign.processes import Ending, Zygote, zygotes
from tests.campaign.running import Run, run_job
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU

pytestmark = [pytest.mark.alone, pytest.mark.slow]
JOBS = 4
# On the simulated device those that need one: the campaign at night has the others there too.
NAMES = [name for name, case in CASES.items() if case.runs_here and (case.group == ON_DEVICES or not ON_SIMULATED_GPU)]
LONGEST_S = 600.0
# A rank for which the machine has no time comes too late for a window, and that is told.
LATE = r"a window has no sequential steps: rank (\d+ did not report|0 did not decide)"


def patient(case: Case) -> Case:
    """The case as it is tried here: that nothing hangs, on a machine of any load. The campaign holds its times."""
    return replace(case, bound_s=6 * case.bound_s, may_say=LATE)


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Zygote, Zygote]]:
    with zygotes() as both:
        yield both


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, processes: tuple[Zygote, Zygote]
) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """The outcomes of the cases that were asked for, by name; under way from the first test on."""
    asked = [item.callspec.params["name"] for item in request.session.items if item.originalname == CASE_TEST]
    # Those that take longest start first, so that none of them is waited for alone.
    names = sorted([name for name in asked if not CASES[name].nightly], key=lambda name: -CASES[name].bound_s)
    with ThreadPoolExecutor(JOBS) as pool:
        yield {name: pool.submit(run_case, patient(CASES[name]), *processes, quick=True) for name in names}
        pool.shutdown(cancel_futures=True)


CASE_TEST = "test_a_job_with_this_fault_ends_as_without_the_library"


def _known_failures(name: str) -> set[str]:
    """What the last full run shows as failing in a case, in the table that users read."""
    results = json.loads(RESULTS.read_text())
    cases = {case["name"]: case for case in (results["device"] if ON_SIMULATED_GPU else results)["cases"]}
    return {failure["check"] for failure in cases.get(name, {"failures": []})["failures"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_job_with_this_fault_ends_as_without_the_library(
    name: str, outcomes: dict[str, Future[dict[str, Any]]]
) -> None:
    if CASES[name].nightly:
        pytest.skip(CASES[name].nightly)
    outcome = outcomes[name].result(LONGEST_S)
    if "skipped" in outcome:
        pytest.skip(outcome["skipped"])
    if any("the job without the library hung" in failure["fault"] for failure in outcome["failures"]):
        pytest.xfail(f"there is no reference: {outcome['failures']}")
    failed = {failure["check"] for failure in outcome["failures"]}
    if failed and failed <= _known_failures(name):
        pytest.xfail(f"docs/faults.md shows it as failing: {outcome['failures']}")
    assert outcome["failures"] == []


def test_a_record_without_a_whole_window_is_found(tmp_path: Path, processes: tuple[Zygote, Zygote]) -> None:
    case = replace(CASES["file-store"], name="made-up", whole_window=True)
    run = run_job(case, processes[1], processes[0], tmp_path / "job", library=True, seed=0, quick=True)
    assert judge(case, run, [run], processes[1]).faults == {}
    lines = (run.record / FILE).read_text().splitlines()
    (run.record / FILE).write_text(lines[0] + "\n")  # what ran, without its windows
    assert set(judge(case, run, [run], processes[1]).faults) == {"record"}
    assert judge(replace(case, whole_window=False), run, [run], processes[1]).faults == {}


def test_a_record_that_cannot_be_read_is_found(tmp_path: Path, processes: tuple[Zygote, Zygote]) -> None:
    case = replace(CASES["file-store"], name="made-up")
    run = Run([Ending(0, "", 1.0)], {"0.0.1": "a"}, [], tmp_path)
    assert set(judge(case, run, [run], processes[1]).faults) == {"record"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "overlap.jsonl").write_text("no record\n")
    assert set(judge(case, run, [run], processes[1]).faults) == {"record"}
