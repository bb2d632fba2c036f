"""Records that hold what no run of this library writes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.cli import main
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.report import record_lines
from overlap_callbacks.report.record import read
from tests.report import runs
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


@pytest.mark.parametrize("command", [["show"], ["show", "--all"], ["show", "--json"], ["report"]], ids=" ".join)
def test_a_window_that_names_no_rank_ends_no_command_in_a_traceback(tmp_path: Path, command: list[str]) -> None:
    whole = runs.window(0, power=True)
    assert whole.collectives
    assert whole.power_trace is not None
    runs.write(tmp_path, msgspec.structs.replace(whole, ranks=()))
    options = ["--output", str(tmp_path / "report.html")] if command == ["report"] else []
    result = CliRunner().invoke(main, [command[0], str(tmp_path), *command[1:], *options])
    assert result.exit_code == 0, result.output


def test_a_whole_number_beyond_a_float_s_range_ends_no_page_in_a_traceback(tmp_path: Path) -> None:
    whole = runs.window(0)
    runs.write(tmp_path, whole)
    path = tmp_path / "overlap.jsonl"
    messages = b'"messages":%d' % whole.collectives[0].messages
    lines = path.read_bytes().replace(b" ", b"")
    assert messages in lines
    path.write_bytes(lines.replace(messages, b'"messages":1' + b"0" * 400))
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--output", str(tmp_path / "report.html")])
    assert result.exit_code == 0, result.output
    assert ">inf<" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("world_size", [-(2**63) - 1, -1, 10**12, 2**70])
def test_an_unfinished_window_of_any_number_of_ranks_is_read_in_bounded_memory(tmp_path: Path, world_size: int) -> None:
    write(tmp_path, run=run_info(world_size=world_size), blocks=[(0, 20, timed(0, OV, 100.0))])
    tracemalloc.start()
    try:
        read(tmp_path).pooled()
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
