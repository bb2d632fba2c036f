"""``benchmarks/truth.py``: a slow-down that is put into a job is what the library finds there."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[1] / "benchmarks/truth.py"


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # Ranks that are spawned import the module by its name.
    monkeypatch.syspath_prepend(str(FILE.parent))
    spec = importlib.util.spec_from_file_location("truth", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "truth", module)
    spec.loader.exec_module(module)
    return module


def test_the_truth_follows_from_the_equations(truth: ModuleType) -> None:
    # A step of 10 s has 6 s of compute, sequentially 11 s and 5 s: without the slow-down it would take 9 s.
    outside = [(0, "timed", "overlapped", 10.0, 6.0), (0, "timed", "sequential", 11.0, 5.0)]
    outside += [(0, "profiled", "overlapped", 12.0, 6.0), (0, "profiled", "sequential", 13.0, 5.0)]
    found = truth.truth_of(outside)
    assert found == pytest.approx({"compute_slowdown": 0.2, "speedup_vs_sequential": 0.1, "gap_to_ideal": 1 / 9})


def test_what_is_put_in_follows_from_the_length_of_the_operators(truth: ModuleType) -> None:
    # Two operators of 10 ms, 20 % longer: 4 ms of a step of 44 ms, whose compute takes 25 ms alone.
    job = truth.TruthJob(slowdown=0.2, layers=2, operator_ms=10.0)
    outside = [(0, "timed", "overlapped", 0.044, 0.0), (0, "profiled", "sequential", 0.050, 0.025)]
    found = truth.put_in(job, outside)
    assert found == pytest.approx({"compute_slowdown": 4 / 25, "gap_to_ideal": 44 / 40 - 1})
    assert set(truth.put_in(truth.TruthJob(control=True), outside).values()) == {0.0}
    assert truth.put_in(truth.TruthJob(work="operations"), outside) == {}


def test_an_interval_contains_the_truth_or_misses_it(truth: ModuleType) -> None:
    found = truth._judged([[0.1, 0.0, 0.2], [0.3, 0.25, 0.35], [-0.1, -0.2, 0.05]], 0.1)
    assert (found["held"], found["of"], found["too_low"], found["too_high"]) == (1, 3, 1, 1)


@pytest.mark.slow
def test_the_library_finds_what_the_clock_outside_finds(truth: ModuleType) -> None:
    # Compute takes twice as long in overlapped steps: far more than any noise of the machine.
    found = truth.run_job(truth.TruthJob(slowdown=1.0, windows=3, gap_steps=10))
    assert found["reported"] == 3
    assert found["counted"] >= 1, found["not_counted"]
    told = [window["compute_slowdown"] for window in found["windows"] if "compute_slowdown" in window]
    if not told:  # of a busy machine, too few profiled steps may be left for an interval
        assert any("profiled step" in note and "far longer" in note for note in found["notes"]), found["notes"]
        return
    assert all(low < value for value, low, _ in told)
    # Where others hold the machine up, steps of one mode may be the slow ones. The clock outside says whether that was
    # so: where it finds the slowdown in every window, the library must too.
    outside = [window["compute_slowdown"] for window in found["outside"]]
    if min(outside) < 0.5:
        return
    assert max(value for value, *_ in told) > 0.3
    assert min(value for value, *_ in told) > min(0.3, 0.5 * min(outside))
    inside = [math.log1p(value) for value, *_ in told]
    assert math.expm1(sum(inside) / len(inside)) == pytest.approx(found["truth"]["compute_slowdown"], rel=0.5)
