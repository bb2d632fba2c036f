"""Where a benchmark runs: its ranks, their process group or loopback link, their device, clock and sensors."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overlap_callbacks.analysis.power.device import mean_now
from overlap_callbacks.analysis.power.mean_power import counted_power
from overlap_callbacks.analysis.power.readings import Segment
from overlap_callbacks.analysis.power.sampled import sampled_power
from overlap_callbacks.analysis.results.bench import GLOO, LOOPBACK, Plan
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.experiments.bench.results import WORLD, ranks_of
from overlap_callbacks.instruments.power.discovery import CPU, NoPower, find_source, identify
from overlap_callbacks.instruments.power.sampler import Sampler

# Maximum time of one collective: no rank waits longer for a dead one.
TIMEOUT = datetime.timedelta(seconds=120)


class Ranks:
    """The processes that measure: this one alone, as on a loopback link."""

    rank = 0

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, in rank order, on all ranks."""
        return [value]

    def barrier(self) -> None:
        """Wait for all ranks."""


class GroupRanks(Ranks):
    """Ranks of a process group. They communicate over their own Gloo group, next to the one being measured."""

    def __init__(self, timeout: datetime.timedelta) -> None:
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def agree(self, value: Any) -> Any:
        said = [value if self.rank == 0 else None]
        dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def gather(self, value: Any) -> list[Any]:
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, value, group=self._group)
        return said

    def barrier(self) -> None:
        dist.barrier(group=self._group)


# How far one block's power may be off, as a fraction. Over blocks this averages out, and the interval over blocks shows
# it.
_MAX_ERROR = 0.1


class Read(NamedTuple):
    """The device's readings in a block; None for those that it lacks, or lacks for a block this short."""

    power_w: float | None = None
    clock_mhz: float | None = None


class Sensors:
    """Power and clock of this rank's device until closed; for CPUs, the host's first rank reads the package.

    Attributes:
        source: what power is read from; empty if there is no source.
        missing: why there is no source; empty if there is one.
    """

    def __init__(self) -> None:
        self.source, self.missing = "", ""
        self._sampler: Sampler | None = None
        identity = identify()
        if identity.vendor == CPU and os.environ.get("LOCAL_RANK", "0") != "0":
            return
        found = find_source(identity, utilisation=False)
        if isinstance(found, NoPower):
            self.missing = found.reason
            return
        self.source = f"{found.info.name}, {found.info.power_kind}"
        self._info = found.info
        self._sampler = Sampler(found)
        self._sampler.start()

    def between(self, start_ns: int, end_ns: int) -> Read:
        """Means over a block, as of ``time.perf_counter_ns``."""
        if self._sampler is None or end_ns <= start_ns:
            return Read()
        # The mode is irrelevant here: only the time range matters.
        segment = Segment(start_ns, end_ns, Mode.OVERLAPPED, 1)
        readings = self._sampler.readings(start_ns)
        found = [
            power
            for power in (
                counted_power(readings, [segment], self._info),
                sampled_power(readings, [segment], self._info, self._sampler.interval_s).mean,
            )
            if power is not None and power.error <= _MAX_ERROR
        ]
        power_w = min(found, key=lambda power: power.error).power_w if found else None
        return Read(power_w, mean_now(readings, [segment], readings.sm_clock_mhz))

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()


