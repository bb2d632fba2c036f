"""Reports on their way from rank 0 to the last rank, where Megatron-LM has its W&B run."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from overlap_callbacks import OverlapReport
from overlap_callbacks.integrations import _megatron_reports as reports
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.sinks import RunInfo, Sink
from tests.margins import near
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

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fails_at: str = "", store: dist.HashStore | None = None
    ) -> None:
        self.store = dist.HashStore() if store is None else store
        monkeypatch.setattr(Job, "current", lambda: Job(0, 2, "gloo"))
        connection = Connection(lambda: self.store)
        monkeypatch.setattr(reports, "_channel", lambda prefix: StoreChannel(Job(0, 2, "gloo"), prefix, connection))
        monkeypatch.setattr(reports, "_LOOK_INTERVAL_S", 0.0)
        self.run = Run(fails_at)
        monkeypatch.setattr(reports, "WandbSink", lambda *_, **__: self.run)
        self.said: list[str] = []
        self.monitor: Any = SimpleNamespace(
            in_window=False,
            config=SimpleNamespace(detail="short"),
            sink_failed=lambda sink, error: self.said.append(str(error)),
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
        assert self.outbox.leave(5.0) is None


def test_each_report_arrives_once_and_nothing_is_left_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    for number in range(3):
        ends.window(number)
    ends.outbox.log(runs.window(3))  # at the end, when no step follows
    ends.end()
    assert (ends.run.logged, ends.run.closed, ends.said) == ([0, 1, 2, 3], True, [])
    assert ends.store.num_keys() == 0


@pytest.mark.parametrize("fails_at", ["open", "log", "close"])
def test_a_failing_run_gives_one_warning_and_leaves_no_report_in_the_store(
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


def test_a_burst_of_reports_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    ends.window(0)
    for number in range(1, 12):  # while the last rank closes its monitor, say
        ends.outbox.log(runs.window(number))
    ends.end()
    assert (ends.run.logged, ends.said) == ([*range(12)], [])
    assert ends.store.num_keys() == 0


def test_unread_reports_are_deleted_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_GONE_AFTER_S", 0.0)
    ends = Ends(monkeypatch)
    ends.window(0)
    for number in range(1, 5):  # the last rank is gone
        ends.outbox.log(runs.window(number))
    with pytest.raises(RuntimeError, match="the last rank has taken none of the last 4 reports"):
        ends.outbox.log(runs.window(5))
    assert ends.store.num_keys() == 0
    ends.outbox.close()
    assert ends.outbox.leave(5.0) is None
    assert ends.store.num_keys() == 0


@pytest.mark.parametrize("waiting", [0, 1, 3])
def test_rank_0_leaves_nothing_to_a_last_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch, waiting: int) -> None:
    ends = Ends(monkeypatch)
    ends.window(0)
    for number in range(waiting):
        ends.outbox.log(runs.window(1 + number))
    ends.outbox.close()
    error = ends.outbox.leave(0.2)
    told = f"RuntimeError('the last rank has taken none of the last {waiting} reports')"
    assert repr(error) == (told if waiting else "None")
    assert ends.store.num_keys() == 0
    ends.outbox.log(runs.window(9))  # by a thread that was left behind
    assert ends.store.num_keys() == 0
    # It was only late: it waits for nothing.
    ends.inbox.look(wait_s=30.0)
    assert (ends.run.logged, ends.said) == ([0], [])
    assert ends.store.num_keys() == 0


def test_rank_0_leaves_nothing_to_a_last_rank_that_was_gone_before_the_first_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Ends(monkeypatch)
    assert reports.Outbox("prefix").leave(5.0) is None
    assert ends.store.num_keys() == 0


def test_rank_0_waits_for_a_report_that_is_still_being_made_and_for_the_last_rank_to_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Ends(monkeypatch)
    ends.window(0)

    def report_late() -> None:
        time.sleep(0.5)
        ends.outbox.log(runs.window(1))
        ends.outbox.close()

    ends.monitor.in_window = True
    ends.inbox.look()
    ends.monitor.in_window = False
    with ThreadPoolExecutor(2) as threads:
        reporting, looking = threads.submit(report_late), threads.submit(ends.inbox.look, 20.0)
        assert ends.outbox.leave(20.0) is None
        reporting.result()
        looking.result()
    assert (ends.run.logged, ends.said) == ([0, 1], [])
    assert ends.store.num_keys() == 0


def test_a_last_report_that_does_not_come_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch)
    ends.window(0)
    ends.inbox.look(wait_s=0.2)
    assert ends.run.logged == [0]
    assert ends.said == ["rank 0 has sent no last report within 0.2 s; if it made one, the record has it"]
    assert ends.store.num_keys() == 0


def test_a_job_that_starts_again_reads_nothing_of_the_killed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = Ends(monkeypatch)
    killed.window(0)
    killed.outbox.log(runs.window(1))
    killed.outbox.close()  # both are killed before anybody looks
    ends = Ends(monkeypatch, store=killed.store)
    ends.window(7)
    ends.outbox.log(runs.window(8))
    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(ends.inbox.look, 20.0)
        time.sleep(0.3)
        ends.outbox.log(runs.window(9))
        ends.outbox.close()
        looking.result()
    assert (ends.run.logged, ends.said) == ([7, 8, 9], [])


def test_a_store_that_does_not_answer_does_not_keep_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "ANSWER_TIMEOUT_S", 0.3)
    ends, goes_on = Ends(monkeypatch), threading.Event()
    ends.window(0)
    answers = ends.store.compare_set

    def compare_set(*args: Any) -> Any:
        goes_on.wait(30.0)
        return answers(*args)

    stopped = SimpleNamespace(
        compare_set=compare_set, check=ends.store.check, delete_key=ends.store.delete_key, set=ends.store.set
    )
    connection = Connection(lambda: stopped)
    ends.inbox._channel = StoreChannel(Job(1, 2, "gloo"), "prefix", connection)
    began_s = time.monotonic()
    for _ in range(5):
        ends.inbox.look()
    ends.inbox.look(wait_s=0.2)
    assert near(time.monotonic() - began_s, 30.0)
    assert (ends.run.logged, ends.said) == ([0], ["the job's store does not answer"])
    goes_on.set()
