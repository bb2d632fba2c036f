"""A job on a CPU whose compute takes a known time, and a known factor longer while communication is in flight.

Its operator spins by the clock, and its communication is the loopback link's, which takes a chosen time. What each
takes is known beside the library as ``Bounds``, from one clock, ``perf_counter_ns``: a spin takes at least what the
operator itself sees, and at most what its caller sees; a collective takes at least the link's time, and at most the
time from its issue until the phantom sees its end. On a quiet machine the two bounds nearly meet. A busy machine takes
the CPU away between the marks and moves the bounds apart; what is true lies between them all the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.jobs import Job
from tests.gpu.loopback.job import LoopJob, TimedLink

WIDTH, LAYERS = 128, 3
FORWARD_MS, BACKWARD_MS, COLLECTIVE_MS = 10.0, 50.0, 60.0
# Of a link on which a layer's gradients, or its weights, take COLLECTIVE_MS.
LAYER_BYTES = 4 * WIDTH * WIDTH
GB_S = LAYER_BYTES / (COLLECTIVE_MS * 1e6)


class Range(NamedTuple):
    """Something that began and ended, on the clock of ``perf_counter_ns``."""

    start_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class Bounds(NamedTuple):
    """A time that is known from both sides."""

    least_ms: float
    most_ms: float


# Each call of the operator, as its caller sees it; the spin lies within.
_calls: list[Range] = []


class Spinner:
    """Spins for a time by the clock, in which communication slows it down.

    Args:
        link: whose collectives do.
        factor: how many times as long what runs beside a collective takes.

    Attributes:
        spins: all so far.
        calls: those of the operator that did them.
        slowed_ms: by how much communication made each spin longer.
    """

    def __init__(self, link: TimedLink, factor: float) -> None:
        self._link, self._factor = link, factor
        self.spins: list[Range] = []
        self.calls = _calls
        self.slowed_ms: list[float] = []

    def spin(self, tensor: torch.Tensor, alone_ms: float) -> torch.Tensor:
        start = now = time.perf_counter_ns()
        left_ns, lost_ns = alone_ms * 1e6, 0.0
        while left_ns > 0:
            rate = self._factor if self._link.is_busy else 1.0
            time.sleep(0)  # lets the phantom's thread have the interpreter
            before, now = now, time.perf_counter_ns()
            left_ns -= (now - before) / rate
            lost_ns += (now - before) * (1 - 1 / rate)
        self.spins.append(Range(start, now))
        self.slowed_ms.append(lost_ns / 1e6)
        return tensor.clone()


@contextlib.contextmanager
def spinner(loop: LoopJob, factor: float) -> Iterator[Spinner]:
    """The operator ``loopback::spin``, as long as the context lasts."""
    assert isinstance(loop.link, TimedLink)
    made = Spinner(loop.link, factor)
    _calls.clear()
    library = torch.library.Library("loopback", "DEF")
    library.define("spin(Tensor tensor, float alone_ms) -> Tensor")
    library.impl("spin", made.spin, "CPU")
    try:
        yield made
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


class _Spin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        return _spin(tensor, FORWARD_MS)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _spin(gradient, BACKWARD_MS)


def _spin(tensor: torch.Tensor, alone_ms: float) -> torch.Tensor:
    start_ns = time.perf_counter_ns()
    spun: torch.Tensor = torch.ops.loopback.spin(tensor, alone_ms)
    _calls.append(Range(start_ns, time.perf_counter_ns()))
    return spun


class _Layer(nn.Linear):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        spun: torch.Tensor = _Spin.apply(super().forward(data))
        return spun


class SpinningJob(Job):
    """DDP or FSDP2 around layers that spin in their forward and, longer, in their backward pass.

    Attributes:
        steps: when each step so far ran.
        ends: when each optimizer step ran. The library's step ends within it.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = nn.Sequential(*[_Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        if kind == "ddp":
            self.model: nn.Module = DistributedDataParallel(model, bucket_cap_mb=LAYER_BYTES / 2**20)
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._data = torch.randn(4, WIDTH)
        self._began_ns = 0
        self.steps: list[Range] = []
        self.ends: list[Range] = []

    def forward_backward(self) -> None:
        self._began_ns = time.perf_counter_ns()
        self.model(self._data).square().mean().backward()

    def update(self) -> None:
        end_ns = time.perf_counter_ns()
        self.optimizer.step()
        self.ends.append(Range(end_ns, time.perf_counter_ns()))
        self.optimizer.zero_grad()
        self.steps.append(Range(self._began_ns, time.perf_counter_ns()))

    def attach(self, **options: Any) -> Any:
        from overlap_callbacks.integrations.pytorch import attach

        return attach(self.optimizer, model=self.model, **options)
