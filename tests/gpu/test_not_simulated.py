"""The table of what cannot run on the simulated GPU names what there is.

``conftest.py`` holds that nothing else is skipped.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.gpu import not_simulated

HAS_CPU_FORM = True
HERE = Path(__file__).parent


def test_the_table_names_tests_that_there_are() -> None:
    for name in not_simulated.TESTS:
        file, _, test = name.partition("::")
        assert f"\ndef {test or 'test_'}" in (HERE / file).read_text()


def test_a_test_is_found_by_its_file_or_its_name() -> None:
    assert not_simulated.reason("tests/gpu/test_power.py::test_time_of_a_read")
    assert not_simulated.reason("tests/gpu/test_parallel_forms.py::test_weights_and_losses_are_bit_identical_x[ddp]")
    assert not_simulated.reason("tests/gpu/test_parallel_forms.py::test_sequential_steps_have_no_overlap[ddp]") is None


def test_the_table_names_steps_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "benchmarks"))
    steps = {step.name: step for step in importlib.import_module("gpu").STEPS}
    for name in not_simulated.STEPS:
        step, _, part = name.partition(": ")
        module = importlib.import_module(steps[step].module.partition(":")[0])
        assert f'"{part}"' in Path(module.__file__ or "").read_text() or not part
