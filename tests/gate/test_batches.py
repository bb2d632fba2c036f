"""Batches of sends and receives, where a framework posts them: waited for once all are posted, and never twice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.serialiser import CompletedWork
from overlap_callbacks.gate.step_log import Batch, ExpectedSequence
from tests.distributed import run_ranks

CHECKED = [("send", "0"), ("recv_", "0")]


def batch_of(rank: int) -> Batch:
    return (("send", "0", 1 - rank), ("recv_", "0", 1 - rank))


def exchange(rank: int) -> tuple[torch.Tensor, list[Any]]:
    received = torch.zeros(1000)
    operations = [dist.P2POp(dist.isend, torch.full((1000,), float(rank)), 1 - rank),
                  dist.P2POp(dist.irecv, received, 1 - rank)]  # fmt: skip
    return received, dist.batch_isend_irecv(operations)


def post_in_both_modes(rank: int) -> list[tuple[list[str], float, float]]:
    """The works that are passed on, and the data received when the call returned and after their wait."""
    gate = Gate()
    gate.register()
    found = []
    for sequential in (False, True):
        gate.begin_step(sequential=sequential, expected=ExpectedSequence(CHECKED, batches=[batch_of(rank)]))
        (received, _), works = gate.post(lambda: exchange(rank), lambda result: result[1])
        at_return = received.sum().item()
        for work in works:
            work.wait()
        gate.end_step()
        found.append(([type(work).__name__ for work in works], at_return, received.sum().item()))
    assert gate.last_error is None, repr(gate.last_error)
    gate.close()
    return found


def test_in_a_sequential_step_a_batch_is_complete_when_its_call_returns_and_its_works_stay_waitable() -> None:
    for rank, (overlapped, sequential) in enumerate(run_ranks(post_in_both_modes, 2)):
        assert "CompletedWork" not in overlapped[0]
        assert overlapped[2] == 1000 * (1 - rank)
        assert sequential == (["CompletedWork", "CompletedWork"], 1000 * (1 - rank), 1000 * (1 - rank))


def post_before_the_peer_does(rank: int) -> list[float]:
    """Rank 1 posts its half only once rank 0 is about to wait."""
    store = dist.distributed_c10d._get_default_store()
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=True, expected=ExpectedSequence(CHECKED, batches=[batch_of(rank)]))
    if rank == 1:
        store.wait(["posted"])

    def works_of(result: tuple[torch.Tensor, list[Any]]) -> list[Any]:
        store.set("posted", b"")
        return result[1]

    (received, _), _ = gate.post(lambda: exchange(rank), works_of)
    gate.close()
    return received[:1].tolist()


def test_a_batch_is_waited_for_as_long_as_its_peer_takes() -> None:
    assert run_ranks(post_before_the_peer_does, 2) == [[1.0], [0.0]]


def post_twice_and_send_once_alone(rank: int) -> list[tuple[str, int]]:
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=False)
    for _ in range(2):
        (_, works), _ = gate.post(lambda: exchange(rank), lambda result: result[1])
        for work in works:
            work.wait()
    _, works = exchange(rank)
    for work in works:
        work.wait()
    log = gate.end_step()
    gate.close()
    return [(collective.operator, collective.posted) for collective in log.collectives]


def test_what_an_adapter_posts_is_numbered_by_batch_for_the_order_check() -> None:
    expected = [(operator, batch) for batch in (1, 2, 0) for operator in ("send", "recv_")]
    for found in run_ranks(post_twice_and_send_once_alone, 2):
        assert found == expected


def post_other_batches_than_were_checked(rank: int) -> list[Any]:
    """The check saw one batch of a send and a receive; the step posts them in two, sends first, on both ranks."""
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=True, expected=ExpectedSequence(CHECKED, batches=[batch_of(rank)]))
    received = torch.zeros(1)
    works = []
    for post in (
        lambda: dist.isend(torch.full((1,), float(rank)), 1 - rank),
        lambda: dist.irecv(received, 1 - rank),
    ):
        works += gate.post(post, lambda work: [work])[1]
    kinds = [isinstance(work, CompletedWork) for work in works]
    for work in works:
        work.wait()
    log = gate.end_step()
    gate.close()
    return [kinds, received.item(), str(log.divergence)]


def test_a_batch_that_the_check_did_not_see_is_not_waited_for() -> None:
    for rank, (done, received, divergence) in enumerate(run_ranks(post_other_batches_than_were_checked, 2)):
        assert done == [False, False]
        assert received == 1 - rank
        assert "where the checked sequence has another batch" in divergence
