"""A job from which a daemon may take traces on demand: ours would empty them, so there is none."""

from __future__ import annotations

import os
from typing import Any

from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports, Training, new_monitor, run_steps, tiny_schedule


def train(rank: int, daemon: bool) -> dict[str, Any]:
    if daemon:
        os.environ["KINETO_USE_DAEMON"] = "1"
    sink = KeptReports()
    schedule = tiny_schedule(every_n_steps=12, profiled_steps=2)
    with captured_log() as lines, new_monitor(sink, schedule=schedule) as monitor:
        run_steps(Training(rank), monitor, 26)
    return {"log": lines, "windows": sink.facts()}


def test_no_profile_is_taken_and_one_sentence_says_why() -> None:
    first, second = run_ranks(train, 2, True)
    for rank in (first, second):
        (line,) = [line for line in rank["log"] if "kernel times are missing" in line]
        assert "KINETO_USE_DAEMON" in line
    assert [window["complete"] for window in first["windows"]] == [True, True]
    for window in first["windows"]:
        assert "speedup_vs_sequential" in window["figures"]
        assert "compute_slowdown" not in window["figures"]


def test_without_a_daemon_there_is_one() -> None:
    windows = run_ranks(train, 2, False)[0]["windows"]
    assert all("compute_ms" in window["figures"] for window in windows)
