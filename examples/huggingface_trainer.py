"""The Hugging Face Trainer on a language model with random weights; the callback is all that the library needs.

torchrun --nproc-per-node 2 examples/huggingface_trainer.py

Or, with the GPUs for it, one of the study's sizes, sharded: accelerate launch --use_fsdp
--fsdp_transformer_layer_cls_to_wrap GPT2Block (LlamaDecoderLayer) examples/huggingface_trainer.py gpt3-1.3b
"""

import logging
import os
import sys

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Trainer, TrainingArguments

from overlap_callbacks.integrations.transformers import OverlapCallback

logging.basicConfig(format="%(message)s")
logging.getLogger("overlap_callbacks").setLevel(logging.INFO)  # shows a line for each window

MODELS = {
    "small": GPT2Config(
        vocab_size=1024, n_positions=64, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    ),
    "gpt3-1.3b": GPT2Config(n_positions=2048, n_embd=2048, n_layer=24, n_head=16),
    "gpt3-2.7b": GPT2Config(n_positions=2048, n_embd=2560, n_layer=32, n_head=32),
    "gpt3-6.7b": GPT2Config(n_positions=2048, n_embd=4096, n_layer=32, n_head=32),
    "gpt3-13b": GPT2Config(n_positions=2048, n_embd=5120, n_layer=40, n_head=40),
    "llama2-13b": LlamaConfig(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40),
}


def main(name: str = "small") -> None:
    """Train on random tokens."""
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not on_gpu:
        torch.set_num_threads(1)
    config = MODELS[name]
    tokens = torch.randint(config.vocab_size, (512, min(config.max_position_embeddings, 2048)))
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=TrainingArguments(
            output_dir="trainer_output",
            max_steps=200,
            per_device_train_batch_size=4,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            ddp_find_unused_parameters=False,
            ddp_bucket_cap_mb=1 if name == "small" else None,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[OverlapCallback(every_n_steps=100, max_overhead=None)],
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
