"""Accelerate's own examples, from a checkout (see ``scripts``), with ``attach_accelerate`` after ``prepare``.

What they download is made here: a small BERT, a tokenizer and pairs of sentences, in folders with the names that the
examples ask for. The metric of the evaluations is ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.integrations import accelerate_shims
from tests.loops import cpu_shims
from tests.loops.harness import compare, expect_measured
from tests.loops.scripts import checkout, run_with_lines
from tests.loops.trl_loops import tokenizer
from tests.loops.watching import NUM_STEPS

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed"),
    pytest.mark.slow,
]

LINES = {
    "        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler\n    )\n": (
        "    monitor = attach_accelerate(optimizer, **options)\n"
    ),
    '        accelerator.print(f"epoch {epoch}:", eval_metric)\n': "    monitor.close()\n",
}
EXAMPLES = {
    "nlp_example": ("nlp_example.py", ["--cpu"], 1),
    "gradient_accumulation": (
        "by_feature/gradient_accumulation.py",
        ["--cpu", "--gradient_accumulation_steps", "2"],
        2,
    ),
    "communication_hook": ("by_feature/ddp_comm_hook.py", ["--cpu", "--ddp_comm_hook", "fp16"], 1),
}


class Metric:
    """The share of right predictions."""

    def __init__(self) -> None:
        self._right: list[torch.Tensor] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self._right.append((predictions == references).float())

    def compute(self) -> dict[str, float]:
        right, self._right = torch.cat(self._right), []
        return {"accuracy": right.mean().item()}


def _make_downloads(folder: Path, num_pairs: int) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=64, max_position_embeddings=32, pad_token_id=1, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder / "bert-base-cased")
    tokenizer().save_pretrained(folder / "bert-base-cased")
    data = folder / "nyu-mll/glue"
    data.mkdir(parents=True)
    splits = {"train": num_pairs, "validation": 64}
    for split, count in splits.items():
        rows = [
            {"idx": i, "sentence1": f"w{i % 61} w{i * i % 61}", "sentence2": f"w{7 * i % 61}", "label": i % 2}
            for i in range(count)
        ]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")


def _example(options: dict[str, Any] | None, script: str, folder: str, arguments: list[str]) -> None:
    os.environ["HF_HOME"] = str(Path(folder, "cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(folder)
    cpu_shims.keep_groups()
    evaluate = sys.modules["evaluate"] = ModuleType("evaluate")
    evaluate.load = lambda *_: Metric()  # type: ignore[attr-defined]
    run_with_lines(Path(script), arguments, LINES, options)


def _sharded(options: dict[str, Any] | None, script: str, folder: str) -> None:
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"}
    accelerate_shims.install()
    _example(options, script, folder, [])


def test_fsdp2(tmp_path: Path) -> None:
    _make_downloads(tmp_path, num_pairs=2 * 16 * NUM_STEPS)
    path = checkout("accelerate") / "examples/nlp_example.py"
    expect_measured(compare(_sharded, tmp_path / "run", str(path), str(tmp_path), timeout_s=250))


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples(example: str, tmp_path: Path) -> None:
    script, arguments, accumulate = EXAMPLES[example]
    _make_downloads(tmp_path, num_pairs=2 * 16 * NUM_STEPS * accumulate)
    path = checkout("accelerate") / "examples" / script
    expect_measured(compare(_example, tmp_path / "run", str(path), str(tmp_path), ["--cpu", *arguments], timeout_s=250))