class Site:
    """Where a benchmark runs, on one rank: its device, the ranks, the device's sensors, and trials on the device.

    ``loop``: the loopback job; None on another link.
    """

    def __init__(self, device: torch.device, ranks: Ranks, sensors: Sensors, loop: Any = None) -> None:
        self.device = device
        self.ranks = ranks
        self.sensors = sensors
        self._loop = loop
        self._groups: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._by_ctas: dict[int, Any] = {}
        self.trials: HostTrials | CudaTrials = HostTrials()
        if device.type == "cuda":
            lead = torch.zeros(1, device=device)
            self.trials = CudaTrials(lambda: dist.all_reduce(lead, async_op=True))

    def group(self, text: str) -> tuple[Any, tuple[int, ...], Sequence[Sequence[int]]]:
        """This rank's process group for a text, its ranks, and the ranks of all such groups. Call it on all ranks."""
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
        """The process group of all ranks whose collectives use ``ctas`` thread blocks; 0 for the link's default."""
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
        """Wait until the device has finished what was issued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def open_site(plan: Plan, local_rank: int) -> Iterator[Site]:
    """Open a benchmark's process group or its loopback link, and the sensors of this rank's device."""
    if plan.threads:
        torch.set_num_threads(plan.threads)
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    with contextlib.ExitStack() as stack:
        ranks, loop = Ranks(), None
        if plan.link == LOOPBACK:
            loop = stack.enter_context(_loopback(plan))
        else:
            dist.init_process_group("gloo" if plan.link == GLOO else "cpu:gloo,cuda:nccl", timeout=TIMEOUT)
            stack.callback(dist.destroy_process_group)
            ranks = GroupRanks(TIMEOUT)
        sensors = stack.enter_context(contextlib.closing(Sensors()))
        yield Site(device, ranks, sensors, loop)


def _loopback(plan: Plan) -> AbstractContextManager[Any]:
    from overlap_callbacks.experiments.loopback.collectives import LoopSettings
    from overlap_callbacks.experiments.loopback.job import open_job

    speed = plan.link_gb_s
    return open_job(LoopSettings(plan.device) if speed is None else LoopSettings(plan.device, gb_s=speed))


def reduction(device: torch.device) -> tuple[Any, Callable[[int, torch.dtype], torch.Tensor]]:
    """The all-reduces' reduction, and a function that makes their message from a number of elements and a type.

    Means of random numbers do not change however often they are taken, and draw realistic power. Gloo has no means: it
    sums zeros.
    """
    if device.type == "cuda":
        return dist.ReduceOp.AVG, lambda count, dtype: torch.randn(count, device=device).to(dtype)
    return dist.ReduceOp.SUM, lambda count, dtype: torch.zeros(count, dtype=dtype)


# -- products and transfers, alone and at the same time

Call = Callable[[], object]


class Range(NamedTuple):
    """A start and an end, in nanoseconds of one clock."""

    start_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class Trial(NamedTuple):
    """One trial: consecutive calls of the products, and consecutive transfers, without pauses."""

    calls: tuple[Range, ...]
    transfers: tuple[Range, ...]

    @property
    def transfers_ms(self) -> float:
        """From the start of the first transfer to the end of the last one; there is at least one."""
        return Range(self.transfers[0].start_ns, self.transfers[-1].end_ns).ms

    def begun_beside(self) -> list[Range]:
        """The calls that began in the first half of the transfers' time; without transfers, all.

        Selecting calls by their start is unbiased. By their end, long calls would be dropped more often than short
        ones, because the end of the transfers cuts off a long one.
        """
        if not self.transfers:
            return list(self.calls)
        first, last = self.transfers[0].start_ns, self.transfers[-1].end_ns
        return [call for call in self.calls if first <= call.start_ns < (first + last) / 2]

    def covered(self) -> list[Range]:
        """Those of them that ended while transfers were in flight: all, unless a call takes half of that time."""
        begun = self.begun_beside()
        return [call for call in begun if not self.transfers or call.end_ns <= self.transfers[-1].end_ns]


# -- on a GPU


# Host time to issue a call or a transfer, and clock cycles in that time. The device sleeps meanwhile, so that a whole
# trial is issued before any of it runs.
_ISSUE_US = 40
_CYCLES_A_US = 2_000
# Calls must outlast the transfers, however much they slow each other down.
_MORE_CALLS = 2


class CudaTrials:
    """Runs products on the current stream, and transfers on the stream of their process group.

    A transfer's function issues it and returns its work. The transfers' marks are on a separate stream, which waits for
    each work, so that neither side waits for the other's marks.

    Args:
        lead: issues a tiny transfer and returns its work. Products begin when it is done, and the transfers behind it
            begin at the same time.
    """

    def __init__(self, lead: Call) -> None:
        self._lead = lead
        self._side = torch.cuda.Stream()

    def run(self, call: Call | None, calls: int, transfer: Call | None, transfers: int) -> Trial:
        """Run calls, transfers, or both at the same time.

        Args:
            call: issues the products that are timed together; None to run only transfers.
            calls: number of calls; with transfers, about as many as take the same time: twice as many are issued.
            transfer: issues a transfer; None to run only calls.
            transfers: number of transfers.
        """
        calls = 0 if call is None else calls if transfer is None else _MORE_CALLS * calls + 1
        transfers = 0 if transfer is None else transfers
        torch.cuda.synchronize()
        current = torch.cuda.current_stream()
        torch.cuda._sleep(_CYCLES_A_US * _ISSUE_US * (calls + transfers + 2))
        origin = _mark(current)
        marks: list[Any] = []
        if transfer is not None:
            lead: Any = self._lead()
            lead.wait()  # by the current stream, on the device
            self._side.wait_stream(current)
            marks.append(_mark(self._side))
            for _ in range(transfers):
                work: Any = transfer()
                with torch.cuda.stream(self._side):
                    work.wait()
                marks.append(_mark(self._side))
        steps = [_mark(current)]
        if call is not None:
            for _ in range(calls):
                call()
                steps.append(_mark(current))
        current.wait_stream(self._side)
        torch.cuda.synchronize()
        return Trial(_ranges(origin, steps), _ranges(origin, marks))


def _mark(stream: torch.cuda.Stream) -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _ranges(origin: Any, marks: Sequence[Any]) -> tuple[Range, ...]:
    times = [round(origin.elapsed_time(mark) * 1e6) for mark in marks]
    return tuple([Range(*pair) for pair in itertools.pairwise(times)])


# -- on the CPU


# Maximum wait for a transfer. The process group's own timeout is shorter.
_TIMEOUT_S = 300.0


class HostTrials:
    """Runs products on this thread, and transfers on a second one, which waits for each before starting the next.

    A transfer counts from its issue on this rank. So the ranks start together, after a barrier.
    """

    def run(self, call: Call | None, calls: int, transfer: Call | None, transfers: int) -> Trial:
        """As in ``CudaTrials``. With transfers, calls continue until those are done; the last one may end alone."""
        if transfer is None:
            return Trial(() if call is None else tuple([_timed(call) for _ in range(calls)]), ())
        beside = _Transfers(transfer, transfers)
        beside.begin()
        done: list[Range] = []
        while call is not None and beside.running:
            done.append(_timed(call))
        return Trial(tuple(done), tuple(beside.end()))


class _Transfers:
    def __init__(self, transfer: Call, count: int) -> None:
        self._transfer, self._count = transfer, count
        self._began = threading.Event()
        self._ranges: list[Range] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="overlap-bench-transfers", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def begin(self) -> None:
        """Start, and wait until the first transfer is about to be issued."""
        self._thread.start()
        self._began.wait(_TIMEOUT_S)

    def end(self) -> list[Range]:
        self._thread.join(_TIMEOUT_S * self._count)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError("a collective has not ended in time")
        return self._ranges

    def _run(self) -> None:
        try:
            self._began.set()
            for _ in range(self._count):
                self._ranges.append(_timed(self._transfer))
        except BaseException as error:
            self._error = error


def _timed(call: Call) -> Range:
    start = time.perf_counter_ns()
    call()
    return Range(start, time.perf_counter_ns())
