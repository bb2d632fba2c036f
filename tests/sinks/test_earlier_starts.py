"""What a resumed job reads of its record's earlier starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_callbacks.sinks import JsonlSink
from overlap_callbacks.sinks.jsonl import EarlierStarts, earlier_starts
from tests.report.runs import run_info, window


def _start(folder: Path, *numbers: int) -> Path:
    sink = JsonlSink(folder)
    sink.open(run_info())
    for number in numbers:
        sink.log(window(number))
    sink.close()
    return sink.path


def test_the_last_start_is_not_an_earlier_one(tmp_path: Path) -> None:
    _start(tmp_path, 0, 1)
    record = _start(tmp_path, 2)
    assert [report.window for report in earlier_starts(record).windows] == [0, 1]


def test_a_line_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    record = _start(tmp_path, 0)
    with record.open("ab") as lines:
        lines.write(b'{"record":"window","window":\n\xff\n')
    _start(tmp_path, 1)
    assert [report.window for report in earlier_starts(record).windows] == [0]


@pytest.mark.timeout(60)
def test_a_device_in_place_of_the_record_is_not_read_without_end(tmp_path: Path) -> None:
    record = tmp_path / "overlap.jsonl"
    record.symlink_to("/dev/full")
    assert earlier_starts(record) == EarlierStarts()


def test_a_record_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        earlier_starts(tmp_path / "overlap.jsonl")
