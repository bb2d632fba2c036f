"""Batches of sends and receives, where a framework posts them: waited for once all are posted, and never twice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks.gate import DoneWork, Gate
from tests.distributed import run_ranks


def exchange(rank: int) -> tuple[torch.Tensor, list[Any]]:
    received = torch.zeros(1000)
    operations = [dist.P2POp(dist.isend, torch.full((1000,), float(rank)), 1 - rank),
                  dist.P2POp(dist.irecv, received, 1 - rank)]  # fmt: skip
    return received, dist.batch_isend_irecv(operations)


def post_in_both_modes(rank: int) -> list[tuple[list[str], float, float]]:
    """The works that are handed on, and what was received when the call returned, and after their wait."""
    gate = Gate()
    gate.register()
    found = []
    for sequential in (False, True):
        gate.begin_step(sequential=sequential, checked=[("send", "0"), ("recv_", "0")])
        (received, _), works = gate.post(lambda: exchange(rank), lambda result: result[1])
        at_return = received.sum().item()
        for work in works:
            work.wait()
        gate.end_step()
        found.append(([type(work).__name__ for work in works], at_return, received.sum().item()))
    assert gate.errors == 0, gate.last_error
    gate.close()
    return found


def test_in_a_sequential_step_a_batch_is_complete_when_its_call_returns_and_its_works_stay_waitable() -> None:
    for rank, (overlapped, sequential) in enumerate(run_ranks(post_in_both_modes, 2)):
        assert "DoneWork" not in overlapped[0]
        assert overlapped[2] == 1000 * (1 - rank)
        assert sequential == (["DoneWork", "DoneWork"], 1000 * (1 - rank), 1000 * (1 - rank))


def post_before_the_peer_does(rank: int) -> list[float]:
    """Rank 1 posts its half only once rank 0 is about to wait."""
    store = dist.distributed_c10d._get_default_store()
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=True, checked=[("send", "0"), ("recv_", "0")])
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


def test_a_done_work_may_be_waited_for_again() -> None:
    work = DoneWork()
    assert work.wait()
    assert work.wait(timeout=1.0)
    assert work.is_completed()
