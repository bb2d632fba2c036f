"""TRL's ``SFTTrainer`` and ``DPOTrainer``, with ``OverlapCallback`` as with any Trainer where there are options."""

from __future__ import annotations

from typing import Any

from tests.integrations.huggingface_jobs import gpt2
from tests.loops.watching import NUM_STEPS


def tokenizer() -> Any:
    """Words ``w0`` to ``w60``, made here: nothing is downloaded."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<eos>", "<pad>", "<unk>", *[f"w{i}" for i in range(61)]])}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def _settings(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
        "max_length": 12,
    }


def _callbacks(options: dict[str, Any] | None) -> list[Any]:
    if options is None:
        return []
    from overlap_callbacks.integrations.transformers import OverlapCallback

    return [OverlapCallback(**options)]


def sft(options: dict[str, Any] | None, folder: str) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(f"w{(7 * i + j * j) % 61}" for j in range(10)) for i in range(200)]
    SFTTrainer(
        model=gpt2(),
        args=SFTConfig(**_settings(folder)),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        callbacks=_callbacks(options),
    ).train()


def dpo(options: dict[str, Any] | None, folder: str) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": f"w{i % 61}", "chosen": f" w{(i + 1) % 61} w1", "rejected": f" w{(3 * i) % 61}"} for i in range(200)
    ]
    DPOTrainer(
        model=gpt2(),
        ref_model=gpt2(),
        args=DPOConfig(**_settings(folder)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=_callbacks(options),
    ).train()
