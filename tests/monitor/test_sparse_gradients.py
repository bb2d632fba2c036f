"""Sparse gradients: tensors that do not tell their bytes are measured, and left as they are."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.gate.collectives import num_bytes
from tests.distributed import run_ranks
from tests.monitor.jobs import TINY_WINDOW_STEPS, KeptReports, kept_logs, new_monitor

NUM_STEPS = TINY_WINDOW_STEPS + 3


def train(rank: int, measured: bool) -> dict[str, Any]:
    """Two layers behind an embedding whose gradients are sparse."""
    torch.manual_seed(0)
    layers = [torch.nn.EmbeddingBag(100, 8, sparse=True), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(100 + rank)
    kept = KeptReports()
    monitor = new_monitor(kept) if measured else None
    with kept_logs() as logs:
        for step in range(NUM_STEPS):
            if monitor is not None:
                monitor.step_begin(step)
            model(torch.randint(0, 100, (4, 3), generator=data)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step_end()
        if monitor is not None:
            monitor.close()
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.detach().numpy().tobytes())
    sizes = [(one.bytes_in, one.start is not None) for log in logs for one in log.collectives]
    return {"weights": weights.hexdigest(), "reports": kept.facts(), "sizes": sizes}


def test_ddp_with_sparse_gradients_is_measured_and_trains_the_same_weights():
    measured, alone = run_ranks(train, 2, True), run_ranks(train, 2, False)
    assert [one["weights"] for one in measured] == [one["weights"] for one in alone]
    assert measured[0]["reports"][0]["complete"]
    assert all(size > 0 for size, _ in measured[0]["sizes"])
    assert any(serialised for _, serialised in measured[0]["sizes"])


def test_the_bytes_of_a_sparse_tensor_are_those_of_its_indices_and_values():
    dense = torch.zeros(4, 6, dtype=torch.float32)
    dense[1, 2] = dense[3, 0] = 1.0
    assert num_bytes(dense.to_sparse()) == 2 * 2 * 8 + 2 * 4
    assert num_bytes([[dense], [dense.to_sparse()]]) == 96 + 2 * 2 * 8 + 2 * 4


def test_a_tensor_with_the_same_index_twice_has_the_bytes_that_travel():
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (4,), check_invariants=False)
    assert num_bytes(twice) == 2 * 8 + 2 * 4
