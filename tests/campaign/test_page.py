"""The page of faults shows what the results hold."""

from __future__ import annotations

import json

import pytest

import tests.campaign.cases  # noqa: F401  (enters the cases)
from tests.campaign.case import CASES
from tests.campaign.page import PAGE, RESULTS, page


@pytest.fixture
def results() -> dict:
    return json.loads(RESULTS.read_text())


def test_the_page_is_that_of_the_results(results: dict) -> None:
    assert PAGE.read_text() == page(results), "run python -m tests.campaign --page"


def test_every_case_has_a_result_and_is_described_alike(results: dict) -> None:
    assert [(case["name"], case["what"]) for case in results["cases"]] == [(c.name, c.what) for c in CASES.values()]


def test_a_case_that_fails_is_shown_as_failing(results: dict) -> None:
    case = next(case for case in results["cases"] if not case.get("skipped") and not case["failures"])
    case["failures"] = [{"run": 0, "check": "weights", "fault": "weights differ from step 3 on"}]
    shown = page(results)
    assert (
        f"- `{case['name']}`: weights or steps differ in 1 of {case['runs']} runs (weights differ from step 3 on)"
        in shown
    )
    assert f"| {case['runs'] - 1} of {case['runs']} |" in shown
