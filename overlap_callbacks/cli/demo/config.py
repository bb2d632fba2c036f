"""Options of a demo run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Options of a demo run.

    Attributes:
        framework: ``pytorch`` or ``lightning``.
        steps: number of optimizer steps.
        layers: number of the model's blocks.
        hidden: width of the model.
        heads: number of attention heads.
        sequence: tokens of a sequence.
        batch: sequences of a rank's batch.
        bucket_mb: size of DDP's gradient buckets, in MiB.
        processes: number of ranks.
        backend: ``gloo`` (CPU) or ``nccl`` (one GPU per rank).
        run_dir: folder of the record.
        every_n_steps: steps from one window to the next.
        profiled_steps: profiled steps of each mode in a window.
        control: whether it is an A/A run: both arms overlapped.
        wandb: whether to log to W&B too.
        measure: False trains without the library, for comparison.
        strict: whether an error of the library ends the demo.
        first_step: where the first window opens. Before it, DDP builds its buckets, and allocators and caches fill.
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
    run_dir: str = "overlap_runs/demo"
    every_n_steps: int = 100
    profiled_steps: int = 8
    control: bool = False
    wandb: bool = False
    measure: bool = True
    strict: bool = True
    first_step: int = 10
