"""The Hugging Face Trainer and a model with random weights. Only the callback is added for the library.

torchrun --nproc-per-node 2 examples/huggingface_trainer.py

With enough GPUs, one of the study's sizes, sharded: accelerate launch --use_fsdp --fsdp_version 2
--fsdp_transformer_layer_cls_to_wrap GPT2Block (LlamaDecoderLayer) examples/huggingface_trainer.py --model gpt3-1.3b
"""

import logging
import os

import torch
from models import MODELS, Size, parse_arguments
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Trainer, TrainingArguments

from overlap_callbacks.integrations.transformers import OverlapCallback

logging.basicConfig(format="%(message)s")
logging.getLogger("overlap_callbacks").setLevel(logging.INFO)  # shows one line per window


def config_of(size: Size) -> PretrainedConfig:
    """The configuration of Transformers for this size."""
    common = {"vocab_size": size.vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    if not size.llama_ffn:
        return GPT2Config(
            **common, n_positions=size.sequence, n_embd=size.width, n_layer=size.layers, n_head=size.heads
        )
    return LlamaConfig(
        **common,
        max_position_embeddings=size.sequence,
        hidden_size=size.width,
        intermediate_size=size.llama_ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
    )


def main() -> None:
    """Train on random tokens."""
    args = parse_arguments()
    size = MODELS[args.model]
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not on_gpu:
        torch.set_num_threads(1)
    tokens = torch.randint(size.vocabulary, (512, size.sequence))
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config_of(size)),
        args=TrainingArguments(
            output_dir="trainer_output",
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            ddp_find_unused_parameters=False,
            ddp_bucket_cap_mb=1 if args.model == "tiny" else None,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[OverlapCallback(every_n_steps=100, max_overhead=None)],
    )
    trainer.train()
    # Gloo's threads may abort a process that exits while they still release its last collective.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
