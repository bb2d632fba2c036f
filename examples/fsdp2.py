"""A training loop of one's own with FSDP2 (``fully_shard``); the line with `attach` is all that the library needs.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6))).to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    with attach(optimizer, every_n_steps=100, max_overhead=None):
        for _ in range(200):
            loss = model(torch.randn(128, 512, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
