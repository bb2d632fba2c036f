"""Steps on the simulated GPU: two ranks on two devices stand where a single GPU has the loopback link.

Every rank runs the whole step. Rank 0's figures count.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated_gpu.parameters import ON_SIMULATED_GPU, Parameters
from tests.simulated_gpu.truth import DeviceLog

__all__ = ["ON_SIMULATED_GPU", "device", "known_ms", "rank_device", "shared"]

# With the jobs' layers of 64 MiB, products and messages take some milliseconds, as on the link. Large messages move
# nothing: a step that looks at what is sent says so.
PARAMETERS: dict[str, Any] = {"tflops": 60, "link_gbs": 20, "compute_slowdown": 1.3, "most_data_bytes": 100_000}
_HOST = "127.0.0.1"


@contextlib.contextmanager
def device(log: Path, num_ranks: int) -> Iterator[None]:
    """Prepare this process for the simulated GPU, and start the same command as rank 1 if there are two ranks.

    Args:
        log: begins the names of the device's logs.
        num_ranks: 1 or 2.
    """
    Parameters(log=log, folder=log.with_name("meeting"), stall_s=60, **PARAMETERS).apply()
    if num_ranks == 1 or "RANK" in os.environ:
        yield
        return
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR=_HOST, MASTER_PORT=str(store.port))
    os.environ.update(LOCAL_RANK="0", TORCHELASTIC_USE_AGENT_STORE="True")
    second = subprocess.Popen(
        [sys.executable, "-m", "gpu_steps.child", *sys.argv[1:]],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"},
    )
    threading.Thread(target=_end_with, args=[second], daemon=True).start()
    yield
    second.wait()


def _end_with(second: subprocess.Popen[bytes]) -> None:
    """End this rank when the other one fails: it would wait for it in a collective."""
    if second.wait():
        os._exit(1)


def rank_device() -> torch.device:
    """This rank's device; joins the ranks the first time."""
    rank = int(os.environ["RANK"])
    if not dist.is_initialized():
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
    return torch.device("cuda", rank)


def shared(found: Any) -> Any:
    """What rank 0 has found, on all ranks; they go on alike. Without several ranks ``found`` itself."""
    if "RANK" not in os.environ or not ON_SIMULATED_GPU:
        return found
    store, key = dist.distributed_c10d._get_default_store(), f"shared/{next(_numbers)}"
    if os.environ["RANK"] == "0":
        store.set(key, pickle.dumps(found))
    return pickle.loads(store.get(key))


_numbers = iter(range(1_000_000))


def known_ms(begun_ns: int) -> float:
    """How long the collectives take alone that were enqueued since this moment of ``time.monotonic_ns``."""
    torch.cuda.synchronize()  # then the log is whole
    tasks = DeviceLog.read(Path(os.environ["SIMGPU_LOG"]), os.getpid()).tasks
    return sum(t.alone_ns for t in tasks if t.task_class == "communication" and t.enqueued >= begun_ns) / 1e6
