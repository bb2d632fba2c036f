"""Opens the job of two ranks in this process, and lets its phantom rank speak.

What takes a backend's place are kernels for the operators of ``c10d`` at the device's dispatch key. Operators that
``collectives.py`` does not name stay with torch's backend ``fake``, which does nothing.

The phantom speaks through the store of the job: whatever rank 0 says there to rank 0 of the library, rank 1 says too.
Nothing of the library is changed.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

from tests.gpu.loopback.collectives import OPERATORS, Call, Issued, parse
from tests.gpu.loopback.device_link import DeviceLink
from tests.gpu.loopback.host_link import HostLink
from tests.gpu.loopback.settings import LoopSettings

WORLD_SIZE = 2


class LoopJob:
    """An open job.

    Attributes:
        settings: may be changed between steps; what is issued later follows.
        device: on which the job trains.
        link: runs the collectives.
        issued: all collectives so far, of groups with more than one rank; may be cleared.
    """

    def __init__(self, settings: LoopSettings) -> None:
        self.settings = settings
        self.issued: list[Issued] = []
        if settings.device == "cpu":
            self.device = torch.device("cpu")
            self.link: DeviceLink | HostLink = HostLink()
        else:
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.link = DeviceLink()

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
            if group.size() > 1:
                self.issued.append(self._describe(call, group.group_name))
            work = self.link.issue(call, group, self.settings)
            # NCCL has no work for a synchronous collective. ``boxed`` of None is a null pointer, as C++ returns it.
            boxed = dist.Work.boxed(work)  # type: ignore[arg-type]
            return (args[0], boxed) if returns_tensors else boxed

        return kernel

    def _describe(self, call: Call, group: str) -> Issued:
        size = call.num_bytes
        length_ns = self.settings.length_ns(size)
        return Issued(call.operator, call.kind, group, size, call.asynchronous, length_ns, time.perf_counter_ns())


class _Echo(dist.Store):
    """The job's store, in which what rank 0 says of a window is said by the phantom too."""

    # torch holds the C++ half of a store only; this keeps Python's alive.
    _alive: ClassVar[list[_Echo]] = []

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._alive.append(self)

    def clone(self) -> _Echo:
        return _Echo(self._store.clone())

    @classmethod
    def forget_all(cls) -> None:
        """Drop the stores of a job that is closed."""
        cls._alive.clear()

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        if "overlap_callbacks/" not in key or not key.endswith("/0"):
            return
        theirs = key[:-1] + "1"
        if key.endswith("/order/0"):
            self._store.set(theirs, value)
        elif key.endswith("/report/0"):
            self._store.set(theirs, json.dumps({**json.loads(value), "rank": 1}).encode())

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(key)
        return found

    def add(self, key: str, number: int) -> int:
        total: int = self._store.add(key, number)
        return total

    def check(self, keys: list[str]) -> bool:
        there: bool = self._store.check(keys)
        return there

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)

    def deleteKey(self, key: str) -> bool:
        done: bool = self._store.delete_key(key)
        return done


@contextlib.contextmanager
def open_job(settings: LoopSettings, *, phantom: bool = True) -> Iterator[LoopJob]:
    """Open the job: the process group, and the kernels that run its collectives. One at a time in a process.

    Args:
        settings: of the link.
        phantom: whether rank 1 takes part in what the library's ranks say to each other. Without it, its order check
            and its report are missing, as those of a rank that hangs.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", store=_Echo(server) if phantom else server, rank=0, world_size=WORLD_SIZE)
    job = LoopJob(settings)
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that other kernels were there before
        for name, kernel in job.kernels():
            library.impl(name, kernel, "CPU" if settings.device == "cpu" else "CUDA")
    try:
        yield job
    finally:
        job.link.close()
        dist.destroy_process_group()
        _Echo.forget_all()
        library._destroy()  # type: ignore[no-untyped-call]
