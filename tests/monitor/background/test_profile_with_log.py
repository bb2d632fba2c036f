"""The gate's log and the profile of real jobs agree: two processes with Gloo, whose ranges stand for kernels."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap_callbacks.analysis.kernels.alignment import AlignedStep, Alignment, align
from overlap_callbacks.analysis.kernels.cross_check import CrossCheck, cross_check
from overlap_callbacks.monitor.background import profile_figures
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


def what_a_window_compares(rank: int, job: str) -> tuple[list[AlignedStep], set[str], list[CrossCheck]]:
    """The profiled steps, the dimensions of their ranges, and the problems."""
    found: list[AlignedStep] = []
    dimensions: set[str] = set()
    wrong: list[CrossCheck] = []

    def keep(*args: Any) -> Alignment:
        aligned = align(*args)
        found.extend(aligned.steps.values())
        dimensions.update(part.dimension for part in aligned.by_row.values())
        wrong.append(cross_check(aligned))
        return aligned

    with mock.patch.object(profile_figures, "align", keep):
        monitor = new_monitor(schedule=tiny_schedule(every_n_steps=STEPS, profiled_steps=2))
        run_steps(Training(rank, wrap=JOBS[job]), monitor, STEPS)
        monitor.close()
    return found, dimensions, wrong


@pytest.mark.parametrize("job", JOBS)
def test_every_range_of_gloo_is_a_collective_and_every_collective_a_range(job: str) -> None:
    for found, dimensions, wrong in run_ranks(what_a_window_compares, 2, job):
        assert found
        for step in found:
            assert step.expected
            assert (step.without_kernel, step.surplus) == ((), {})
        assert dimensions == {"world"}
        assert wrong == [CrossCheck()]
