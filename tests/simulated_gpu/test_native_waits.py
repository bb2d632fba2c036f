"""Each wait of the frameworks' own forms is needed, and so are the streams that adapters name as computing.

The waits are found in the source of ``integrations``, and left out one at a time. Then a sequential step overlaps by
the device's log, or its numbers are wrong.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import Mode
from overlap_callbacks.gate.switches import OverlapSwitch
from overlap_callbacks.integrations import _pytorch_ddp, _pytorch_fsdp
from tests.distributed import run_ranks
from tests.simulated_gpu import jobs, left_out
from tests.simulated_gpu.left_out import ByJob, Ran, Shown, Wait, host_ahead, waits_of
from tests.simulated_gpu.parameters import Parameters

INTEGRATIONS = Path(_pytorch_ddp.__file__).parent
# Of the host, for the job's store.
NO_STREAMS = {"_refuse"}
WIDTH = 32


# -- jobs


def _nothing() -> list[Tensor]:
    return []


@dataclass(frozen=True)
class Job:
    """What is done around a switch; each part returns numbers.

    Attributes:
        switch: that makes steps sequential.
        before: it is turned.
        within: while it is.
        after: it is turned back.
        trains: ``within`` is a step that overlaps otherwise.
    """

    switch: OverlapSwitch
    before: Callable[[], list[Tensor]] = _nothing
    within: Callable[[], list[Tensor]] = _nothing
    after: Callable[[], list[Tensor]] = _nothing
    trains: bool = False


def _ddp(device: torch.device, *, hook: bool = False, side: bool = False, beside: bool = False) -> Job:
    """DDP with a bucket for each layer: with a hook of the user's, made on a stream of its own, or beside compute."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).to(device)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(net, bucket_cap_mb=0.003)
    if hook:
        model.register_comm_hook(None, _pytorch_ddp.switchable(allreduce_hook))
    batch, numbers = torch.ones(8, WIDTH, device=device), torch.ones(64, device=device)

    def compute() -> None:
        for _ in range(24):
            numbers.mul_(1)

    def train_beside() -> list[Tensor]:
        compute()
        with torch.cuda.stream(stream):
            gradients = step()
        compute()
        torch.cuda.current_stream().wait_stream(stream)
        return gradients

    def step() -> list[Tensor]:
        model.zero_grad()
        model(batch).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for _ in range(12):  # until DDP asks no more for its times
        step()
    return Job(_pytorch_ddp.DdpBucketWait([model]), within=train_beside if beside else step, trains=True)


def _left_on(first: torch.cuda.Stream, second: torch.cuda.Stream, device: torch.device) -> tuple[Any, Any]:
    """Functions that leave something to do on the first stream, and that read it on the second."""
    numbers = torch.full((64,), 3.0, device=device)
    torch.cuda.synchronize()

    def write() -> list[Tensor]:
        with torch.cuda.stream(first):
            for _ in range(8):
                numbers.add_(1)
        return []

    def read() -> list[Tensor]:
        with torch.cuda.stream(second):
            return [numbers * 2]

    return write, read


def _left_by_fsdp(device: torch.device) -> Job:
    switch, own = _fsdp(device)
    before, within = _left_on(own, torch.cuda.current_stream(), device)
    return Job(switch, before=before, within=within)


def _left_for_fsdp(device: torch.device) -> Job:
    switch, own = _fsdp(device)
    within, after = _left_on(torch.cuda.current_stream(), own, device)
    return Job(switch, within=within, after=after)


def _fsdp(device: torch.device) -> tuple[OverlapSwitch, torch.cuda.Stream]:
    model = fully_shard(nn.Linear(WIDTH, WIDTH, device=device))
    model(torch.ones(2, WIDTH, device=device)).sum().backward()  # FSDP makes its streams
    return _pytorch_fsdp.FsdpStreams([model]), model._get_fsdp_state()._comm_ctx.all_gather_stream


def _deepspeed_switches() -> Any:
    # It uses the device when it is loaded, which must know its parameters by then.
    return importlib.import_module("overlap_callbacks.integrations._deepspeed_switches")


def _left_by_deepspeed(device: torch.device) -> Job:
    own, compute = torch.cuda.Stream(), torch.cuda.current_stream()
    before, within = _left_on(own, compute, device)
    switch = _deepspeed_switches().Switches("", (SimpleNamespace(stream=own), "stream", compute))
    return Job(switch, before=before, within=within)


