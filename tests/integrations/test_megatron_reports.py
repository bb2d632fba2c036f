"""Reports on their way from rank 0 to the last rank, where Megatron-LM has its W&B run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from overlap_callbacks import OverlapReport
from overlap_callbacks.integrations import _megatron_reports as reports
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.sinks import RunInfo, Sink
from tests.report import runs


class Run(Sink):
    """Stands in for the W&B run's sink."""

    def __init__(self, fails_at: str) -> None:
        self.logged: list[int] = []
        self.closed = False
        self._fails_at = fails_at

    def open(self, run: RunInfo) -> None:
        self._do("open")

    def log(self, report: OverlapReport) -> None:
        self.logged.append(report.window)
        self._do("log")

    def close(self) -> None:
        self._do("close")
        self.closed = True

    def _do(self, what: str) -> None:
        if what == self._fails_at:
            raise RuntimeError("of the run")


class Ends:
    """Both ends, over one store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: str = "") -> None:
        self.store = dist.HashStore()
        connection = Connection(lambda: self.store)
        monkeypatch.setattr(reports, "_channel", lambda prefix: StoreChannel(Job(0, 2, "gloo"), prefix, connection))
        monkeypatch.setattr(reports, "_LOOK_INTERVAL_S", 0.0)
        self.run = Run(fails_at)
        monkeypatch.setattr(reports, "WandbSink", lambda _: self.run)
        self.said: list[str] = []
        self.monitor: Any = SimpleNamespace(
            in_window=False, sink_failed=lambda sink, error: self.said.append(str(error))
        )
        self.inbox = reports.Inbox("prefix", None, self.monitor)
        self.outbox = reports.Outbox("prefix")
        self.outbox.open(runs.run_info())

    def window(self, number: int) -> None:
        self.monitor.in_window = True
        self.inbox.look()
        self.monitor.in_window = False
        self.outbox.log(runs.window(number))
        self.inbox.look()

    def end(self) -> None:
        self.outbox.close()
        self.inbox.look(wait_s=5.0)


def test_each_report_arrives_once_and_nothing_is_left_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    for number in range(3):
        ends.window(number)
    ends.outbox.log(runs.window(3))  # at the end, when no step follows
    ends.end()
    assert (ends.run.logged, ends.run.closed, ends.said) == ([0, 1, 2, 3], True, [])
    assert ends.store.num_keys() == 0


@pytest.mark.parametrize("fails_at", ["open", "log", "close"])
def test_a_run_that_fails_is_told_once_and_no_report_waits_in_the_store(
    monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    ends = Ends(monkeypatch, fails_at)
    for number in range(3):
        ends.window(number)
        assert fails_at == "close" or ends.store.num_keys() == 0
    ends.end()
    assert ends.run.logged == {"open": [], "log": [0], "close": [0, 1, 2]}[fails_at]
    assert ends.said == ["of the run"]
    assert ends.store.num_keys() == 0


def test_a_job_without_a_window_leaves_nothing_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    ends.inbox.look()
    ends.inbox.look(wait_s=5.0)
    assert ends.store.num_keys() == 0


def test_reports_that_nobody_takes_are_taken_back_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    ends.window(0)
    for number in range(1, 5):  # the last rank is gone
        ends.outbox.log(runs.window(number))
    with pytest.raises(RuntimeError, match="the last rank has taken none of the last 4 reports"):
        ends.outbox.log(runs.window(5))
    assert ends.store.num_keys() == 0
    ends.outbox.close()
    assert ends.store.num_keys() == 0
