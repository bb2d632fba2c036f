from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from rich.console import Console

from overlap_callbacks.cli._output import progress_of
from overlap_callbacks.traces import read_trace
from tests import kineto


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100), file


def test_what_takes_long_is_shown_on_a_terminal() -> None:
    shown, file = console(terminal=True)
    with progress_of("reading a trace", shown, patience_s=0.0) as tell:
        tell(1, 4)
        tell(4, 4)
    assert "reading a trace" in file.getvalue()
    assert "100%" in file.getvalue()


def test_what_takes_no_time_and_what_is_no_terminal_shows_nothing() -> None:
    for terminal, patience_s in ((True, 60.0), (False, 0.0)):
        shown, file = console(terminal)
        with progress_of("reading a trace", shown, patience_s) as tell:
            tell(4, 4)
        assert file.getvalue() == ""


@pytest.mark.parametrize("packed", [False, True])
def test_reading_a_trace_reports_progress(tmp_path: Path, packed: bool) -> None:
    file = kineto.write(tmp_path / "trace.json", kineto.training(steps=20, layers=8, operators=20))
    if packed:
        file = tmp_path / "trace.json.gz"
        file.write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    told: list[tuple[int, int]] = []
    read_trace(file, lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {file.stat().st_size}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == file.stat().st_size
    assert len(told) > 1
