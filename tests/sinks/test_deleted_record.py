"""A record whose folder is deleted during the run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from overlap_callbacks.report.record import read
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import captured_log
from tests.report.runs import run_info, window


def numbers(folder: Path) -> list[int]:
    return [report.window for report in read(folder).windows]


@pytest.mark.parametrize("last_write", ["a window", "close"])
def test_a_folder_that_was_deleted_comes_back_with_every_line(tmp_path: Path, last_write: str) -> None:
    folder = tmp_path / "runs" / "one"
    sink = JsonlSink(folder)
    with captured_log() as lines:
        sink.open(run_info())
        sink.log(window(0))
        assert lines == []
        shutil.rmtree(folder.parent)
        if last_write == "a window":
            sink.log(window(1))
        sink.close()
    assert numbers(folder) == ([0, 1] if last_write == "a window" else [0])
    (line,) = lines
    assert "was deleted during the run" in line
    assert "no line is lost" in line


def test_each_deletion_is_reported_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run")
    with captured_log() as lines:
        sink.open(run_info())
        for number in range(6):
            if number in (2, 4):
                shutil.rmtree(tmp_path / "run")
            sink.log(window(number))
        sink.close()
    assert numbers(tmp_path / "run") == [*range(6)]
    assert len(lines) == 2


def test_a_record_that_was_replaced_goes_on_behind_what_is_there(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    with captured_log() as lines:
        sink.open(run_info())
        sink.log(window(0))
        copy = tmp_path / "copy"
        copy.write_bytes(sink.path.read_bytes())
        os.replace(copy, sink.path)
        sink.log(window(1))
        sink.close()
    assert numbers(tmp_path) == [0, 1]
    assert "unless somebody put them back" in lines[0]
