from __future__ import annotations

import threading
import time

import pytest

from overlap_callbacks._threads import DetachedWorker, ThreadExitError, Worker
from tests.margins import PATIENCE_S, near


def fail() -> None:
    raise RuntimeError("no")


def test_work_that_goes_well_is_done_when_the_call_returns() -> None:
    aside, done = DetachedWorker("test", patience_s=20.0), []
    assert aside.do(lambda: done.append(threading.current_thread().name))
    assert done == ["test"]
    assert aside.close(lambda: done.append("last"), 20.0)
    assert done == ["test", "last"]


def test_what_work_raises_is_raised_where_it_belongs() -> None:
    aside = DetachedWorker("test", patience_s=20.0)
    with pytest.raises(RuntimeError, match="no"):
        aside.do(fail)
    assert aside.do(lambda: None)
    with pytest.raises(RuntimeError, match="no"):
        aside.close(fail, 20.0)


def test_no_caller_waits_twice_behind_stalled_work() -> None:
    aside, release = DetachedWorker("test", patience_s=0.2), threading.Event()
    done: list[int] = []
    start = time.monotonic()
    assert not aside.do(lambda: (release.wait(), None)[1])
    first = time.monotonic() - start
    for number in range(50):
        assert not aside.do(lambda number=number: done.append(number))  # type: ignore[misc]
    assert near(time.monotonic() - start, first + 50 * 0.2)  # what waiting for each would take
    assert not aside.close(lambda: done.append(-1), 0.05)
    release.set()
    assert aside.close(lambda: None, 20.0)
    assert done == [*range(50), -1]


def test_a_late_error_is_reported_at_the_next_call() -> None:
    aside, release = DetachedWorker("test", patience_s=0.01), threading.Event()

    def work() -> None:
        release.wait()
        fail()

    assert not aside.do(work)
    release.set()
    with pytest.raises(RuntimeError, match="no"):
        aside.close(lambda: None, 20.0)


def test_what_finds_no_place_is_dropped_and_counted() -> None:
    aside, release = DetachedWorker("test", patience_s=0.01, capacity=2), threading.Event()
    taken = threading.Event()
    aside.do(lambda: (taken.set(), release.wait(), None)[2])
    assert taken.wait(PATIENCE_S)
    for _ in range(4):
        aside.do(release.wait)  # type: ignore[arg-type]
    assert aside.dropped == 2
    release.set()
    assert aside.close(lambda: None, 20.0)


def test_where_there_was_no_work_there_is_no_thread() -> None:
    before = threading.active_count()
    done: list[int] = []
    assert DetachedWorker("test", patience_s=1.0).close(lambda: done.append(threading.active_count()), 1.0)
    assert done == [before]


def test_the_last_work_waits_for_a_place_and_is_done() -> None:
    worker, release = DetachedWorker("test", patience_s=0.05, capacity=1), threading.Event()
    done: list[str] = []
    taken = threading.Event()
    worker.do(lambda: (taken.set(), release.wait(PATIENCE_S), None)[2])
    assert taken.wait(PATIENCE_S)
    worker.do(lambda: done.append("waiting"))
    worker.do(lambda: done.append("dropped"))
    assert worker.dropped == 1
    opening = threading.Timer(0.1, release.set)
    opening.start()
    assert worker.close(lambda: done.append("last"), 20.0)
    assert done == ["waiting", "last"]
    assert worker.dropped == 1
    opening.join()


def test_where_no_place_comes_free_the_end_is_given_up() -> None:
    worker, release = DetachedWorker("test", patience_s=0.05, capacity=1), threading.Event()
    worker.do(lambda: (release.wait(20.0), None)[1])
    worker.do(lambda: None)
    start = time.monotonic()
    assert not worker.close(lambda: None, 0.2)
    assert near(time.monotonic() - start, 20.0)  # what the first work takes
    release.set()


def leave(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_raises_system_exit_is_reported_and_ends_no_thread(error: BaseException) -> None:
    told: list[Exception] = []
    done: list[int] = []
    worker = Worker("test", told.append)
    worker.submit(lambda: leave(error))
    worker.submit(lambda: done.append(1))
    assert worker.close(20.0)
    assert done == [1]
    (found,) = told
    assert isinstance(found, ThreadExitError)
    assert type(error).__name__ in str(found)
    aside = DetachedWorker("test", patience_s=20.0)
    with pytest.raises(ThreadExitError, match=type(error).__name__):
        aside.do(lambda: leave(error))
    assert aside.do(lambda: None)


def test_a_thread_that_does_not_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = Worker("test", lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            worker.submit(lambda: None)
    assert not worker.started
    assert worker.close(1.0)
