"""The connection to the job's store: one a rank, whose threads do not wait for each other without an end."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.gate.deadlock import CollectiveSequence, Item
from overlap_callbacks.monitor.background import store as store_module
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.order_check import Decision, OrderChecker
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.background.submissions import RecordedKinds
from tests.distributed import run_ranks
from tests.margins import near
from tests.monitor.jobs import KeptReports, new_monitor


def num_sockets() -> int:
    """Sockets that this process has open."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            names.append(os.readlink(descriptor))
        except FileNotFoundError:  # the folder's own
            continue
    return sum(name.startswith("socket:") for name in names)


def count_connections(_: int) -> list[int]:
    dist.all_reduce(torch.ones(1))
    counts = [num_sockets()]
    monitor = new_monitor(KeptReports())
    for _ in range(20):
        with monitor.step():
            dist.all_reduce(torch.ones(1))
        counts.append(num_sockets())
    monitor.close()
    return counts


def test_each_rank_opens_one_connection_to_the_store() -> None:
    for counts in run_ranks(count_connections, 2):
        assert max(counts) - counts[0] == 1


class Stopped:
    """A store that answers nothing until it goes on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self._store = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        self.goes_on.wait(30)
        return getattr(self._store, name)


def test_a_call_of_one_thread_that_is_not_answered_leaves_the_other_with_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "ANSWER_TIMEOUT_S", 0.3)
    stopped = Stopped()
    channel = StoreChannel(Job(1, 2, "gloo"), "prefix", Connection(lambda: stopped))
    reporting = threading.Thread(target=channel.publish, args=("key", b"report"), daemon=True)
    reporting.start()
    checker = OrderChecker(channel, timeout_s=10.0, budget=WindowBudget(None), on_error=lambda _: None)
    order = RecordedKinds((CollectiveSequence(items=(Item("allreduce_", "0"),), groups={"0": (0, 1)}),))
    began_s = time.monotonic()
    checker.start("check", order, 0)
    ruling = checker.await_ruling()
    assert ruling.decision is Decision.LATE
    assert "does not answer" in ruling.reason
    assert near(time.monotonic() - began_s, 30.0)
    stopped.goes_on.set()
    reporting.join(5)
    assert channel.peek("key") == b"report"
    checker.close(5.0)


def test_a_message_is_read_without_waiting_whatever_others_do_with_it() -> None:
    channel = StoreChannel(Job(0, 2, "gloo"), "prefix", Connection(dist.HashStore))
    assert channel.peek("key") is None
    channel.publish("key", bytes(range(256)))
    assert channel.peek("key") == channel.peek("key") == bytes(range(256))
    channel.delete("key", "another")
    assert channel.peek("key") is None
    assert not channel.has("key")
