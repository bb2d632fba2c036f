"""Records that hold what no run of this library writes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.cli.main import main
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.report import record_lines
from overlap_callbacks.report.record import read
from tests.report.test_record import run_info, timed, window_report, write

OV = Mode.OVERLAPPED


@pytest.mark.parametrize("name", ["every_n_steps", "control", "blocks", "profiled_steps"])
@pytest.mark.parametrize("value", ["many", [1], {"a": 1}, None])
def test_an_option_of_the_schedule_that_is_of_another_type_is_passed_over(
    tmp_path: Path, name: str, value: object
) -> None:
    schedule = {**Schedule().as_dict(), name: value}
    write(tmp_path, run=run_info(schedule=schedule), blocks=[(0, 20, timed(0, OV, 100.0))])
    record = read(tmp_path)
    if not isinstance(value, str) or name != "blocks":
        assert name not in record.runs[0].schedule
    assert record.unfinished is not None
    assert record.summary.partial is record.unfinished


def test_a_line_longer_than_any_line_of_a_record_is_passed_over_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlap_callbacks.report.record_lines.MAX_LINE_BYTES", 2**20)
    reports = [window_report(0), window_report(1)]
    path = write(tmp_path, reports=reports[:1])
    with path.open("ab") as file:
        file.write(b'{"record": "window", "x": "')
        for _ in range(100):
            file.write(b"a" * 2**20)
        file.write(b'"}\n')
    write(tmp_path, reports=reports[1:])
    tracemalloc.start()
    record = read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert record.windows == reports
    assert record.broken_lines == 1
    assert peak < 20 * 2**20


def test_a_line_that_is_too_long_is_named_with_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap_callbacks.report.record_lines.MAX_LINE_BYTES", 2**20)
    path = write(tmp_path, reports=[window_report(0)])
    with path.open("ab") as file:
        file.write(b'"' + b"a" * 2**22 + b'"\n{"cut')
    shown = CliRunner().invoke(main, ["show", str(path)], env={"COLUMNS": "200"})
    assert "2 lines of the record could not be read; 1 of them longer than" in shown.output


def test_lines_that_end_at_any_place_of_what_is_read_at_a_time_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    lines = [bytes([97 + i % 26]) * (i % 23) for i in range(300)]
    path.write_bytes(b"\n".join(lines))
    for piece in (1, 2, 7, 16, 1000):
        monkeypatch.setattr(record_lines, "_PIECE_BYTES", piece)
        found = list(record_lines.lines_of(path, lambda done, total: None))
        assert [content for _, content in found] == [line for line in lines if line]
        assert all(record_lines.line_at(path, start) == content for start, content in found)
    monkeypatch.setattr(record_lines, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(record_lines, "_PIECE_BYTES", 4)
    found = list(record_lines.lines_of(path, lambda done, total: None))
    assert [content for _, content in found] == [line if len(line) <= 10 else None for line in lines if line]
