"""A job on devices is asked from outside: ranks follow from the same step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_callbacks.report.record import read
from tests.distributed import run_ranks
from tests.gpu import jobs
from tests.monitor import test_asked as on_host
from tests.simulated_gpu.jobs import on_device
from tests.simulated_gpu.parameters import Parameters

pytestmark = [pytest.mark.alone, pytest.mark.nightly]  # it waits for a thread that looks once a second
RANKS_LOAD = on_host.RANKS_LOAD


class OnDevice:
    def __init__(self, rank: int, wrap: Any) -> None:
        self._job = jobs.MAKERS["ddp"](rank, torch.device("cuda", rank))

    def step(self) -> None:
        self._job.forward_backward()
        self._job.update()
        torch.cuda.synchronize()  # else the host is far ahead of what it is asked

    def digest(self) -> str:
        return ""  # kernels do not compute


def train(rank: int, parameters: Parameters, folder: str) -> dict[str, Any]:
    jobs.make_tiny()
    with on_device(rank, parameters) as device, device, mock.patch.object(on_host, "Training", OnDevice):
        return on_host.train(rank, folder, [["status"], ["window"], ["stop"]], every=2000, after=40)


def test_status_window_and_stop_on_the_device(tmp_path: Path) -> None:
    parameters = Parameters(stall_s=60, devices=2, rules="gemm=200", kernel_us=20, collective_us=50)
    ranks = run_ranks(train, 2, parameters, str(tmp_path), backend="", timeout_s=on_host.TIMEOUT_S)
    status, window, stop = ranks[0]["answers"]
    assert [answer["code"] for answer in ranks[0]["answers"]] == [0, 0, 0], ranks[0]["answers"]
    assert status["status"]["state"] == "windows"
    assert status["status"]["parts_ms"]
    opened = on_host.opened_at(ranks[0]["within"])
    assert ranks[0]["within"] == ranks[1]["within"]
    assert opened == [2, window["from_step"]]
    assert not any(ranks[0]["within"][stop["from_step"] :])
    record = read(tmp_path)
    assert record.runs[0].backend == "nccl"
    assert [report.first_step for report in record.windows][1:] == opened[1:]
