"""Training jobs of the study as ranks of the tests' harness run them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from overlap_callbacks.analysis.results.env_overrides import SWITCH
from overlap_callbacks.analysis.study import Configuration
from overlap_callbacks.experiments.study.job.strategies import STRATEGIES
from overlap_callbacks.experiments.study.job.worker import train
from overlap_callbacks.experiments.study.models import JobSpec, scaled
from tests.margins import PATIENCE_S

SCALE = 0.01


def losses(rank: int, strategy: str, model: str, precision: str, folder: str) -> dict[str, list[float]]:
    """This rank's losses without the library, and with it measuring a window."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is loaded
    found = {}
    for switch in ("off", "on"):
        os.environ[SWITCH] = switch
        spec = JobSpec(
            configuration=Configuration(model=model, strategy=strategy, batch=1, precision=precision),
            model=scaled(model, SCALE), ranks=2, link="gloo", threads=1, windows=1, scale=SCALE, timeout_s=PATIENCE_S,
            folder=str(Path(folder, switch)),
        )  # fmt: skip
        torch.manual_seed(0)
        training = STRATEGIES[strategy](spec, torch.device("cpu"))
        train(training)
        found[switch] = [float(loss) for loss in training.losses]
        dist.barrier()
    return found
