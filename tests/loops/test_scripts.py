"""nanoGPT's ``train.py``, from a checkout; see ``scripts``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.loops import cpu_shims
from tests.loops.harness import compare, expect_measured
from tests.loops.scripts import checkout, run_with_lines
from tests.loops.watching import NUM_STEPS

pytestmark = pytest.mark.slow

ATTACH = "monitor = attach(optimizer, **options)"
CLOSE = "monitor.close()"
NANOGPT = {
    "raw_model = model.module if ddp else model # unwrap DDP container if needed": f"\n{ATTACH}",
    "    if iter_num > max_iters:\n        break\n": f"\n{CLOSE}\n",
}
SMALL = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=4", "--dropout=0.1"]
SMALL += ["--dataset=random", "--eval_interval=1000", "--eval_iters=2", f"--max_iters={NUM_STEPS}", "--dtype=float32"]


def _nanogpt(options: dict[str, Any] | None, folder: str, arguments: list[str]) -> None:
    cpu_shims.install()
    os.chdir(folder)
    run_with_lines(Path(folder, "train.py"), [*SMALL, *arguments], NANOGPT, options)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--compile=False", "--gradient_accumulation_steps=2"], id="one micro-batch"),
        pytest.param(["--compile=False", "--gradient_accumulation_steps=4"], id="two micro-batches"),
        pytest.param(["--compile=True", "--gradient_accumulation_steps=2"], id="compiled"),
    ],
)
def test_nanogpt(tmp_path: Path, arguments: list[str]) -> None:
    shutil.copytree(checkout("nanoGPT"), tmp_path / "nanoGPT", ignore=shutil.ignore_patterns("assets", "*.ipynb"))
    data = tmp_path / "nanoGPT/data/random"
    data.mkdir()
    tokens = np.random.default_rng(0).integers(0, 64, 20_000).astype(np.uint16)
    for split in ("train", "val"):
        tokens.tofile(data / f"{split}.bin")
    window = compare(_nanogpt, tmp_path / "run", str(tmp_path / "nanoGPT"), arguments, timeout_s=280)
    expect_measured(window)
