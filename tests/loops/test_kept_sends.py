"""Gloo's send reads the memory that its tensor had, and does not keep it; the shim for Megatron-LM lets it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.loops import cpu_shims

SIZE = 2048  # as many elements as a pipeline of ``test_megatron_lm`` sends; small memory is used again at once
MESSAGES = 20


def _exchange(rank: int, keep: bool) -> int:
    """Messages that arrived wrong, where the sender treats its tensors as Megatron's interleaved pipeline does."""
    if keep:
        cpu_shims.keep_memory_of_sends()
    wrong = 0
    for number in range(MESSAGES):
        if rank == 0:
            tensor = torch.full((SIZE,), float(number))
            send = dist.isend(tensor, 1)
            tensor.data = torch.empty(1)
            others = [torch.full((SIZE,), -1.0) for _ in range(8)]  # what a forward pass computes next
            dist.barrier()
            send.wait()
            del others
        else:
            dist.barrier()
            received = torch.empty(SIZE)
            dist.irecv(received, 0).wait()
            wrong += int(not (received == number).all())
    return wrong


@pytest.mark.parametrize(("keep", "wrong"), [(True, 0), (False, MESSAGES)])
def test_messages_whose_memory_is_taken_away_arrive_whole_only_with_the_shim(keep: bool, wrong: int) -> None:
    assert run_ranks(_exchange, 2, keep)[1] == wrong
