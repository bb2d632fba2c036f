"""``benchmarks/arms.py``: what windows find, one by one and together, follows from their intervals."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("arms_benchmark", FOLDER / "arms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "arms_benchmark", module)
    spec.loader.exec_module(module)
    return module


def test_a_window_finds_what_its_interval_leaves_out(arms: ModuleType) -> None:
    intervals = [(-0.10, -0.05, -0.01), (-0.10, -0.02, 0.05), (-0.04, 0.0, 0.04)]
    found = arms.judged(intervals, -0.05)
    assert (found["held"], found["found"], found["counted"]) == (2, 1, 3)


def test_several_windows_together_find_less(arms: ModuleType) -> None:
    # Values 2 % about -5 %, each with an interval of its own of 10 %.
    values = [-0.05 + 0.02 * (-1) ** n for n in range(20)]
    run: dict[str, Any] = {"truth": -0.05, "windows": [(value - 0.1, value, value + 0.1) for value in values]}
    alone, together = arms.by_windows(run, 1), arms.by_windows(run, 10)
    assert (alone["counted"], alone["found"], alone["held"]) == (20, 0, 20)
    assert (together["counted"], together["found"], together["held"]) == (2, 2, 2)
    assert together["median_half_width"] < alone["median_half_width"] / 4


def test_the_sentence_of_the_docs_is_that_of_the_result(arms: ModuleType) -> None:
    runs = {run["longer"]: run for run in json.loads((FOLDER / "results" / "arms-cpu.json").read_text())["runs"]}
    widest = []
    for number in (4, 10, 20, 50):
        nothing, one, five = (arms.by_windows(runs[longer], number) for longer in (0.0, 0.01, 0.05))
        widest.append(f"{100 * max(found['median_half_width'] for found in (nothing, one, five)):.1f}")
        assert (five["found"] == five["counted"]) is (number >= 10)
    text = " ".join((FOLDER.parent / "docs" / "arms.md").read_text().split())
    assert (
        f"After 4, 10, 20 and 50 windows it is {', '.join(widest[:-1])} and {widest[-1]} % at most; "
        "5 % is always found from 10 on" in text
    )
