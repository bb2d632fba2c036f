"""A job of two ranks in one process, of which rank 1 is a phantom that has the same data; so one GPU is enough.

Collectives pass the real operators of ``c10d``, through the library's gate, DDP's reducer and the dispatcher. Below
them, in place of a backend, they run real work of known length:

- on a GPU one kernel for each collective, named and placed on streams as NCCL does it, which moves the bytes once and
  then holds a chosen number of thread blocks until the time of a link of chosen bandwidth is over;
- on a CPU the collectives of Gloo, with a phantom in a thread of its own that joins each of them late.

    with open_job(LoopSettings("cuda", ctas=24, gb_s=40.0)) as job:
        model = DistributedDataParallel(net.to(job.device))
        with attach(optimizer, model=model, sinks=[...]):
            ...
        known_ms = sum(collective.length_ns for collective in job.issued) / 1e6

There can be one job at a time in a process, and it needs the process for itself. The link itself is
``overlap_callbacks/experiments/loopback``; here is what tests need beside it.
"""

from overlap_callbacks.experiments.loopback.collectives import LoopSettings, Move
from tests.gpu.loopback.job import Issued, LoopJob, open_job

__all__ = ["Issued", "LoopJob", "LoopSettings", "Move", "open_job"]
