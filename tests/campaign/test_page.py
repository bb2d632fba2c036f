"""The page of faults shows what the results hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tests.campaign.cases  # noqa: F401  (enters the cases)
from tests.campaign.case import CASES, ON_DEVICES
from tests.campaign.cases.beside import GRAPHS_WITHOUT_GPU
from tests.campaign.command import run_case, save
from tests.campaign.page import PAGE, RESULTS, page
from tests.campaign.processes import ROOT

NOBODY: Any = None  # forks ranks; there are none here


@pytest.fixture
def results() -> dict:
    return json.loads(RESULTS.read_text())


def test_the_page_is_that_of_the_results(results: dict) -> None:
    assert PAGE.read_text() == page(results), "run python -m tests.campaign --page"


def test_every_case_has_a_result_and_the_same_description(results: dict) -> None:
    assert _shown(results) == [(case.name, case.what) for case in CASES.values()]
    assert _shown(results["device"]) == [(case.name, case.what) for case in CASES.values() if case.device_runs]


def _shown(part: dict) -> list[tuple[str, str]]:
    return [(case["name"], case["what"]) for case in part["cases"]]


def test_a_case_has_a_column_for_the_cpu_and_one_for_the_device(results: dict) -> None:
    both = next(case for case in results["device"]["cases"] if CASES[case["name"]].group != ON_DEVICES)
    alone = next(case for case in results["device"]["cases"] if CASES[case["name"]].group == ON_DEVICES)
    shown = page(results)
    cells = next(line for line in shown.splitlines() if line.startswith(f"| `{both['name']}`:")).split(" | ")
    assert all(cells[1:3])
    assert alone["runs"] == 3
    assert f"{alone['what']} | {alone['longest_s']:.1f}/{alone['reference_longest_s']:.1f} |" in shown
    alone["failures"] = [{"run": 0, "check": "time", "fault": "took a day"}]
    assert f"- `{alone['name']}` (simulated GPU): it took longer than allowed" in page(results)


@pytest.mark.parametrize("name", GRAPHS_WITHOUT_GPU)
def test_the_tests_that_the_page_names_exist(name: str) -> None:
    file, test = name.split("::")
    assert f"def {test}(" in (ROOT / file).read_text()


def test_versions_of_what_a_case_runs_are_shown(results: dict) -> None:
    case = next(case for case in results["cases"] if case["name"] == "loop-lightning")
    assert case["packages"]["lightning"]
    assert f"{case['what']} (lightning {case['packages']['lightning']})" in page(results)


def test_a_case_without_its_package_is_shown_as_not_run(results: dict) -> None:
    case = replace(CASES["loop-lightning"], packages=("of-nobody",))
    outcome = run_case(case, NOBODY, NOBODY)
    assert "needs of-nobody" in outcome["skipped"]
    shown = page({**results, "cases": [outcome]})
    assert f"| `{case.name}`: {case.what} | not run: needs of-nobody" in shown


def test_a_case_that_fails_is_shown_as_failing(results: dict) -> None:
    case = next(case for case in results["cases"] if not case.get("skipped") and not case["failures"])
    case["failures"] = [{"run": 0, "check": "weights", "fault": "they differ from step 3 on"}]
    shown = page(results)
    differ = f"losses, weights or steps differ in 1 of {case['runs']} runs (they differ from step 3 on)"
    assert f"- `{case['name']}` (CPU): {differ}" in shown
    assert f" ({case['runs'] - 1} of {case['runs']}) |" in shown


def test_a_case_that_cannot_run_here_keeps_what_it_came_to_elsewhere(results: dict, tmp_path: Path) -> None:
    known = next(case for case in results["cases"] if not case.get("skipped"))
    file = tmp_path / "campaign.json"
    save(file, [known], quick=False)
    others = [{**known, "skipped": "needs another machine"}, {**known, "name": "cuda-graphs", "skipped": "needs a GPU"}]
    save(file, others, quick=False)
    kept = {case["name"]: case for case in json.loads(file.read_text())["cases"]}
    assert kept[known["name"]] == known
    assert kept["cuda-graphs"]["skipped"] == "needs a GPU"
