"""Opens the job of two ranks in this process.

Instead of a backend there are kernels for the operators of ``c10d`` at the device's dispatch key. Operators that
``collectives.py`` does not name stay with torch's backend ``fake``, which does nothing.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch._C._distributed_c10d import TCPStore

from overlap_callbacks.experiments.loopback.collectives import OPERATORS, Call, LoopSettings, parse
from overlap_callbacks.experiments.loopback.device_link import DeviceLink
from overlap_callbacks.experiments.loopback.host_link import HostLink

WORLD_SIZE = 2


class LoopJob:
    """An open job on a device and a link, whose settings may change between steps."""

    def __init__(self, settings: LoopSettings) -> None:
        self.settings = settings
        if settings.device == "cpu":
            self.device = torch.device("cpu")
            self.link: DeviceLink | HostLink = HostLink()
        else:
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.link = DeviceLink()

    def issue(self, call: Call, group: dist.ProcessGroup) -> dist.Work | None:
        """Issue a collective on the link."""
        return self.link.issue(call, group, self.settings)

    def kernels(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """A kernel for each operator."""
        for name in OPERATORS:
            schema = getattr(torch.ops.c10d, name).default._schema
            arguments = [argument.name for argument in schema.arguments]
            yield name, self._kernel(name, arguments.index("process_group"), arguments.index("async_op"))

    def _kernel(self, operator: str, group_at: int, async_at: int) -> Callable[..., Any]:
        returns_tensors = len(getattr(torch.ops.c10d, operator).default._schema.returns) > 1

        def kernel(*args: Any) -> Any:
            group: dist.ProcessGroup = dist.ProcessGroup.unbox(args[group_at])
            call = parse(operator, group_at, async_at, args)
            work = self.issue(call, group)
            # NCCL returns no work for a synchronous collective. ``boxed`` of None is a null pointer, as C++ returns it.
            boxed = dist.Work.boxed(work)  # type: ignore[arg-type]
            return (args[0], boxed) if returns_tensors else boxed

        return kernel


@contextlib.contextmanager
def open_job(settings: LoopSettings, make: Callable[[LoopSettings], LoopJob] = LoopJob) -> Iterator[LoopJob]:
    """Open the job: the process group, and the kernels that run its collectives. One at a time in a process."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", store=server, rank=0, world_size=WORLD_SIZE)
    job = make(settings)
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about replaced kernels
        for name, kernel in job.kernels():
            library.impl(name, kernel, "CPU" if settings.device == "cpu" else "CUDA")
    try:
        yield job
    finally:
        job.link.close()
        dist.destroy_process_group()
        library._destroy()
