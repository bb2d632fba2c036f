"""Small jobs for the race check, and what tests ask of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.analysis.results.race import RaceCheck
from overlap_callbacks.integrations.pytorch import attach
from tests.distributed import captured_log
from tests.monitor.jobs import KeptReports, tiny_schedule

WIDTH = 64
STEPS = 14


class Net(nn.Module):
    """Layers with all that a repeated step might change: batch statistics, dropout, every kind of random number."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, width)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        noise = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return self.last(torch.relu(self.second(self.dropout(self.norm(self.first(batch)))))) * noise


def ddp(net: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(net, bucket_cap_mb=0.02, **options)


def fsdp2(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in (net.first, net.second, net.last):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


class Job:
    """A loop of one's own.

    Args:
        rank: seeds its data.
        wrap: makes the distributed model.
        zero: whether the optimizer shards its state.
        hook: a communication hook of DDP's.
        width: of its layers.
        keep_gradients: whether gradients are zeroed, and not taken away.
    """

    def __init__(
        self,
        rank: int,
        wrap: Callable[[nn.Module], nn.Module] = ddp,
        *,
        zero: bool = False,
        hook: Any = None,
        width: int = WIDTH,
        keep_gradients: bool = False,
    ) -> None:
        self.net = Net(width)
        self.width = width
        self.model = wrap(self.net)
        if hook is not None:
            self.model.register_comm_hook(None, hook)
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = (
            ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=1e-2)
            if zero
            else torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
        )
        self._data = torch.Generator().manual_seed(100 + rank)
        self.held = self.batch()
        self._keep = keep_gradients
        self.repetitions = 0
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7 + rank)

    def batch(self) -> torch.Tensor:
        return torch.randn(16, self.width, generator=self._data)

    def repeat(self) -> None:
        self.repetitions += 1
        self.model(self.held).square().mean().backward()

    def train(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=not self._keep)
            self.model(self.batch()).square().mean().backward()
            self.optimizer.step()

    def state(self) -> list[bytes]:
        """All that training has left on this rank, to compare bit by bit."""
        tensors: list[Any] = [*self.model.parameters(), *self.model.buffers()]
        tensors += [parameter.grad for parameter in self.model.parameters()]
        local = getattr(self.optimizer, "optim", self.optimizer)
        for state in local.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        tensors.append(torch.get_rng_state())
        found = [b"None" if each is None else _bytes(each) for each in tensors]
        return [*found, repr(random.getstate()).encode(), repr(np.random.get_state()).encode()]


def _bytes(tensor: Any) -> bytes:
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach().contiguous().numpy().tobytes()


def checked(job: Job, steps: int = STEPS, repeat: Callable[[], Any] | None = None, **options: Any) -> tuple[Any, ...]:
    """Train with the race check; returns its windows' outcomes on rank 0, and the log."""
    kept = KeptReports()
    options = {"schedule": tiny_schedule(), "sinks": [kept], "max_overhead": None, "power": False, **options}
    with captured_log() as lines:
        monitor = attach(
            job.optimizer, model=job.model, repeat_step=repeat or job.repeat, check_gradients=True, **options
        )
        job.train(steps)
        monitor.close()
    outcomes: list[RaceCheck] = [report.race for report in kept.reports if report.race is not None]
    return outcomes, lines
