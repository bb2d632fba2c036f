"""Two ranks on the GPUs of this machine; on its one GPU, where there is only one.

``python3 dev.py test --simulated-gpu tests/gpu`` runs them on two simulated GPUs, but for what ``not_simulated.py``
names.
``OVERLAP_GPU_TESTS_ON=cpu pytest tests/gpu`` tries the tests themselves, on small models with Gloo: what they ask of a
GPU is then left out, and all else runs.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RanksFailedError, run_ranks
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU, Parameters

ASKED_FOR_CPU = os.environ.get("OVERLAP_GPU_TESTS_ON") == "cpu"
HAS_GPU = ON_SIMULATED_GPU or torch.cuda.is_available()
ON_CPU = ASKED_FOR_CPU or not HAS_GPU
# Products and messages of a job take some milliseconds each: the host is ahead. Nothing is made of what is sent.
_SIMULATED = Parameters(tflops=17, link_gbs=4, most_data_bytes=100_000, stall_s=30)


def take_device(rank: int) -> torch.device:
    """The device of this rank; call it before anything else that uses CUDA or communicates."""
    if ON_CPU:
        return torch.device("cpu")
    if ON_SIMULATED_GPU:
        return _take_simulated(rank)
    # Kernels whose results depend on concurrent ones would show nothing about the library.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would add a kernel to every allocation
    if torch.cuda.device_count() == 1:
        # NCCL refuses two ranks of one host on one GPU; each passes for a host of its own, and they talk by sockets.
        os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo")
        os.environ.update(NCCL_IB_DISABLE="1", NCCL_MNNVL_ENABLE="0")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _take_simulated(rank: int) -> torch.device:
    device = torch.device("cuda", rank)
    if not dist.is_initialized():
        _SIMULATED.apply()
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    return device


def synchronize() -> None:
    if not ON_CPU:
        torch.cuda.synchronize()


@functools.cache
def backend() -> str:
    """The backend over which two ranks can talk here: Gloo, through the host, where NCCL does not work.

    On the simulated GPU none: ``take_device`` joins the ranks, since NCCL reads the device's parameters.
    """
    if ON_SIMULATED_GPU and not ON_CPU:
        return ""
    if ON_CPU:
        return "gloo"
    try:
        run_ranks(_talk, 2, backend="nccl", timeout_s=120)
    except RanksFailedError as error:
        if _FORKED in str(error):
            raise  # of the tests, and not of NCCL
        _why_not.append(str(error).strip().splitlines()[-1])
        return "gloo"
    return "nccl"


_why_not: list[str] = []
_FORKED = "Cannot re-initialize CUDA in forked subprocess"


def _talk(rank: int) -> None:
    numbers = torch.full((4,), 1.0 + rank, device=take_device(rank))
    dist.all_reduce(numbers)
    assert numbers.tolist() == [3.0] * 4


def need_nccl() -> None:
    """Skip a test that has nothing to say without NCCL."""
    if not ON_CPU and backend() == "gloo":
        pytest.skip(f"NCCL does not work for two ranks on this machine: {_why_not[-1]}")
