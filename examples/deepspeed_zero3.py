"""DeepSpeed with ZeRO-3. Only the line with `attach` is added for the library.

torchrun --nproc-per-node 2 examples/deepspeed_zero3.py
torchrun --nproc-per-node 8 examples/deepspeed_zero3.py --model gpt3-13b --batch 1

If there are fewer GPUs than processes, set ``DS_ACCELERATOR=cpu``.
"""

import logging

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from models import LanguageModel, parse_arguments

from overlap_callbacks.integrations.deepspeed import attach

logging.basicConfig(level=logging.WARNING, format="%(message)s")
logging.getLogger("overlap_callbacks").setLevel(logging.INFO)  # shows one line per window

ON_GPU = get_accelerator().device_name() == "cuda"


def main() -> None:
    """Train on random tokens."""
    args = parse_arguments()
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "bf16": {"enabled": ON_GPU},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 500_000 if args.model == "tiny" else 100_000_000,
            "stage3_param_persistence_threshold": 1_000 if args.model == "tiny" else 100_000,
        },
    }
    if not ON_GPU:
        torch.set_num_threads(1)
    with deepspeed.zero.Init(config_dict_or_path=config):  # no rank ever holds the whole model
        model = LanguageModel(args.model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(dist.get_rank())

    with attach(engine, every_n_steps=100, max_overhead=None):
        for _ in range(args.steps * engine.gradient_accumulation_steps()):
            tokens = torch.randint(model.size.vocabulary, (args.batch, model.size.sequence), device=engine.device)
            engine.backward(engine(tokens))
            engine.step()

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
