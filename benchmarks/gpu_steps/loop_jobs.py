"""Jobs on the loopback link: one process, two ranks of which one is a phantom, communication of known length.

On the simulated GPU they are two ranks on two devices.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpu_steps import simulated
from overlap_callbacks import Mode, OverlapReport, Sink
from overlap_callbacks.analysis.kernels.table import KernelTable, Kind
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.integrations.pytorch import attach
from tests.gpu.loopback import LoopJob, LoopSettings, open_job

# One window, of 2 x OSSO timed and OSSO profiled blocks; DDP's buckets have settled before it.
WINDOW: dict[str, Any] = {
    "every_n_steps": 1_000, "first_step": 5, "repeats": 4, "steps_per_block": 2, "warmup_steps": 1, "profiled_steps": 4,
    "max_overhead": None, "strict": True, "power": False, "spread": False,
}  # fmt: skip
_NEVER = {**WINDOW, "every_n_steps": 10**9, "first_step": 10**8, "sinks": []}
_REPORT_S = 60.0  # to read a profile of very many kernels takes long
# Two kernels that follow each other may overlap by what the device's clock cannot tell apart.
CLOCK_NS = 1_000


@dataclass(frozen=True)
class Size:
    """How large a job is. Communication is shorter than compute, and each takes many times longer than a launch."""

    width: int
    layers: int
    rows: int
    bucket_mib: float
    gb_s: float

    @classmethod
    def usual(cls, on_cpu: bool) -> Size:
        # On the GPU: layers of 64 MiB, whose gradients take 3.4 ms each, next to some 10 ms of compute.
        return cls(64, 6, 16, 0.03, 0.05) if on_cpu else cls(4096, 8, 8192, 64, 20.0)


class Kept(Sink):
    """Keeps the reports."""

    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)


class Trained:
    """A model that is trained on the link; ``step`` may be replaced for other ways to train.

    Args:
        link: the open job.
        model: wrapped by DDP or FSDP2.
        rows, width: of a batch.
        optimizer: that steps last; by default SGD over all parameters.
    """

    def __init__(
        self, link: LoopJob, model: nn.Module, rows: int, width: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.link = link
        self.model = model
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-4)
        self.data = torch.randn(rows, width, device=link.device)
        self.step: Callable[[], None] = self.forward_backward_update

    def forward_backward_update(self) -> None:
        self.model(self.data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def attach(self, **options: Any) -> Any:
        return attach(self.optimizer, model=self.model, **{**WINDOW, **options})

    def window(self, **options: Any) -> OverlapReport:
        """The report of one window."""
        kept = Kept()
        with self.attach(sinks=[kept], **options) as monitor:
            self.train(monitor.schedule.first_step + monitor.schedule.window_steps + 2)
            monitor.close(_REPORT_S)
        report: OverlapReport = simulated.shared(kept.reports[0] if kept.reports else None)
        assert len(kept.reports) <= 1
        return report

    def raw_profile(self, mode: Mode, steps: int = 4) -> KernelTable:
        """The kernels of ``steps`` steps of one mode, as they are."""
        on_cuda = self.link.device.type == "cuda"
        with self.attach(**_NEVER) as monitor:
            self.train(2)
            monitor.force(mode)
            self.train(4)  # the first of a mode are recorded for the order check, and not yet sequential
            synchronize(on_cuda)
            profile = Profile(on_cuda)
            profile.start()
            for _ in range(steps):
                profile.begin_step()
                self.step()
                profile.end_step()
            synchronize(on_cuda)
            profile.stop()
        return profile.kernels()

    def known_ms(self, steps: int = 4) -> float:
        """How long the link takes for one step's collectives."""
        if simulated.ON_SIMULATED_GPU and self.link.device.type == "cuda":
            begun_ns = time.monotonic_ns()
            self.train(steps)
            return simulated.known_ms(begun_ns) / steps
        before = len(self.link.issued)
        self.train(steps)
        return sum(issued.length_ns for issued in self.link.issued[before:]) / steps / 1e6


@contextlib.contextmanager
def trained(kind: str, on_cpu: bool, *, ctas: int = 24, size: Size | None = None) -> Iterator[Trained]:
    """A job of ``kind``, ``ddp`` or ``fsdp2``."""
    size = size or Size.usual(on_cpu)
    settings = LoopSettings("cpu" if on_cpu else "cuda", ctas=ctas, gb_s=size.gb_s)
    with _joined_ranks() if simulated.ON_SIMULATED_GPU and not on_cpu else open_job(settings) as link:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(size.width, size.width) for _ in range(size.layers)]).to(link.device)
        yield Trained(link, WRAP[kind](net, link, size), size.rows, size.width)


@contextlib.contextmanager
def _joined_ranks() -> Iterator[Any]:
    yield SimpleNamespace(device=simulated.rank_device())


def _ddp(net: nn.Sequential, link: LoopJob, size: Size) -> nn.Module:
    return DistributedDataParallel(net, bucket_cap_mb=size.bucket_mib)


def _fsdp2(net: nn.Sequential, link: LoopJob, size: Size) -> nn.Module:
    mesh = init_device_mesh(link.device.type, (2,), mesh_dim_names=("dp",))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


WRAP: dict[str, Callable[[nn.Sequential, LoopJob, Size], nn.Module]] = {"ddp": _ddp, "fsdp2": _fsdp2}


def synchronize(on_cuda: bool) -> None:
    if on_cuda:
        torch.cuda.synchronize()


def beside_communication(kernels: KernelTable) -> dict[str, float]:
    """Compute kernels of the profiled steps that ran beside a communication kernel, by name: us of them beside one."""
    rows = (kernels.kind == Kind.COMPUTE) & (kernels.step >= 0)
    covered = kernels.intervals[rows].covered_ns(kernels.of(Kind.COMMUNICATION))
    found: dict[str, float] = {}
    for number, nanoseconds in zip(kernels.name[rows].tolist(), covered.tolist(), strict=True):
        if nanoseconds > CLOCK_NS:
            name = kernels.names[number]
            found[name] = found.get(name, 0.0) + nanoseconds / 1e3
    return found


def value(estimate: Any) -> float | None:
    """The value of a figure of a report; None where it is absent."""
    return None if estimate is None else float(estimate.value)
