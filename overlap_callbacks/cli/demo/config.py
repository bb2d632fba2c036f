"""What a demo run is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """A demo run.

    Attributes:
        framework: ``pytorch`` or ``lightning``.
        steps: optimizer steps.
        layers, hidden, heads: of the model.
        sequence, batch: tokens of a sequence, and sequences of a rank's batch.
        bucket_mb: size of DDP's gradient buckets, MiB.
        processes: ranks.
        backend: ``gloo`` (CPU) or ``nccl`` (one GPU a rank).
        run_dir: folder of the record.
        every_n_steps: steps from window to window.
        profiled_steps: profiled steps of each mode in a window.
        control: an A/A run.
        wandb: log to W&B too.
        measure: False trains without the library, for comparison.
        strict: an error of the library's own ends the demo.
    """

    framework: str = "pytorch"
    steps: int = 400
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    sequence: int = 64
    batch: int = 4
    bucket_mb: float = 1.0
    processes: int = 2
    backend: str = "gloo"
    run_dir: Path = Path("overlap_runs/demo")
    every_n_steps: int = 100
    profiled_steps: int = 8
    control: bool = False
    wandb: bool = False
    measure: bool = True
    strict: bool = True

    # Where the first window opens: DDP settles its buckets, and allocators and caches fill, before.
    first_step: int = 10
