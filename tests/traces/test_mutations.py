"""A few of the files with faults of ``mutations.py``; ``OVERLAP_MUTATED_TRACES=100000`` for as many as you like."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.traces.mutations import KINDS, judge, mutated

COUNT = int(os.environ.get("OVERLAP_MUTATED_TRACES", "150"))


def test_no_fault_gives_a_traceback_or_a_wrong_figure_without_a_note(tmp_path: Path) -> None:
    outcomes = {judge(tmp_path / "trace.json", seed) for seed in range(COUNT)}
    assert outcomes == {"refused", "figures", "figures with notes"}


def test_every_kind_of_fault_occurs_and_a_seed_determines_the_file() -> None:
    assert {mutated(seed)[0] for seed in range(1500)} == set(KINDS)
    assert mutated(7) == mutated(7)


# Each of these was a fault of the reader: a traceback, or a figure that nothing said was wrong.
@pytest.mark.parametrize("seed", [1765, 3579, 3931, 4290, 4419, 5270, 5858, 15406, 15734, 99409])
def test_fixed_faults_stay_fixed(tmp_path: Path, seed: int) -> None:
    judge(tmp_path / "trace.json", seed)
