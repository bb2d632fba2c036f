"""The roll call at attach, of one rank whose others do not come."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from overlap_callbacks.monitor.background import roll_call
from overlap_callbacks.monitor.background.roll_call import Refusal, RollCall
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of two ranks whose store is in this process."""
    store: Any = dist.HashStore()
    connection = Connection(lambda: store)
    monkeypatch.setattr(roll_call, "StoreChannel", lambda job, prefix: StoreChannel(job, prefix, connection))
    return Job(0, 2, "gloo")


def test_a_rank_that_waits_alone_looks_ever_less_often() -> None:
    look_s, waited_s, looks = 0.002, 0.0, 0
    while waited_s < 3600:
        waited_s += look_s
        look_s = roll_call._next_look_s(look_s, waited_s, 2)
        looks += 1
        assert look_s <= max(0.1, 0.05 * waited_s)
    assert looks < 400  # in an hour; ten a second would be 36,000
    assert look_s == 30.0
    assert roll_call._next_look_s(30.0, 3600.0, 2) == 30.0


def test_many_ranks_look_less_often_from_the_start() -> None:
    assert roll_call._next_look_s(2.0, 3.0, 20_000) == 2.0


def test_a_thread_that_does_not_start_raises_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    refusals: list[Refusal] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        call = RollCall(job, lambda: None, refusals.append)
    assert call.wait(30.0) is None
    assert call.is_over
    assert not call.agreed
    call.leave()
    assert refusals == []


def test_a_rank_that_leaves_waits_no_more(job: Job) -> None:
    call = RollCall(job, lambda: None, lambda _: None)
    assert call.wait(0.05) is None
    assert not call.is_over
    call.leave(30.0)
    assert call.is_over
    assert not call.agreed
