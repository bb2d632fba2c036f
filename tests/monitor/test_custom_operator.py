"""A CPU job in which an operator of the user's does nearly all of the compute."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import Mode
from tests.distributed import run_ranks
from tests.monitor.jobs import KeptReports, new_monitor, tiny_schedule

_ALONE_S, _BESIDE_S = 0.02, 0.03


def train_with_custom_operator(rank: int) -> dict[str, Any]:
    sink = KeptReports()
    monitor = new_monitor(sink, schedule=tiny_schedule(every_n_steps=9, profiled_steps=2))

    @torch.library.custom_op("overlap_callbacks_tests::heavy", mutates_args=())
    def heavy(x: torch.Tensor) -> torch.Tensor:
        # As long as if it lost a third of the machine to the communication beside it.
        end = time.perf_counter() + (_ALONE_S if monitor.mode is Mode.SEQUENTIAL else _BESIDE_S)
        while time.perf_counter() < end:
            pass
        return x + 1

    gradients, data = torch.ones(1000), torch.ones(1000)
    for _ in range(2 + 9):
        with monitor.step():
            work = dist.all_reduce(gradients, async_op=True)
            heavy(data)
            work.wait()
    monitor.close()
    if rank:
        return {}
    (report,) = sink.reports
    figures = {name: estimate.value for name, estimate in report.figures().items()}
    return {"valid": report.valid, "problems": report.problems, **figures}


@pytest.mark.slow
def test_its_slowdown_is_that_of_the_operator():
    report = run_ranks(train_with_custom_operator, 2)[0]
    assert report["valid"]
    assert report["compute_isolated_ms"] >= 1000 * _ALONE_S
    assert report["compute_ms"] >= 1000 * _BESIDE_S
    assert 0.2 < report["compute_slowdown"] < 0.8
    assert not any("no torch operator" in problem for problem in report["problems"])
