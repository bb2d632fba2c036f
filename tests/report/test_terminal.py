from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
from rich.console import Console

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record, terminal
from tests.report.runs import window, write


def printed(folder: Path, *windows: OverlapReport) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(terminal.tables(record.read(write(folder, *windows))))
    return console.export_text()


def test_the_tables_have_compute_by_the_dimension_in_flight_and_the_share_attained(tmp_path: Path) -> None:
    text = printed(tmp_path, window(0))
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("│ pipeline ")}
    assert "+33.3%" in rows["pipeline"]
    assert "Slowdown by dimension of parallelism in flight" in text
    for label in ("share of the attainable gain", "bubble of the pipeline", "residual overlap, of communication"):
        assert label in text


def test_the_pairs_tell_the_slowdown_of_whole_calls_and_that_while_both_run(tmp_path: Path) -> None:
    rows = [re.split(r" *│ *", line) for line in printed(tmp_path, window(0)).splitlines() if line.startswith("│ gemm")]
    changes = {beside: (whole, during) for _, _, beside, whole, during, *_ in rows}
    assert changes["all_reduce"] == ("+17.5%", "+78.3%")  # of the 41 ms beside it, 18 ms were lost
    assert changes["ran alone, unexplained"] == ("+0.8%", "")


def test_a_job_without_sends_is_not_told_that_its_bubble_was_not_measured(tmp_path: Path) -> None:
    bare = msgspec.structs.replace(window(0), bubble_ms=None, p2p_ms=None, attained_fraction=None, idle_ms=None)
    text = printed(tmp_path, bare)
    assert "bubble" not in text
    assert text.count("not measured") == 1  # the idle time
    assert "Where the time of an overlapped step goes" not in text  # it would not add up


def test_windows_that_are_not_valid_compare_no_dimensions(tmp_path: Path) -> None:
    text = printed(tmp_path, msgspec.structs.replace(window(0), valid=False, problems=("residual overlap 0.3",)))
    assert "+33.3%" not in text
    assert "Slowdown by dimension" not in text
    assert "Why: 1 window is not valid: residual overlap 0.3." in text
