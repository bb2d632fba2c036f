"""Records that earlier versions wrote open for good. Files here are added to, never changed.

Each was written by the demo, and shortened to a few kernels, pairs and intervals.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_callbacks.analysis.results.run import SCHEMA_VERSION
from overlap_callbacks.report import page
from overlap_callbacks.report.record import RecordError, read
from tests.report.runs import run_info, window, write

RECORDS = sorted((Path(__file__).parent / "records").glob("*.jsonl"))


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_a_record_of_an_earlier_version_opens_whole(file: Path) -> None:
    record = read(file)
    assert record.broken_lines == 0
    assert record.unfinished is None
    assert len(record.valid_windows) == 1
    assert record.pooled()["speedup_vs_sequential"].ci_low is not None
    content = page([record])
    assert "Compute kernels that lose most time under overlap" in content
    assert "Power was not measured." in content


def test_there_is_a_record_of_every_schema() -> None:
    assert {read(file).runs[0].schema_version for file in RECORDS} == set(range(1, SCHEMA_VERSION + 1))


def test_a_record_that_is_too_new_says_which_version_it_needs(tmp_path: Path) -> None:
    newer = run_info(schema_version=SCHEMA_VERSION + 1, library_version="7.8.9")
    with pytest.raises(RecordError, match=r"upgrade overlap-callbacks to 7\.8\.9"):
        read(write(tmp_path, window(), run=newer))
