"""The gate's log and the profile of real jobs agree: two processes with Gloo, whose ranges stand for kernels."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap_callbacks.analysis.kernels import with_log
from overlap_callbacks.analysis.kernels.accounting import Account, accounts
from overlap_callbacks.analysis.kernels.cross_check import CrossCheck, cross_check
from overlap_callbacks.analysis.kernels.issued import Issued
from overlap_callbacks.analysis.kernels.matching import matched
from overlap_callbacks.analysis.kernels.table import KernelTable
from tests.distributed import run_ranks
from tests.monitor.jobs import Training, ddp, new_monitor, run_steps, tiny_schedule

STEPS = 16


def fsdp2(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


JOBS = {"ddp": ddp, "fsdp2": fsdp2}


def what_a_window_compares(rank: int, job: str) -> tuple[list[Account], set[str | None], list[CrossCheck]]:
    """The accounts of the profiled steps that count, the dimensions of their ranges, and what was found wrong."""
    found: list[Account] = []
    dimensions: set[str | None] = set()
    wrong: list[CrossCheck] = []

    def keep(kernels: KernelTable, issued: Issued) -> CrossCheck:
        found.extend(accounts(kernels, issued).values())
        dimensions.update(match.dimension for match in matched(kernels, issued).values())
        wrong.append(cross_check(kernels, issued))
        return wrong[-1]

    with mock.patch.object(with_log, "cross_check", keep):
        monitor = new_monitor(schedule=tiny_schedule(every_n_steps=STEPS, profiled_steps=2))
        run_steps(Training(rank, wrap=JOBS[job]), monitor, STEPS)
        monitor.close()
    return found, dimensions, wrong


@pytest.mark.parametrize("job", JOBS)
def test_every_range_of_gloo_is_a_collective_and_every_collective_a_range(job: str) -> None:
    for found, dimensions, wrong in run_ranks(what_a_window_compares, 2, job):
        assert found
        for account in found:
            assert account.expected
            assert (account.lacking, account.surplus) == ((), {})
        assert dimensions == {"world"}
        assert wrong == [CrossCheck()]
