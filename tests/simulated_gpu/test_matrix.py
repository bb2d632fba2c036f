"""Every framework with the library absent, attached, toggling, forced and with each arm: training does not change."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated_gpu import matrix
from tests.simulated_gpu.matrix import FRAMEWORKS, RANKS, WAYS, Table

RANKS_LOAD = ("lightning.pytorch", "transformers.trainer", "deepspeed")

# In the run for each change; the rest is left to the night.
EACH_CHANGE = (("DDP", 2), ("ZeRO-2", 2))
JOBS = [(name, ranks) for name in FRAMEWORKS for ranks in RANKS]


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """``OVERLAP_MATRIX=1`` writes what came of these jobs into ``matrix.md``."""
    found = Table.read()
    yield found
    if os.environ.get("OVERLAP_MATRIX"):
        found.write()


@pytest.mark.parametrize(
    ("name", "ranks"),
    [pytest.param(*job, marks=[] if job in EACH_CHANGE else [pytest.mark.nightly]) for job in JOBS],
)
def test_numbers_are_the_same_sequential_steps_do_not_overlap_and_figures_equal_the_log(
    name: str, ranks: int, tmp_path: Path, table: Table
) -> None:
    began = time.monotonic()
    found = matrix.run(name, ranks, list(WAYS), tmp_path)
    checked = matrix.check(name, ranks, list(WAYS), found, tmp_path)
    table.add(name, ranks, checked, time.monotonic() - began)
    assert {way: one.problems for way, one in checked.items() if one.problems} == {}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "way"), [("FSDP2 with two groups", "SharedReduceScatter"), ("ZeRO-3", "ZeroLiveParameters")]
)
def test_arms_of_one_kind_of_job_change_no_number(name: str, way: str, tmp_path: Path) -> None:
    found = matrix.run(name, 2, ["absent", way], tmp_path)
    checked = matrix.check(name, 2, ["absent", way], found, tmp_path)
    assert {of: (one.cell[:1], one.problems) for of, one in checked.items()} == {
        of: (Table.SAME, []) for of in ("absent", way)
    }


def test_the_table_says_of_each_way_whether_it_ran_or_why_it_is_refused() -> None:
    table = Table.read()
    assert set(table.rows) <= set(JOBS)
    for (name, ranks), row in table.rows.items():
        assert len(row) == len(WAYS) + 2
        for way, cell in zip(WAYS, row, strict=False):
            why_not = matrix.refusal(name, ranks, way)
            assert cell.startswith((Table.SAME, Table.OTHER) if why_not is None else Table.REFUSED), (name, ranks, way)
    assert table.text() == Table.FILE.read_text()
