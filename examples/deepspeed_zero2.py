"""DeepSpeed with ZeRO-2; the line with `attach` is all that the library needs.

torchrun --nproc-per-node 2 examples/deepspeed_zero2.py

With fewer GPUs than processes, put ``DS_ACCELERATOR=cpu`` before it.
"""

import logging

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from overlap_callbacks.integrations.deepspeed import attach

logging.basicConfig(level=logging.WARNING, format="%(message)s")
logging.getLogger("overlap_callbacks").setLevel(logging.INFO)  # shows a line for each window

ON_GPU = get_accelerator().device_name() == "cuda"
CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "bf16": {"enabled": ON_GPU},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500_000},
}


def main() -> None:
    """Train a small network on random data."""
    if not ON_GPU:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    dtype = torch.bfloat16 if ON_GPU else torch.float32

    with attach(engine, every_n_steps=100, max_overhead=None):
        for _ in range(200 * engine.gradient_accumulation_steps()):
            loss = engine(torch.randn(64, 512, device=engine.device, dtype=dtype)).square().mean()
            engine.backward(loss)
            engine.step()

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