JOBS: dict[str, Callable[[torch.device], Job]] = {
    "DDP": _ddp,
    "DDP with a hook": functools.partial(_ddp, hook=True),
    "DDP on a stream of its own": functools.partial(_ddp, side=True),
    "DDP beside compute": functools.partial(_ddp, side=True, beside=True),
    "left by FSDP": _left_by_fsdp,
    "left for FSDP": _left_for_fsdp,
    "left by DeepSpeed": _left_by_deepspeed,
}


def _without(wait: Wait) -> contextlib.AbstractContextManager[None]:
    return wait.left_out(_pytorch_ddp, _pytorch_fsdp, _deepspeed_switches())


LEFT_OUT: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    **{wait.name: functools.partial(_without, wait) for wait in waits_of(INTEGRATIONS) if wait.where not in NO_STREAMS},
}
# The jobs whose sequential steps then overlap, and those that get wrong numbers.
OVERLAPS: dict[str, set[str]] = {
    "WaitingGroup.allreduce": {"DDP", "DDP on a stream of its own", "DDP beside compute"},
    "switchable": {"DDP with a hook"},
    "_between_compute": {"DDP beside compute"},
    "_between_compute 1": {"DDP on a stream of its own", "DDP beside compute"},
}
WRONG: dict[str, set[str]] = {
    "FsdpStreams.disable": {"left by FSDP"},
    "FsdpStreams.restore": {"left for FSDP"},
    "Switches._settle": {"left by DeepSpeed"},
}


# -- on the ranks


def _run(make: Callable[[torch.device], Job], device: torch.device) -> Ran:
    job = make(device)
    begun, found = [], []
    for turned in (False, True):
        torch.cuda.synchronize()
        # DeepSpeed waits for the device.
        with host_ahead() if job.trains else contextlib.nullcontext():
            begun.append(time.monotonic_ns())
            found = job.before()
            if turned:
                job.switch.disable()
            found += job.within()
            if turned:
                job.switch.restore()
            found += job.after()
        torch.cuda.synchronize()
    return Ran((*begun, time.monotonic_ns()), [tensor.flatten().tolist() for tensor in found])


def _run_all(rank: int, parameters: Parameters) -> tuple[int, ByJob]:
    found: ByJob = {}
    with jobs.on_device(rank, parameters) as device:
        for name, leave_out in LEFT_OUT.items():
            with leave_out():
                found[name] = {job: _run(make, device) for job, make in JOBS.items()}
    return os.getpid(), found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Shown]]:
    found = left_out.run(_run_all, tmp_path_factory.mktemp("waits"))
    for of_name in found.values():
        # There is something to serialise.
        assert min(one.overlapped_ms for job, one in of_name.items() if job.startswith("DDP")) > 0
    return found


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_wait_that_is_left_out_shows_as_overlap_or_in_the_numbers(
    ran: dict[str, dict[str, Shown]], name: str
) -> None:
    assert left_out.overlapping(ran[name]) == OVERLAPS.get(name, set())
    assert left_out.wrong(ran[name], ran["nothing"]) == WRONG.get(name, set())


def test_every_wait_of_the_integrations_is_left_out_once() -> None:
    known = {*OVERLAPS, *WRONG, *NO_STREAMS}
    assert {wait.name for wait in waits_of(INTEGRATIONS)} == known


# -- the streams that adapters name


def _without_names(*arguments: Any) -> jobs.Trained:
    with mock.patch.object(_pytorch_fsdp.CopyStreams, "__iter__", return_value=iter(())):
        return jobs._train(*arguments)


# Where it is named, test_truth.py has the same of a job with FSDP2.
@pytest.mark.parametrize("named", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_fsdps_copies_overlap_where_the_adapter_does_not_name_their_stream(named: bool, tmp_path: Path) -> None:
    told = Parameters(log=tmp_path / "log", stall_s=30, **jobs.TIMES, kernel_us=300)
    arguments = told, "fsdp2", str(tmp_path / "run"), {}
    trained = run_ranks(jobs._train if named else _without_names, 2, *arguments, backend="", timeout_s=300)
    hidden = [
        step.hidden_ms
        for one in trained
        for step, mode in zip(one.steps(tmp_path / "log"), one.modes, strict=True)
        if mode is Mode.SEQUENTIAL
    ]
    assert hidden
    assert any(hidden) is not named
