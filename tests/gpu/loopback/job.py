"""Opens the job of two ranks in this process, and lets its phantom rank speak to the library's rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from overlap_callbacks.experiments.loopback import job
from overlap_callbacks.experiments.loopback.collectives import LoopSettings
from overlap_callbacks.experiments.loopback.job import LoopJob
from tests.gpu.loopback.phantom import phantom_rank


@contextlib.contextmanager
def open_job(settings: LoopSettings, *, phantom: bool = True) -> Iterator[LoopJob]:
    """Open the job: the process group, and the kernels that run its collectives. One at a time in a process.

    Args:
        settings: of the link.
        phantom: whether rank 1 takes part in what the library's ranks say to each other. Without it, its order check
            and its report are missing, as those of a rank that hangs.
    """
    with job.open_job(settings) as opened, phantom_rank() if phantom else contextlib.nullcontext():
        yield opened
