"""Your own training loop with FSDP2 (``fully_shard``). Only the line with `attach` is added for the library.

torchrun --nproc-per-node 2 examples/fsdp2.py
torchrun --nproc-per-node 8 examples/fsdp2.py --model gpt3-13b --batch 1
"""

import logging

import torch
import torch.distributed as dist
from models import LanguageModel, parse_arguments
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from overlap_callbacks.integrations.pytorch import attach

logging.basicConfig(level=logging.INFO, format="%(message)s")  # shows one line per window


def main() -> None:
    """Train on random tokens."""
    args = parse_arguments()
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 1
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if on_gpu else None)
    with torch.device("meta"):  # no rank ever holds the whole model
        model = LanguageModel(args.model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device=device)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    with attach(optimizer, every_n_steps=100, max_overhead=None):
        for _ in range(args.steps):
            tokens = torch.randint(model.size.vocabulary, (args.batch, model.size.sequence), device=device)
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
