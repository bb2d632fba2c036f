"""The ImageNet script of pytorch/examples, from a checkout (see ``scripts``), with ``attach`` after its optimizer.

It asks for GPUs: see ``cpu_shims``. Each rank runs in a folder of its own, as on two machines with one device each.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loops import cpu_shims
from tests.loops.harness import compare, expect_measured
from tests.loops.scripts import checkout, run_with_lines
from tests.loops.watching import NUM_STEPS

pytestmark = pytest.mark.slow

CLOSE = "    monitor.close()\n"


def _enter(source: str, scratch: str, accelerator: str) -> Path:
    """Go to a new copy of the script's folder: scripts write beside themselves, and resume from what they find."""
    cpu_shims.install()
    cpu_shims.install_accelerator(accelerator)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    folder = Path(tempfile.mkdtemp(dir=scratch), "script")
    shutil.copytree(source, folder)
    os.chdir(folder)
    return folder


def _source(name: str) -> str:
    return str(checkout("examples") / name)


IMAGENET = {
    "                                weight_decay=args.weight_decay)\n": "    monitor = attach(optimizer, **options)\n",
    "            }, is_best)\n": CLOSE,
}


def _imagenet(options: dict[str, Any] | None, source: str, scratch: str, arguments: list[str]) -> None:
    script = _enter(source, scratch, "cuda") / "main.py"
    cpu_shims.define_vision_operators()
    run_with_lines(script, arguments, IMAGENET, options)


def test_imagenet(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    from PIL import Image

    source = _source("imagenet")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 2 * NUM_STEPS), ("val", 2)):
        for i in range(2 * count):
            folder = tmp_path / "data" / split / str(i % 2)
            folder.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    arguments = [str(tmp_path / "data"), "-a", "resnet18", "-b", "2", "-j", "0", "--epochs", "1", "--seed", "1"]
    arguments += ["--lr", "0.01", "--dist-url", "env://", "--dist-backend", "gloo"]
    expect_measured(compare(_imagenet, tmp_path / "run", source, str(tmp_path), arguments, timeout_s=280))
