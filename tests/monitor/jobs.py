"""Small training jobs for the tests of the gate, and what they need to look at the library at work."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import OverlapMonitor, OverlapReport, Schedule, Sink
from overlap_callbacks.gate.dispatcher import BACKEND_SELECT, MARK, OWN_KEY, dispatcher
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.monitor.config import MonitorConfig
from tests.margins import PATIENCE_S

# One recorded step and the blocks O S S O of one step each.
TINY_WINDOW_STEPS = 5


def tiny_schedule(every_n_steps: int = TINY_WINDOW_STEPS, first_step: int = 2, **options: Any) -> Schedule:
    """The shortest windows that there are."""
    shortest = {"repeats": 1, "steps_per_block": 1, "warmup_steps": 0, "profiled_steps": 0}
    return Schedule(every_n_steps=every_n_steps, first_step=first_step, **{**shortest, **options})


class KeptReports(Sink):
    """Keeps all reports; on rank 0 only, like all sinks."""

    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)

    def facts(self) -> list[dict[str, Any]]:
        """What tests ask of the reports, as plain data that can travel to the pytest process."""
        return [
            {
                "complete": report.complete,
                "valid": report.valid,
                "ranks": list(report.ranks),
                "problems": list(report.problems),
                "figures": sorted(report.figures()),
                "blocks": {rank.rank: [block.block for block in rank.timed] for rank in report.samples},
                "collectives": [(c.operator, c.messages, c.bytes_in, c.bytes_out) for c in report.collectives],
            }
            for report in self.reports
        ]


def new_monitor(sink: Sink | None = None, gate: Gate | None = None, **options: Any) -> OverlapMonitor:
    """A monitor that measures every window, whatever its cost."""
    options = {"schedule": tiny_schedule(), "max_overhead": None, **options}
    return OverlapMonitor.from_config(MonitorConfig(sinks=[] if sink is None else [sink], **options), gate)


class Training:
    """A model that trains in some milliseconds a step, with several buckets of gradients.

    Args:
        rank: seeds the data.
        wrap: makes the distributed model.
        micro_batches: of one optimizer step.
    """

    def __init__(self, rank: int, wrap: Callable[..., Any] | None = None, micro_batches: int = 1) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU()]
        self.model = (wrap or ddp)(torch.nn.Sequential(*layers, torch.nn.Linear(32, 1)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        self._data = torch.Generator().manual_seed(100 + rank)
        self._micro_batches = micro_batches

    def step(self) -> None:
        self.optimizer.zero_grad()
        for micro_batch in range(self._micro_batches):
            last = micro_batch == self._micro_batches - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self.model(torch.randn(8, 16, generator=self._data)).square().mean()
                loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def digest(self) -> str:
        """Equal for bit-identical weights and losses."""
        found = hashlib.sha256(repr(self.losses).encode())
        for parameter in self.model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            found.update(local.detach().contiguous().numpy().tobytes())
        return found.hexdigest()


def ddp(model: torch.nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.002)


def run_steps(training: Training, monitor: OverlapMonitor, num_steps: int) -> None:
    for _ in range(num_steps):
        with monitor.step():
            training.step()


def digest_without_library(rank: int, num_steps: int, **options: Any) -> str:
    training = Training(rank, **options)
    for _ in range(num_steps):
        training.step()
    return training.digest()


@contextlib.contextmanager
def kept_logs() -> Iterator[list[StepLog]]:
    """What the gate saw in each of its steps meanwhile."""
    logs: list[StepLog] = []
    end_step = Gate.end_step

    def keep(gate: Gate) -> StepLog:
        logs.append(end_step(gate))
        return logs[-1]

    Gate.end_step = keep
    try:
        yield logs
    finally:
        Gate.end_step = end_step


def is_pass_through() -> bool:
    """Whether the gate's kernels, if there are any, do nothing."""
    return dispatcher.observer is None


def measures_this_thread() -> bool:
    """Whether the gate's kernels at ``BackendSelect`` do more than pass this thread's collectives on."""
    return dispatcher.placement is dispatcher.backend_select and not is_pass_through() and torch._C._is_key_in_tls(MARK)


def dispatch_table() -> str:
    """How collectives of this thread are dispatched: the same as without the library where the gate changes nothing.

    The gate's kernels stay registered for good. Those at the key of its own count only while the thread includes the
    key. Those at ``BackendSelect``, where jobs with DTensors or torch.compile have them, count only while they do more
    than pass collectives on.
    """
    key = torch._C._parse_dispatch_key(OWN_KEY)
    if torch._C._dispatch_tls_is_dispatch_key_included(key):
        return f"through {OWN_KEY}"
    if measures_this_thread():
        return f"through {BACKEND_SELECT}"
    lines = [line for name in c10d_operators() for line in torch._C._dispatch_dump(name).splitlines(keepends=True)]
    return "".join(line for line in lines if not line.startswith((OWN_KEY, BACKEND_SELECT)))


def kernels_are_registered() -> bool:
    """Whether the gate's kernels are in the dispatcher, in anybody's way or not."""
    return dispatcher.placement is not None


def c10d_operators() -> list[str]:
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::"))


def own_threads() -> list[str]:
    """The library's threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("overlap-callbacks")]


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait for another thread's or rank's work.

    Raises:
        TimeoutError: it took too long.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {timeout_s:g} s")
        time.sleep(0.002)


def two_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    return dist.new_group(group_desc="A"), dist.new_group(group_desc="B")
