"""Collectives that other threads issue: recorded, left alone, and no danger to the process."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence
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
)

NUM_WINDOWS = 200


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


def train_beside_chatter(rank: int) -> dict[str, Any]:
    expected = digest_without_library(rank, num_steps := 5 * NUM_WINDOWS + 2)
    training, sink = Training(rank), KeptReports()
    monitor = new_monitor(sink, schedule=tiny_schedule())
    chatter = Chatter(rank)
    with captured_log() as lines, kept_logs() as logs:
        run_steps(training, monitor, num_steps)
        chatter.end()
        monitor.close()
    of_chatter = [c for log in logs for c in log.collectives if c.group.name == chatter.group.group_name]
    of_training = [c for log in logs for c in log.collectives if c.group.name != chatter.group.group_name]
    return {
        "lines": lines,
        "same": training.digest() == expected,
        "rounds": chatter.rounds,
        "wrong": chatter.wrong,
        "error": chatter.error,
        "chatter_recorded": len(of_chatter),
        "chatter_own": {c.own_thread for c in of_chatter},
        "chatter_serialised": sum(c.start is not None for c in of_chatter),
        "training_own": {c.own_thread for c in of_training},
        "training_serialised": sum(c.start is not None for c in of_training),
        "windows": sum(report["complete"] for report in sink.facts()),
        "figures": set.intersection(*(set(report["figures"]) for report in sink.facts())) if rank == 0 else None,
    }


@pytest.mark.slow
def test_a_thread_that_communicates_all_the_time_does_no_harm_to_two_hundred_windows_nor_they_to_it():
    found = run_ranks(train_beside_chatter, 2, timeout_s=120)
    for rank in found:
        assert rank["lines"] == []
        assert rank["same"]
        assert (rank["wrong"], rank["error"]) == ([], "")
        assert rank["rounds"] > NUM_WINDOWS
        assert rank["chatter_recorded"] > NUM_WINDOWS
        assert rank["chatter_own"] == {False}
        assert rank["chatter_serialised"] == 0
        assert rank["training_own"] == {True}
        assert rank["training_serialised"] >= 2 * NUM_WINDOWS
    assert found[0]["rounds"] == found[1]["rounds"]
    assert found[0]["windows"] == NUM_WINDOWS
    assert {"e2e_overlapped_ms", "e2e_sequential_ms"} <= found[0]["figures"]


def take_over_the_kernels(rank: int) -> dict[str, Any]:
    untouched = dispatch_table()
    chatter = Chatter(rank)
    first = Gate()
    first.register()
    first.begin_step(sequential=False)
    while chatter.rounds < 100:
        pass
    seen = len(first.end_step().collectives)
    first.close()
    kept = dispatch_table() != untouched
    passes = is_pass_through()

    second = Gate()
    second.register()
    second.begin_step(sequential=False)
    dist.all_reduce(torch.ones(1))
    own = [c.operator for c in second.end_step().own]
    second.close()
    chatter.end()
    return {"seen": seen, "kept": kept, "passes": passes, "own": own, "wrong": chatter.wrong, "error": chatter.error}


def test_kernels_that_another_thread_may_be_inside_stay_as_a_pass_through_and_the_next_gate_takes_them_over():
    for found in run_ranks(take_over_the_kernels, 2):
        assert found["seen"] > 0
        assert found["kept"]
        assert found["passes"]
        assert found["own"] == ["allreduce_"]
        assert (found["wrong"], found["error"]) == ([], "")


def close_beside_a_thread_that_no_step_saw(rank: int) -> list[str]:
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
        time.sleep(0.02)
        gate.close()
    enough.set()
    for thread in threads:
        thread.join()
    return errors


def test_closing_does_no_harm_to_a_thread_that_communicates_where_no_step_saw_it():
    assert run_ranks(close_beside_a_thread_that_no_step_saw, 1) == [[]]


# -- backward on other threads


class BackwardInThread(Training):
    """Runs the whole step in a Python thread of its own, as some pipelines do."""

    def step(self) -> None:
        thread = threading.Thread(target=super().step)
        thread.start()
        thread.join()


def train_in_a_thread(rank: int) -> dict[str, Any]:
    training, sink = BackwardInThread(rank), KeptReports()
    monitor = new_monitor(sink)
    with captured_log() as lines, kept_logs() as logs:
        run_steps(training, monitor, 22)
        monitor.close()
    return {
        "lines": lines,
        "same": training.digest() == digest_without_library(rank, 22),
        "recorded": sum(len(log.collectives) for log in logs),
        "own": sum(len(log.own) for log in logs),
        "serialised": sum(c.start is not None for log in logs for c in log.collectives),
    }


def test_a_backward_that_runs_in_a_python_thread_is_recorded_left_alone_and_gives_the_same_weights():
    for found in run_ranks(train_in_a_thread, 2):
        assert found["lines"] == []
        assert found["same"]
        assert found["recorded"] > 0
        assert (found["own"], found["serialised"]) == (0, 0)


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


def reduce_in_backward(rank: int, depth: int) -> dict[str, Any]:
    gate = Gate()
    gate.register()
    leaf, threads = torch.ones(1, requires_grad=True), []
    gate.begin_step(sequential=True, expected=ExpectedSequence([("allreduce_", dist.group.WORLD.group_name)]))
    ReduceInBackward.apply(leaf, depth, threads).sum().backward()
    log = gate.end_step()
    gate.close()
    assert gate.errors == 0, repr(gate.last_error)
    return {
        "gradient": leaf.grad.item(),
        "on_this_thread": threads == [threading.get_ident()],
        "seen": [(c.operator, c.own_thread, c.start is not None) for c in log.collectives],
    }


@pytest.mark.parametrize(("depth", "on_this_thread"), [(0, True), (100, False)])
def test_a_collective_within_a_backward_counts_as_own_on_this_thread_and_on_those_of_autograd(depth, on_this_thread):
    for found in run_ranks(reduce_in_backward, 2, depth):
        assert found["gradient"] == 2.0
        assert found["on_this_thread"] is on_this_thread
        assert found["seen"] == [("allreduce_", True, True)]
