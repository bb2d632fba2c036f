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
    inside: dict[Mode, list[float]] = {mode: [] for mode in Mode}
    around: dict[Mode, list[float]] = {mode: [] for mode in Mode}
    monitor = new_monitor(sink, schedule=tiny_schedule(every_n_steps=9, profiled_steps=2))

    @torch.library.custom_op("overlap_callbacks_tests::heavy", mutates_args=())
    def heavy(x: torch.Tensor) -> torch.Tensor:
        # As long as if it lost a third of the machine to the communication beside it.
        start = time.perf_counter()
        while time.perf_counter() < start + (_ALONE_S if monitor.mode is Mode.SEQUENTIAL else _BESIDE_S):
            pass
        inside[monitor.mode].append(1000 * (time.perf_counter() - start))
        return x + 1

    gradients, data = torch.ones(1000), torch.ones(1000)
    for _ in range(2 + 9):
        with monitor.step():
            work = dist.all_reduce(gradients, async_op=True)
            start = time.perf_counter()
            heavy(data)
            around[monitor.mode].append(1000 * (time.perf_counter() - start))
            work.wait()
    monitor.close()
    found: dict[str, Any] = {"inside": inside, "around": around}
    if rank:
        return found
    (report,) = sink.reports
    figures = {name: estimate.value for name, estimate in report.figures().items()}
    return {"valid": report.valid, "problems": report.problems, **found, **figures}


@pytest.mark.slow
def test_its_time_in_each_mode_is_that_of_the_operator():
    ranks = run_ranks(train_with_custom_operator, 2)
    report = ranks[0]
    assert report["valid"]
    # Profiled steps are some of the steps: on a busy machine each takes another time.
    for name, mode in (("compute_ms", Mode.OVERLAPPED), ("compute_isolated_ms", Mode.SEQUENTIAL)):
        least, most = ([pick(own[of][mode]) for own in ranks] for pick, of in ((min, "inside"), (max, "around")))
        assert sum(least) / 2 <= report[name] <= sum(most) / 2
    ratio = report["compute_ms"] / report["compute_isolated_ms"]
    assert report["compute_slowdown"] == pytest.approx(ratio - 1)
    assert not any("no torch operator" in problem for problem in report["problems"])
