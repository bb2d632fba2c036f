"""Which threads the gate sees, and that the collectives of all others come to no harm."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.gate.dispatcher import dispatcher
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import (
    KeptReports,
    Training,
    digest_without_library,
    dispatch_table,
    is_pass_through,
    kept_logs,
    new_monitor,
    run_steps,
    tiny_schedule,
    wait_until,
)

NUM_TOGGLES = 10_000


class Chatter:
    """A thread that all-reduces all the time on a group of its own, until both ranks want it to end."""

    def __init__(self, rank: int) -> None:
        self.rounds = 0
        self.wrong: list[list[float]] = []
        self.error = ""
        self.group = dist.new_group(group_desc="chatter")
        self._rank = rank
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._enough.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                # The second element carries the wish to end, so that both ranks end in the same round.
                tensor = torch.tensor([self.rounds + self._rank, float(self._enough.is_set())])
                dist.all_reduce(tensor, group=self.group)
                total, ends = tensor.tolist()
                if total != 2 * self.rounds + 1:
                    self.wrong.append(tensor.tolist())
                self.rounds += 1
                if ends == 2:
                    return
        except RuntimeError as error:
            self.error = repr(error)


def in_a_thread(action: Callable[[], Any]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def step_of(gate: Gate, action: Callable[[], Any], **options: Any) -> StepLog:
    gate.begin_step(**{"sequential": False, **options})
    action()
    return gate.end_step()


# -- threads of the user's


def train_beside_chatter(rank: int, num_windows: int) -> dict[str, Any]:
    expected = digest_without_library(rank, num_steps := 5 * num_windows + 2)
    training, sink = Training(rank), KeptReports()
    monitor = new_monitor(sink, schedule=tiny_schedule())
    chatter = Chatter(rank)
    with captured_log() as lines, kept_logs() as logs:
        for step in range(num_steps):
            with monitor.step(step):
                training.step()
                before = chatter.rounds
                wait_until(lambda before=before: chatter.rounds > before + 1 or chatter.error)  # one began in the step
        chatter.end()
        monitor.close()
    name = chatter.group.group_name
    reports = sink.facts()
    return {
        "lines": lines,
        "same": training.digest() == expected,
        "rounds": chatter.rounds,
        "wrong": chatter.wrong,
        "error": chatter.error,
        "chatter_recorded": sum(c.group.name == name for log in logs for c in log.collectives),
        "chatter_told": sum(log.foreign == (f"chatter ({name})",) for log in logs),
        "foreign": {group for log in logs for group in log.foreign} - {f"chatter ({name})"},
        "training_serialised": sum(c.start is not None for log in logs for c in log.collectives),
        "windows": sum(report["complete"] for report in reports),
        "noted": sum(any("chatter" in problem for problem in report["problems"]) for report in reports),
        "figures": set.intersection(*(set(report["figures"]) for report in reports)) if rank == 0 else None,
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_windows", [40, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_thread_that_communicates_all_the_time_does_no_harm_to_many_windows_nor_they_to_it(num_windows):
    found = run_ranks(train_beside_chatter, 2, num_windows, timeout_s=120)
    for rank in found:
        assert rank["lines"] == []
        assert rank["same"]
        assert (rank["wrong"], rank["error"]) == ([], "")
        assert rank["rounds"] > num_windows
        assert rank["chatter_recorded"] == 0
        assert rank["chatter_told"] > num_windows
        assert rank["foreign"] == set()
        assert rank["training_serialised"] >= 2 * num_windows
    assert found[0]["rounds"] == found[1]["rounds"]
    assert found[0]["windows"] == num_windows
    assert found[0]["noted"] > num_windows // 2
    assert {"e2e_overlapped_ms", "e2e_sequential_ms"} <= found[0]["figures"]


def toggle_beside_chatter(rank: int) -> dict[str, Any]:
    untouched = dispatch_table()
    chatter = Chatter(rank)
    gate = Gate()
    gate.register()
    foreign = 0
    toggles = 0
    while toggles < NUM_TOGGLES or chatter.rounds <= 100:  # on a busy machine the thread gets few turns
        gate.begin_step(sequential=True, expected=ExpectedSequence())
        foreign += bool(gate.end_step().foreign)
        toggles += 1
    gate.close()
    passes, table = is_pass_through(), dispatch_table() == untouched
    chatter.end()
    return {
        "errors": (gate.last_error, chatter.error, chatter.wrong),
        "rounds": chatter.rounds,
        "foreign": foreign,
        "as_before": (passes, table),
    }


def test_a_thread_that_communicates_all_the_time_is_not_disturbed_by_ten_thousand_toggles():
    found = run_ranks(toggle_beside_chatter, 2)
    for rank in found:
        assert rank["errors"] == (None, "", [])
        assert rank["rounds"] > 100
        assert rank["foreign"] > 0
        assert rank["as_before"] == (True, True)
    assert found[0]["rounds"] == found[1]["rounds"]


def come_and_go_beside_threads(rank: int) -> list[str]:
    """The errors in threads that communicate while gates come and go between steps."""
    errors, enough = [], threading.Event()

    def communicate() -> None:
        try:
            while not enough.is_set():
                dist.all_reduce(torch.ones(1))
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=communicate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        gate = Gate()
        gate.register()
        time.sleep(0.01)
        gate.close()
    enough.set()
    for thread in threads:
        thread.join()
    return errors


def test_gates_that_come_and_go_do_no_harm_to_threads_that_communicate():
    assert run_ranks(come_and_go_beside_threads, 1) == [[]]


def communicate_in_a_thread(rank: int) -> list[Any]:
    """What is recorded, and who is told of, in steps with and without a thread of the user's."""
    group = dist.new_group(group_desc="theirs")
    gate = Gate()
    gate.register()
    logs = [
        step_of(gate, lambda: dist.all_reduce(torch.ones(1), group=group)),
        step_of(gate, lambda: in_a_thread(lambda: dist.all_reduce(torch.ones(1), group=group))),
        # On a group on which the training thread communicates as well.
        step_of(gate, lambda: (dist.barrier(), in_a_thread(dist.barrier))),
        step_of(gate, lambda: in_a_thread(lambda: exchange(rank))),
        step_of(gate, lambda: exchange(rank)),
    ]
    gate.close()
    return [([c.operator for c in log.collectives], [name.split(" ")[0] for name in log.foreign]) for log in logs]


