"""The job of docs/tutorial.md: DDP reduces gradients in each of four micro-batches, once a step, or both, to compare.

torchrun --nproc-per-node 2 examples/micro_batches.py
torchrun --nproc-per-node 2 examples/micro_batches.py --defer
torchrun --nproc-per-node 2 examples/micro_batches.py --compare
torchrun --nproc-per-node 2 examples/micro_batches.py --decide --steps 1200
"""

import argparse
import contextlib
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import arms
from overlap_callbacks.integrations.pytorch import attach

logging.basicConfig(level=logging.INFO, format="%(message)s")  # shows one line per window


def main() -> None:
    """Train an MLP on random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--defer", action="store_true", help="reduce gradients with the last micro-batch only")
    parser.add_argument("--compare", action="store_true", help="try that in some steps of the live job")
    parser.add_argument("--decide", action="store_true", help="let the live job find its best setting")
    parser.add_argument("--steps", type=int, default=298, help="enough for four windows")
    parser.add_argument("--run-dir", help="folder of the record")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    mlp = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)])
    model = DistributedDataParallel(mlp, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    switch = {"defer": args.defer}
    # Gradients are added up in another order, so last bits differ; so they may with other threads.
    on, off = (lambda: switch.update(defer=True)), (lambda: switch.update(defer=False))
    defer = arms.Arm("defer", on, off, equal_results=False)
    two, one = (lambda: torch.set_num_threads(2)), (lambda: torch.set_num_threads(1))
    two_threads = arms.Arm("two_threads", two, one, equal_results=False)
    compared = [arms.Sequential(), defer] if args.compare else [arms.Sequential()]
    options = {"arms": [defer, two_threads], "decide": arms.Keep(budget=0.5)} if args.decide else {"arms": compared}
    with attach(optimizer, model=model, every_n_steps=70, max_overhead=None, run_dir=args.run_dir, **options):
        for _ in range(args.steps):
            for micro_batch in range(4):
                wait = switch["defer"] and micro_batch < 3
                with model.no_sync() if wait else contextlib.nullcontext():
                    model(torch.randn(64, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
