"""Traces that a running job exports: analysed in another process, and nothing of that reaches the job."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from overlap_callbacks import traces
from tests import kineto
from tests.margins import PATIENCE_S


def finished() -> None:
    for thread in threading.enumerate():
        if thread.name == "overlap-callbacks-trace":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_a_trace_is_analysed_beside_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="overlap_callbacks")
    trace = tmp_path / "rank0_trace.json.gz"
    kineto.write(trace, kineto.training(), **kineto.job())
    traces.analyze_export(str(trace))
    finished()
    text = (tmp_path / "rank0_trace.overlap.txt").read_text()
    assert "Where the time goes" in text
    (line,) = caplog.messages
    assert text.splitlines()[0].strip() in line
    assert "rank0_trace.overlap.txt has all of it" in line


def test_other_ranks_leave_it_to_rank_0(tmp_path: Path) -> None:
    trace = tmp_path / "rank10_trace.json.gz"
    kineto.write(trace, kineto.training(), **kineto.job(1))
    traces.analyze_export(trace)
    finished()
    assert [file.name for file in tmp_path.iterdir()] == [trace.name]


@pytest.mark.parametrize("what", ["no trace", "not there", "no path"])
def test_what_cannot_be_analysed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    trace = tmp_path / "rank0_trace.json"
    if what == "no trace":
        trace.write_text("nothing")
    traces.analyze_export(None if what == "no path" else trace)  # type: ignore[arg-type]
    finished()
    (line,) = caplog.messages
    assert "is not analysed: " in line
    assert "Traceback" not in line
