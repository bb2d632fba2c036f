"""A training loop of one's own with DDP; the lines with `overlap` are all that the library needs.

torchrun --nproc-per-node 2 examples/pytorch_ddp.py
"""

import logging

import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks.integrations.pytorch import attach

logging.basicConfig(level=logging.INFO, format="%(message)s")  # shows a line for each window


def main() -> None:
    """Train a small network on random data."""
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 1
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())

    with attach(optimizer, every_n_steps=100, max_overhead=None) as overlap:
        for step in range(200):
            loss = model(torch.randn(128, 512, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0:
                with overlap.pause(), torch.no_grad():  # an evaluation is no part of a step
                    model(torch.randn(16, 512, device=device))

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
