"""The job of docs/tutorial.md: DDP reduces gradients in each of four micro-batches, once a step, or both, to compare.

torchrun --nproc-per-node 2 examples/micro_batches.py
torchrun --nproc-per-node 2 examples/micro_batches.py --defer
torchrun --nproc-per-node 2 examples/micro_batches.py --compare
torchrun --nproc-per-node 2 examples/micro_batches.py --defer --recompute --decide --steps 1500
"""

import argparse
import contextlib
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from overlap_callbacks import arms
from overlap_callbacks.integrations.pytorch import attach

logging.basicConfig(level=logging.INFO, format="%(message)s")  # shows one line per window

switch = {"defer": False, "recompute": False}


class Layer(nn.Sequential):
    """Keeps its activations for the backward pass, or computes them again there, which saves memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run its modules."""
        if switch["recompute"]:
            return checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x)


def set_switch(**settings: bool) -> Callable[[], None]:
    """Make a function that turns the switch."""
    return lambda: switch.update(settings)


def main() -> None:
    """Train an MLP on random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--defer", action="store_true", help="reduce gradients with the last micro-batch only")
    parser.add_argument("--recompute", action="store_true", help="recompute activations, to save memory")
    parser.add_argument("--compare", action="store_true", help="try that in some steps of the live job")
    parser.add_argument("--decide", action="store_true", help="let the live job find its best setting")
    parser.add_argument("--steps", type=int, default=298, help="enough for four windows")
    parser.add_argument("--run-dir", help="folder of the record")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    mlp = nn.Sequential(*[Layer(nn.Linear(512, 512), nn.GELU()) for _ in range(6)])
    model = DistributedDataParallel(mlp, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    switch.update(defer=args.defer, recompute=args.recompute)
    options = {"arms": [arms.Sequential()]}
    # Gradients are added up in another order, so last bits differ.
    defer = arms.Arm("defer", set_switch(defer=True), set_switch(defer=args.defer), equal_results=False)
    if args.compare:
        options = {"arms": [arms.Sequential(), defer]}
    # The same activations, so the same results.
    keep = arms.Arm(
        "keep_activations", set_switch(recompute=False), set_switch(recompute=args.recompute), equal_results=True
    )
    if args.decide:
        options = {"arms": [arms.Sequential(), keep], "decide": arms.Keep(budget=0.5)}
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
