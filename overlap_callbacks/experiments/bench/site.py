"""Where a benchmark runs: its process group or loopback link, its device, and the clock of that device."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks.analysis.bench.points import WORLD, ranks_of
from overlap_callbacks.analysis.results.bench import GLOO, LOOPBACK, Plan
from overlap_callbacks.experiments.bench.host_trials import HostTrials
from overlap_callbacks.experiments.bench.ranks import GroupRanks, OneProcess, Ranks
from overlap_callbacks.experiments.bench.trials import Trials

# Longest time of one collective: no rank waits longer for one that is gone.
TIMEOUT = datetime.timedelta(seconds=120)


class Site:
    """Where a benchmark runs, on one rank.

    Args:
        plan: what is measured.
        device: of this rank.
        ranks: that measure.
        loop: the loopback job; None on another link.

    Attributes:
        device: of this rank.
        ranks: that measure.
        trials: of the device.
    """

    def __init__(self, plan: Plan, device: torch.device, ranks: Ranks, loop: Any = None) -> None:
        self.device = device
        self.ranks = ranks
        self._plan = plan
        self._loop = loop
        self._groups: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._by_ctas: dict[int, Any] = {}
        self.trials: Trials = HostTrials()
        if device.type == "cuda":
            from overlap_callbacks.experiments.bench.cuda_trials import CudaTrials

            lead = torch.zeros(1, device=device)
            self.trials = CudaTrials(lambda: dist.all_reduce(lead, async_op=True))

    def group(self, text: str) -> tuple[Any, tuple[int, ...], Sequence[Sequence[int]]]:
        """This rank's process group of a text, its ranks, and the ranks of all such groups. All ranks call it alike."""
        every = ranks_of(text, dist.get_world_size())
        if text not in self._groups:
            found: tuple[Any, tuple[int, ...]] = (dist.group.WORLD, every[0])
            for members in every if text != WORLD else ():
                made = dist.new_group(list(members), timeout=TIMEOUT)
                if dist.get_rank() in members:
                    found = (made, members)
            self._groups[text] = found
        group, members = self._groups[text]
        return group, members, every

    def group_of_ctas(self, ctas: int) -> Any:
        """The process group of all ranks whose collectives have so many thread blocks; 0 for the link's own number."""
        if self._loop is not None and ctas:
            self._loop.settings = replace(self._loop.settings, ctas=ctas)
        if self._loop is not None or not ctas:
            return dist.group.WORLD
        if ctas not in self._by_ctas:
            options: Any = dist.ProcessGroupNCCL.Options()
            options.config.min_ctas = options.config.max_ctas = ctas
            self._by_ctas[ctas] = dist.new_group(backend="nccl", pg_options=options, timeout=TIMEOUT)
        return self._by_ctas[ctas]

    def synchronise(self) -> None:
        """Wait until the device has done what was issued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def open_site(plan: Plan, local_rank: int) -> Iterator[Site]:
    """Open a benchmark's process group, or its loopback link.

    Args:
        plan: what is measured.
        local_rank: of this process on its host.
    """
    if plan.threads:
        torch.set_num_threads(plan.threads)
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if plan.link == LOOPBACK:
        with _loopback(plan, device) as site:
            yield site
        return
    dist.init_process_group("gloo" if plan.link == GLOO else "cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    try:
        yield Site(plan, device, GroupRanks(TIMEOUT))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _loopback(plan: Plan, device: torch.device) -> Iterator[Site]:
    from overlap_callbacks.experiments.loopback.job import open_job
    from overlap_callbacks.experiments.loopback.settings import LoopSettings

    speed = plan.link_gb_s
    with open_job(LoopSettings(plan.device) if speed is None else LoopSettings(plan.device, gb_s=speed)) as loop:
        yield Site(plan, device, OneProcess(), loop)


def reduction(device: torch.device) -> tuple[Any, Callable[[int, torch.dtype], torch.Tensor]]:
    """What all-reduces do, and a function that makes their message from a number of elements and their type.

    Means of random numbers stay what they are, however often they are taken, and draw the power of real ones. Gloo has
    no means; there, zeros are summed up.
    """
    if device.type == "cuda":
        return dist.ReduceOp.AVG, lambda count, dtype: torch.randn(count, device=device).to(dtype)
    return dist.ReduceOp.SUM, lambda count, dtype: torch.zeros(count, dtype=dtype)
