from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_callbacks.monitor.faults import Notices
from tests.distributed import captured_log


def test_a_kind_of_warning_is_given_once_and_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with captured_log() as lines:
        notices = Notices()
        for _ in range(2):
            notices.warn_once("late", "a rank was late")
        notices.warn_once("other", "something else")
    assert lines == ["overlap-callbacks (rank 3): a rank was late", "overlap-callbacks (rank 3): something else"]


def test_information_is_logged_by_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, expected in (("0", 2), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with captured_log(logging.INFO) as lines:
            Notices().info("done")
            Notices().announce("the record is here")
        assert len(lines) == expected


def test_the_last_line_is_seen_where_logging_is_left_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("overlap_callbacks"), "level", logging.NOTSET)
    Notices.announce("the record is here")
    assert capsys.readouterr().err == "overlap-callbacks: the record is here\n"
    # Whoever has set logging up, and wants no INFO, has said so.
    monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
    Notices.announce("the record is here")
    assert capsys.readouterr().err == ""


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the log server is gone")


def test_a_log_handler_that_raises_loses_no_warning_and_raises_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    logger, handler = logging.getLogger("overlap_callbacks"), Raising()
    logger.addHandler(handler)
    try:
        notices = Notices()
        notices.warn_once("late", "a rank was late", ValueError("no"))
        notices.info("done")
        notices.announce("the record is here")
    finally:
        logger.removeHandler(handler)
    assert "overlap-callbacks: a rank was late" in capsys.readouterr().err


def test_the_last_line_may_find_stderr_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    closed = (tmp_path / "stderr").open("w")
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    Notices().announce("the record is here")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_the_last_line_may_find_that_what_stderr_leads_to_is_full() -> None:
    code = "from overlap_callbacks.monitor.faults import Notices; Notices().announce('the record is here')"
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full, check=False).returncode == 0
