from __future__ import annotations

import logging

import pytest

from overlap_callbacks.monitor.notices import Notices
from tests.distributed import captured_log


def test_a_kind_of_warning_is_given_once_and_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with captured_log() as lines:
        notices = Notices()
        for _ in range(2):
            notices.warn_once("late", "a rank was late")
        notices.warn_once("other", "something else")
    assert lines == ["overlap-callbacks (rank 3): a rank was late", "overlap-callbacks (rank 3): something else"]


def test_what_is_no_trouble_is_said_by_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
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
