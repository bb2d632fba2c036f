"""The metrics of a report that has every figure there is, value by value, as before figures stood in one table."""

from __future__ import annotations

import json
from pathlib import Path

from overlap_callbacks.analysis.results.catalogue import every_figure
from tests.report.arm_runs import arm_window
from tests.report.runs import full_report

_GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def test_all_keys_and_values_stay() -> None:
    assert full_report().metrics() == _GOLDEN["valid"]
    assert full_report(valid=False).metrics() == _GOLDEN["invalid"]
    assert arm_window(3, power=True).metrics() == _GOLDEN["arm"]


def test_the_report_has_every_figure() -> None:
    assert {value.figure.key for value in full_report().values()} == set(every_figure())
