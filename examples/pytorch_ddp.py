"""Your own training loop with DDP. Only the lines with `overlap` are added for the library.

torchrun --nproc-per-node 2 examples/pytorch_ddp.py
torchrun --nproc-per-node 8 examples/pytorch_ddp.py --model gpt3-1.3b

Every GPU holds the whole model, its gradients and the optimizer's two moments: at least 16 bytes per weight.
"""

import logging

import torch
import torch.distributed as dist
from models import LanguageModel, parse_arguments
from torch.nn.parallel import DistributedDataParallel

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
    model = LanguageModel(args.model).to(device)
    size = model.size
    model = DistributedDataParallel(model, bucket_cap_mb=1 if args.model == "tiny" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss_of(samples: int) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            return model(torch.randint(size.vocabulary, (samples, size.sequence), device=device))

    with attach(optimizer, every_n_steps=100, max_overhead=None) as overlap:
        for step in range(args.steps):
            loss_of(args.batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0:
                with overlap.pause(), torch.no_grad():  # an evaluation is not part of a step
                    loss_of(1)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
