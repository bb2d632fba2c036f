"""Tunings made by hand, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from overlap_callbacks.analysis.results.env_overrides import TimingPlan
from overlap_callbacks.experiments.tune.combinations import Axis, Kind
from overlap_callbacks.experiments.tune.sweep import Run, Tune, Tuning

BUCKETS = Axis(Kind.ARG, "bucket-mb", ("25", "5", "1"))
CTAS = Axis(Kind.ENV, "NCCL_MAX_CTAS", ("", "8", "16"))


def tuning(*axes: Axis) -> Tuning:
    return Tuning(
        library_version="0.1.0",
        started_at="2026-11-23T08:00:00+00:00",
        command=("torchrun", "train.py"),
        axes=axes or (BUCKETS,),
        timing=TimingPlan(),
        blocks=4,
    )


def results(folder: Path, step_ms: Sequence[Sequence[float]], *axes: Axis, failed: Sequence[int] = ()) -> Tune:
    """Runs of each combination with these step times; of those that failed, one more."""
    runs = [
        Run(
            combination=number, repeat=repeat, seconds=9.0, block_ms=(ms,) * 4, num_steps=40, world_size=2, device="cpu"
        )
        for number, of_one in enumerate(step_ms)
        for repeat, ms in enumerate(of_one)
    ]
    runs += [
        Run(combination=number, repeat=9, seconds=3.0, failure="exit code 1: OutOfMemoryError: 20 GiB", exit_code=1)
        for number in failed
    ]
    return Tune(folder, tuning(*axes), runs)
