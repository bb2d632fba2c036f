"""What a training job of a study is told, and what it says of itself. Plain data, in files of the job's folder."""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.study import Configuration
from overlap_callbacks.experiments.study.models import Model

SPEC_NAME = "job.json"
# The last rank writes it at the end: of a pipeline, it has the losses.
TRAINED_NAME = "trained.json"
# Steps of each mode that a window times, and as many under the profiler.
WINDOW_STEPS = 5


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One training job.

    Attributes:
        configuration: to train.
        model: as it is trained.
        ranks: of the job.
        link: ``gloo`` or ``nccl``.
        threads: of each rank on a CPU.
        windows: to measure, of ``WINDOW_STEPS`` timed and as many profiled steps of each mode.
        scale: by which the model was shrunk; for the record.
        timeout_s: after so long no rank waits for another any more.
        folder: of the job.
    """

    configuration: Configuration
    model: Model
    ranks: int
    link: str
    threads: int
    windows: int
    scale: float
    timeout_s: float
    folder: str


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What a job says of itself at its end.

    Attributes:
        parameters: of the model, those that are shared counted once.
        samples_per_step: sequences or images of a step of the whole job.
        steps: that were trained.
        losses: of this rank, step by step; of a pipeline, the last rank's.
    """

    parameters: int
    samples_per_step: int
    steps: int
    losses: tuple[float, ...] = ()
