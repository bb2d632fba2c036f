"""How interpreters end that the Hugging Face Trainer runs in."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.autograd.profiler
import torch.distributed as dist

from tests.integrations.huggingface_jobs import overlap_callback, trainer
from tests.interpreters import run_interpreters
from tests.toggling import at_night

# Loading it takes seconds, and only the ranks need it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing")

RANKS_LOAD = ("transformers.trainer", "accelerate")

kept: list[Any] = []  # as the variables of a script's top level are: alive until the interpreter ends


def end_within_profiled_steps(folder: str, how: str) -> None:
    from transformers import TrainerCallback

    class End(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            if torch.autograd.profiler._is_profiler_enabled:
                if how == "exit":
                    sys.exit(3)
                if how == "exception":
                    raise KeyError("of the user")
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60.0)

    if how == "SIGTERM, and a handler that exits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    fit = trainer(rank, Path(folder, str(rank)), overlap_callback(run_dir=folder), End(), max_steps=30)
    kept.append(fit)
    fit.train()


ENDINGS = {"exit": 3, "exception": 1, "SIGTERM": -signal.SIGTERM, "SIGTERM, and a handler that exits": 5}


# All of them end a loop without a trainer in tests/monitor/test_endings.py.
@pytest.mark.parametrize(
    ("how", "code"),
    at_night(ENDINGS.items(), [("exception", 1), ("SIGTERM, and a handler that exits", 5)]),
)
def test_a_trainer_that_ends_within_profiled_steps_ends_as_without_the_library(
    tmp_path: Path, how: str, code: int
) -> None:
    endings = run_interpreters(end_within_profiled_steps, 2, str(tmp_path), how, timeout_s=150.0)
    assert [ending.code for ending in endings] == [code, code], "\n".join(map(str, endings))
