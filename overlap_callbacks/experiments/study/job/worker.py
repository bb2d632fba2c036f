"""One rank of a training job: builds the model, trains until its windows are measured, and ends.

``python -m overlap_callbacks.experiments.study.job.worker FOLDER``, with the variables of ``torchrun``.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from overlap_callbacks.experiments.study.job.building import count_weights
from overlap_callbacks.experiments.study.job.strategies import STRATEGIES
from overlap_callbacks.experiments.study.job.training import Training, set_tf32
from overlap_callbacks.experiments.study.models import (
    SPEC_NAME,
    TRAINED_NAME,
    WINDOW_STEPS,
    JobSpec,
    Trained,
    Transformer,
)

# Steps before the library is attached: allocators, autotuners and DDP's buckets settle.
_WARM_UP_STEPS = 5
# The last of these, which give the step time.
_TIMED_STEPS = 2
# Steps between two windows, during which the report is made. On a CPU that takes time from them.
_REST_STEPS = {"cpu": 10, "cuda": 3}
# Equal numbers of O and S, with mean positions at most half a block apart, so that slow drift cancels.
_BLOCKS = "OSSOOSSOOS"
# Minimum block length on a GPU: power sensors average over about 100 ms.
_GPU_BLOCK_S = 0.3
_MAX_BLOCK_STEPS = 50


def main(folder: str) -> None:
    """Train as this rank."""
    os.dup2(2, 1)  # the Gloo of torch 2.8 writes its own lines to stdout
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    spec = msgspec.json.decode(Path(folder, SPEC_NAME).read_bytes(), type=JobSpec)
    device = torch.device("cpu")
    if spec.link == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(spec.threads)
    set_tf32(spec.configuration.precision)
    torch.manual_seed(0)  # for dropout
    dist.init_process_group(spec.link, timeout=datetime.timedelta(seconds=spec.timeout_s))
    training = STRATEGIES[spec.configuration.strategy](spec, device)
    steps = train(training)
    if training.rank == spec.ranks - 1:
        _write_results(training, steps)
    dist.barrier()
    dist.destroy_process_group()


def train(training: Training) -> int:
    """Train until the windows are measured; returns the number of steps."""
    step_s = _warm_up(training)
    options = _window_options(training, step_s)
    windows, every = training.spec.windows, options["every_n_steps"]
    last: int = options["first_step"] + windows * every - _REST_STEPS[training.device.type]
    with training.attach(_WARM_UP_STEPS, **options, **_job_facts(training)):
        for _ in range(_WARM_UP_STEPS, last + 1):
            training.step()
    return last + 1


def _warm_up(training: Training) -> float:
    """Train the first steps; returns the time of one in seconds, the longest of any rank."""
    for _ in range(_WARM_UP_STEPS - _TIMED_STEPS):
        training.step()
    device = training.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the library is not attached yet
    began_s = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        training.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = torch.tensor((time.perf_counter() - began_s) / _TIMED_STEPS, device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken.item())


def _window_options(training: Training, step_s: float) -> dict[str, Any]:
    """Windows of ``WINDOW_STEPS`` counted steps of each mode; more on a GPU so fast that power needs more."""
    device = training.device.type
    long_enough = math.ceil(_GPU_BLOCK_S / step_s) if device == "cuda" else 1
    per_block = min(max(1, long_enough), _MAX_BLOCK_STEPS)
    # One recorded step, blocks with one warm-up step each, and as many profiled blocks of one step.
    window = 1 + len(_BLOCKS) * (1 + per_block) + len(_BLOCKS) * 2
    return {
        "first_step": _WARM_UP_STEPS + 2,
        "every_n_steps": window + _REST_STEPS[device],
        "repeats": 1,
        "profiled_steps": WINDOW_STEPS,
        "advanced": {"blocks": _BLOCKS, "steps_per_block": per_block, "warmup_steps": 1, "spread": False},
    }


def _job_facts(training: Training) -> dict[str, Any]:
    """The facts of the job that the library gets."""
    spec, model = training.spec, training.spec.model
    configuration = spec.configuration
    settings = {
        "model": configuration.model, "strategy": configuration.strategy, "batch": configuration.batch,
        "precision": configuration.precision, "scale": spec.scale,
    }  # fmt: skip
    caps = {"power_cap_w": configuration.power_cap_w, "clock_cap_mhz": configuration.clock_cap_mhz}
    settings |= {name: cap for name, cap in caps.items() if cap is not None}
    told: dict[str, Any] = {"samples_per_step": training.samples_per_step}
    if isinstance(model, Transformer):
        told["tokens_per_step"] = training.samples_per_step * model.shape.sequence
        told["model_parameters"] = count_weights(model)
    return told | {
        "settings": settings,
        "precision": configuration.precision,
        "run_dir": spec.folder,
        "max_overhead": None,  # measuring is the job's only purpose
        "strict": True,
    }


def _write_results(training: Training, steps: int) -> None:
    """Write the job's own results, on the last rank, which has the losses of a pipeline."""
    trained = Trained(
        parameters=count_weights(training.spec.model),
        samples_per_step=training.samples_per_step,
        steps=steps,
        losses=tuple([float(loss) for loss in training.losses]),
    )
    Path(training.spec.folder, TRAINED_NAME).write_bytes(msgspec.json.encode(trained))


if __name__ == "__main__":
    main(sys.argv[1])
