from __future__ import annotations

import threading

import pytest

from overlap_callbacks._threads import NoAnswerError, QuestionFailedError, Worker

# Reached only where a test fails: everything waits for an event, not for time to pass.
PATIENCE_S = 30.0


class Blocker:
    """A task that runs until it is let go."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.release = threading.Event()

    def __call__(self) -> None:
        self.running.set()
        assert self.release.wait(PATIENCE_S)


@pytest.fixture
def blocker():
    blocker = Blocker()
    yield blocker
    blocker.release.set()


def no_errors(error: Exception) -> None:
    raise AssertionError(f"unexpected: {error!r}")


def test_tasks_run_in_the_order_of_submission_and_close_finishes_all_of_them():
    worker, seen = Worker("tester", no_errors), []
    for number in range(100):
        assert worker.submit(lambda number=number: seen.append(number))
    assert worker.close(PATIENCE_S)
    assert seen == list(range(100))


def test_tasks_run_on_one_daemon_thread_of_the_given_name():
    worker, threads = Worker("tester", no_errors), []
    for _ in range(3):
        worker.submit(lambda: threads.append(threading.current_thread()))
    assert worker.close(PATIENCE_S)
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    assert threads[0].name == "tester"
    assert threads[0].daemon  # the interpreter must not wait for it


@pytest.mark.parametrize("failure", [ValueError("broken"), KeyError("lost"), RuntimeError("gone")])
def test_an_error_is_reported_on_the_workers_thread_and_the_next_task_runs(failure):
    errors, seen = [], []

    def fail() -> None:
        raise failure

    worker = Worker("tester", lambda error: errors.append((error, threading.current_thread().name)))
    worker.submit(fail)
    worker.submit(lambda: seen.append("after"))
    assert worker.close(PATIENCE_S)
    assert errors == [(failure, "tester")]
    assert seen == ["after"]


def test_a_full_queue_drops_the_task_without_waiting_and_says_so(blocker):
    worker, seen = Worker("tester", no_errors, capacity=2), []
    worker.submit(blocker)
    assert blocker.running.wait(PATIENCE_S)  # off the queue: both places are free
    assert worker.submit(lambda: seen.append(1))
    assert worker.submit(lambda: seen.append(2))
    assert not worker.submit(lambda: seen.append(3))
    blocker.release.set()
    assert worker.close(PATIENCE_S)
    assert seen == [1, 2]


def test_close_gives_up_on_a_task_that_hangs(blocker):
    worker = Worker("tester", no_errors)
    worker.submit(blocker)
    assert blocker.running.wait(PATIENCE_S)
    assert not worker.close(0.05)


def test_close_gives_up_where_the_queue_stays_full(blocker):
    worker = Worker("tester", no_errors, capacity=1)
    worker.submit(blocker)
    assert blocker.running.wait(PATIENCE_S)
    assert worker.submit(lambda: None)
    assert not worker.close(0.05)


def test_close_waits_for_room_in_a_full_queue(blocker):
    worker, seen = Worker("tester", no_errors, capacity=1), []
    worker.submit(blocker)
    assert blocker.running.wait(PATIENCE_S)
    assert worker.submit(lambda: seen.append("waiting"))
    closing = threading.Timer(0.05, blocker.release.set)
    closing.start()
    assert worker.close(PATIENCE_S)
    assert seen == ["waiting"]
    closing.join()


def test_a_worker_that_never_worked_starts_no_thread_and_closes_at_once():
    before = threading.active_count()
    worker = Worker("tester", no_errors)
    assert threading.active_count() == before
    assert worker.close(0.0)


def test_closing_twice_is_harmless():
    worker = Worker("tester", no_errors)
    worker.submit(lambda: None)
    assert worker.close(PATIENCE_S)
    assert worker.close(PATIENCE_S)


def test_a_closed_worker_takes_tasks_again():
    worker, seen = Worker("tester", no_errors), []
    worker.submit(lambda: seen.append(1))
    assert worker.close(PATIENCE_S)
    assert worker.submit(lambda: seen.append(2))
    assert worker.close(PATIENCE_S)
    assert seen == [1, 2]


def test_a_finished_task_is_released_before_the_next_arrives():
    # A task holds a window's samples, which may be large.
    worker = Worker("tester", no_errors)
    collected = threading.Event()

    class Task:
        def __call__(self) -> None:
            pass

        def __del__(self) -> None:
            collected.set()

    worker.submit(Task())
    assert collected.wait(PATIENCE_S)
    assert worker.close(PATIENCE_S)


def test_a_question_is_answered_on_the_thread_or_raises_what_it_raised() -> None:
    worker = Worker("test", lambda error: None)
    assert worker.ask(lambda: threading.current_thread().name, 20.0) == "test"
    assert worker.ask(lambda: None, 20.0) is None
    with pytest.raises(QuestionFailedError) as raised:
        worker.ask(lambda: {}["missing"], 20.0)
    assert isinstance(raised.value.__cause__, KeyError)
    assert worker.close(20.0)


def test_a_question_without_an_answer_in_time_goes_on_aside() -> None:
    worker, go_on = Worker("test", lambda error: None), threading.Event()
    with pytest.raises(NoAnswerError):
        worker.ask(lambda: go_on.wait(20.0), 0.01)
    go_on.set()
    assert worker.ask(lambda: "next", 20.0) == "next"
    assert worker.close(20.0)
