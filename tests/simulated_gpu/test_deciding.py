"""FSDP2 over NCCL, with streams, in a job that decides: an arm is kept turned on, and numbers stay what they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_callbacks import arms
from overlap_callbacks.report.record import read
from tests.distributed import run_ranks
from tests.gpu import jobs
from tests.integrations.test_deciding import KEPT_STEPS, Sharded, train_and_decide
from tests.simulated_gpu.jobs import on_device
from tests.simulated_gpu.parameters import Parameters

pytestmark = [pytest.mark.alone, pytest.mark.nightly]  # hundreds of steps whose kernels the host computes


class OnDevice(Sharded):
    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.job = jobs.MAKERS["fsdp2"](rank, torch.device("cuda", rank))
        self.model = self.job.model
        self.training: Any = SimpleNamespace(step=self._step, digest=self.job.digest)

    def _step(self) -> None:
        self.job.forward_backward()
        self.job.update()
        self.job.losses[-1].item()  # as jobs that log do; so ranks are at most a step apart

    def attach(self, **options: Any) -> Any:
        return self.job.attach(**options)


def decide_on_device(rank: int, parameters: Parameters, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    jobs.make_tiny()
    with on_device(rank, parameters):
        compared = [arms.Prefetch(1, 0), arms.Prefetch(2, 2)]
        found = train_and_decide(rank, OnDevice, compared, folder, "prefetch_1_0", "prefetch_2_2")
        plain = OnDevice(rank)
        for _ in range(1 + len(found["turned"])):
            plain.training.step()
        return {**found, "plain": plain.training.digest()}


def test_an_arm_of_fsdp2_is_kept_on_the_device_and_numbers_stay_the_same(tmp_path: Path) -> None:
    parameters = Parameters(stall_s=60, devices=2, computes=True, kernel_us=20, collective_us=50)
    ranks = run_ranks(decide_on_device, 2, parameters, str(tmp_path), backend="", timeout_s=580)
    decision = read(tmp_path).decision
    assert decision is not None
    assert decision.kept == "prefetch_1_0"
    assert decision.advised is not None
    assert decision.advised.arm == "prefetch_2_2"  # the same collectives in another order
    for rank in ranks:
        kept = [on for on, of_window in zip(rank["turned"], rank["within"], strict=True) if on and not of_window]
        assert len(kept) > KEPT_STEPS
        assert rank["same"]
        assert rank["digest"] == rank["plain"]
    assert ranks[0]["turned"] == ranks[1]["turned"]
