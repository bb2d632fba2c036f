"""A real job of two ranks over Gloo with the library attached: one process that forks the second rank."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time

import torch
import torch._dynamo  # DDP and optimizers load it: here once for both ranks
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.analysis import outliers
from overlap_callbacks.integrations.pytorch import attach

# Steps are so short that on a busy machine many are far longer than the others: all count, as in tests/distributed.py.
outliers._MIN_SHARE = math.inf


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nap-ms", default="0")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.nap_ms == "too-much":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    store = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it must outlive both ranks
    rank = 1 if os.fork() == 0 else 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store.name, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    nap_s = float(arguments.nap_ms) / 1e3 + float(os.environ.get("NAP_S", "0"))
    options = {"spread": False, "every_n_steps": arguments.every, "first_step": 2, "max_overhead": None}
    with attach(optimizer, run_dir="not-here", repeats=arguments.repeats, **options):
        for _ in range(arguments.steps):
            model(torch.ones(4, 64)).sum().backward()
            time.sleep(nap_s)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