def exchange(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)


def test_collectives_of_a_user_thread_are_not_recorded_and_the_groups_own_count_shows_them():
    for rank, found in enumerate(run_ranks(communicate_in_a_thread, 2)):
        assert found == [
            (["allreduce_"], []),
            ([], ["theirs"]),
            (["barrier"], ["default_pg"]),
            ([], ["default_pg"]),
            (["send" if rank == 0 else "recv_"], []),
        ]


class StepInThread(Training):
    """Runs the whole step in a Python thread of its own, as some pipelines do."""

    def step(self) -> None:
        in_a_thread(super().step)


def train_in_a_thread(rank: int) -> dict[str, Any]:
    training, sink = StepInThread(rank), KeptReports()
    monitor = new_monitor(sink)
    with captured_log() as lines, kept_logs() as logs:
        run_steps(training, monitor, 22)
        monitor.close()
    return {
        "lines": lines,
        "same": training.digest() == digest_without_library(rank, 22),
        "recorded": sum(len(log.collectives) for log in logs),
        "foreign": {log.foreign for log in logs},
    }


def test_a_step_that_runs_in_a_python_thread_passes_unseen_is_reported_and_gives_the_same_weights():
    for found in run_ranks(train_in_a_thread, 2):
        assert found["lines"] == []
        assert found["same"]
        assert found["recorded"] == 0
        assert found["foreign"] == {("default_pg (0)",)}


# -- steps whose thread changes


def change_threads(rank: int) -> dict[str, Any]:
    """A step begun on a thread that goes on communicating, and ended on another; then a step of that other thread."""
    untouched = dispatch_table()
    gate = Gate()
    gate.register()
    begun, ended, measured, done = (threading.Event() for _ in range(4))
    tables: list[str] = []

    def first() -> None:
        gate.begin_step(sequential=False)
        begun.set()
        ended.wait()
        dist.all_reduce(torch.ones(1))  # while the other thread's step is open
        tables.append(dispatch_table())
        measured.set()
        dist.all_reduce(torch.ones(1))
        done.set()

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    gate.end_step()
    gate.begin_step(sequential=False)
    ended.set()
    measured.wait()
    done.wait()
    dist.barrier()
    seen = [c.operator for c in gate.end_step().collectives]
    thread.join()
    gate.close()
    return {
        "seen": seen,
        "first_thread_as_before": tables == [untouched],
        "as_before": dispatch_table() == untouched,
        "error": gate.last_error,
    }


def test_a_thread_whose_step_ended_elsewhere_is_not_taken_for_the_measured_one():
    for found in run_ranks(change_threads, 2):
        assert found["seen"] == ["barrier"]
        assert found["first_thread_as_before"]
        assert found["as_before"]
        assert found["error"] is None


def measure_on_threads_in_turn(rank: int) -> list[list[str]]:
    gate = Gate()
    gate.register()
    logs: list[StepLog] = []
    for _ in range(3):
        in_a_thread(lambda: logs.append(step_of(gate, dist.barrier)))
    logs.append(step_of(gate, lambda: dist.all_reduce(torch.ones(1))))
    gate.close()
    return [[c.operator for c in log.collectives] for log in logs]


def test_steps_may_run_on_one_thread_after_another():
    assert run_ranks(measure_on_threads_in_turn, 2) == [[["barrier"]] * 3 + [["allreduce_"]]] * 2


