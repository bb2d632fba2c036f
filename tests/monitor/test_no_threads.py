"""A system that has no more threads to give."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest

from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import (
    KeptReports,
    Training,
    digest_without_library,
    is_pass_through,
    new_monitor,
    own_threads,
    run_steps,
)


def train_without_threads(rank: int, refused: str) -> dict[str, Any]:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(f"overlap-callbacks-{refused}"):
            raise RuntimeError("can't start new thread")
        start(thread)

    training = Training(rank)
    monitor = new_monitor(KeptReports())
    with captured_log() as lines, mock.patch.object(threading.Thread, "start", refuse):
        run_steps(training, monitor, 12)
        monitor.close()
    return {
        "lines": lines,
        "same": training.digest() == digest_without_library(rank, 12),
        "threads": own_threads(),
        "untouched": is_pass_through(),
    }


@pytest.mark.parametrize("refused", ["", "order", "report", "power"])
def test_without_threads_training_goes_on_and_close_raises_nothing(refused: str) -> None:
    for rank in run_ranks(train_without_threads, 2, refused):
        assert rank["same"]
        assert rank["threads"] == []
        assert rank["untouched"]
        assert sum("can't start new thread" in line for line in rank["lines"]) == 1, rank["lines"]