def stop_from_another_thread(rank: int) -> dict[str, Any]:
    untouched = dispatch_table()
    gate = Gate()
    gate.register()
    expected = ExpectedSequence([("allreduce_", "0")] * 3, single_group="0")
    gate.begin_step(sequential=True, expected=expected)
    dist.all_reduce(torch.ones(1))
    in_a_thread(gate.stop)
    stopped = (is_pass_through(), gate.serialising, dispatch_table() == untouched)
    dist.all_reduce(torch.ones(1))
    passed = dispatch_table() == untouched  # the thread sees to itself at its next collective
    gate.begin_step(sequential=True, expected=expected)
    in_a_thread(gate.stop)
    seen_after_stop = len(gate.end_step().collectives)
    at_end = dispatch_table() == untouched
    gate.begin_step(sequential=False)
    dist.barrier()
    again = [c.operator for c in gate.end_step().collectives]
    gate.close()
    return {
        "stopped": stopped,
        "passed": passed,
        "seen_after_stop": seen_after_stop,
        "at_end": at_end,
        "again": again,
    }


def test_a_stop_from_another_thread_lets_pass_at_once_and_the_measured_thread_is_as_before_soon_after():
    for found in run_ranks(stop_from_another_thread, 2):
        assert found["stopped"] == (True, False, False)
        assert found["passed"]
        assert found["seen_after_stop"] == 1  # of the step before it, which nobody ended
        assert found["at_end"]
        assert found["again"] == ["barrier"]


def suspend_and_resume(rank: int) -> dict[str, list[str]]:
    gate = Gate()
    gate.register()

    def record(between: Callable[[], Any]) -> list[str]:
        gate.begin_step(sequential=False)
        dist.barrier()
        gate.suspend()
        dist.all_reduce(torch.ones(1))
        between()
        gate.resume()
        dist.broadcast(torch.ones(1), 0)
        log = gate.end_step()
        assert log.foreign == ()
        return [c.operator for c in log.collectives]

    found = {
        "plain": record(lambda: None),
        "stopped_meanwhile": record(lambda: in_a_thread(gate.stop)),
        "resumed_elsewhere": record(lambda: in_a_thread(gate.resume)),
    }
    gate.resume()  # after the step: nothing to resume
    assert is_pass_through()
    gate.close()
    return found


def test_what_a_pause_lets_pass_is_not_recorded_and_only_the_steps_own_thread_resumes():
    for found in run_ranks(suspend_and_resume, 2):
        assert found["plain"] == ["barrier", "broadcast_"]
        assert found["stopped_meanwhile"] == ["barrier"]
        assert found["resumed_elsewhere"] == ["barrier", "broadcast_"]


# -- threads of autograd


class ReduceInBackward(torch.autograd.Function):
    """All-reduces its gradient, after ``depth`` backward passes within one another.

    Beyond a depth of some 60 autograd goes on in native threads of its own.
    """

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, depth: int, threads: list[int]) -> torch.Tensor:
        context.depth, context.threads = depth, threads
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        if context.depth == 0:
            context.threads.append(threading.get_ident())
            reduced = gradient.clone()
            dist.all_reduce(reduced)
            return reduced, None, None
        with torch.enable_grad():
            inner = torch.ones(1, requires_grad=True)
            ReduceInBackward.apply(inner, context.depth - 1, context.threads).sum().backward()
        return inner.grad * gradient, None, None


def reduce_in_backward(rank: int, depth: int, at_backend_select: bool) -> dict[str, Any]:
    gate = Gate()
    gate.register()
    if at_backend_select:
        dispatcher.use_backend_select("a test")
    leaf, threads = torch.ones(1, requires_grad=True), []
    gate.begin_step(sequential=True, expected=ExpectedSequence([("allreduce_", dist.group.WORLD.group_name)]))
    ReduceInBackward.apply(leaf, depth, threads).sum().backward()
    log = gate.end_step()
    # The engine's threads live on: they are ordinary ones again.
    tables: list[str] = []
    untouched = dispatch_table()
    leaf_after = torch.ones(1, requires_grad=True)
    LookInBackward.apply(leaf_after, depth, tables).sum().backward()
    gate.close()
    assert gate.last_error is None, repr(gate.last_error)
    return {
        "gradient": leaf.grad.item(),
        "on_this_thread": threads == [threading.get_ident()],
        "seen": [(c.operator, c.start is not None) for c in log.collectives],
        "foreign": log.foreign,
        "as_before": tables == [untouched],
    }


class LookInBackward(ReduceInBackward):
    """Like ``ReduceInBackward``, but takes down how a collective would be dispatched there."""

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        if context.depth == 0:
            context.threads.append(dispatch_table())
            return gradient, None, None
        with torch.enable_grad():
            inner = torch.ones(1, requires_grad=True)
            LookInBackward.apply(inner, context.depth - 1, context.threads).sum().backward()
        return inner.grad * gradient, None, None


@pytest.mark.parametrize("at_backend_select", [False, True])
@pytest.mark.parametrize(("depth", "on_this_thread"), [(0, True), (100, False)])
def test_a_collective_within_a_backward_is_seen_on_this_thread_and_on_those_of_autograd(
    depth, on_this_thread, at_backend_select
):
    for found in run_ranks(reduce_in_backward, 2, depth, at_backend_select):
        assert found["gradient"] == 2.0
        assert found["on_this_thread"] is on_this_thread
        assert found["seen"] == [("allreduce_", True)]
        assert found["foreign"] == ()
        assert found["as_before"]
